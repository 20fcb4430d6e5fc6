"""Lets torchtune 0.6.1 import and work with torchao 0.16 to 0.18.

torchtune is frozen at 0.6.1 and imports names which torchao has since moved or removed:

==========================================  ============================================================
name                                        what happened to it
==========================================  ============================================================
``torchao.dtypes.nf4tensor``                moved in 0.18 to ``torchao.quantization.quantize_.workflows.nf4``
``torchao.dtypes.NF4Tensor, to_nf4``        left with it
``torchao.dtypes.TensorCoreTiledLayout``    removed in 0.18
``int4_weight_only`` and                    removed in 0.16 from ``torchao.quantization``
``int8_dynamic_activation_int4_weight``
==========================================  ============================================================

NF4 (what QLoRA rests on) is restored whole. The removed names served torchtune's post-training quantizers
only; they come back as stand-ins which raise when used, so that importing works and using them says why it
does not.

:func:`install` has to run before torchtune is imported. In an installed environment that happens by itself
(``offload/_startup.py``); in a plain checkout whoever imports torchtune first calls it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

_NF4_MODULE = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
_NF4_OLD_MODULE = "torchao.dtypes.nf4tensor"

_installed = False


def install() -> None:
    """Restores the names that this torchao lacks, which may be none. Repeated calls cost nothing.

    Imports torchao (and so torch). Without torchao nothing happens: torchtune's own message says what to do.
    """
    global _installed
    if _installed or importlib.util.find_spec("torchao") is None:
        return
    _import_quietly("torchao")
    dtypes = _import_quietly("torchao.dtypes")
    quantization = _import_quietly("torchao.quantization")

    if importlib.util.find_spec(_NF4_OLD_MODULE) is None:
        nf4 = importlib.import_module(_NF4_MODULE)
        sys.modules[_NF4_OLD_MODULE] = nf4
        _set_missing(dtypes, nf4tensor=nf4, NF4Tensor=nf4.NF4Tensor, to_nf4=nf4.to_nf4)
    _set_missing(dtypes, TensorCoreTiledLayout=_stand_in("torchao.dtypes.TensorCoreTiledLayout"))
    for name in ("int4_weight_only", "int8_dynamic_activation_int4_weight"):
        _set_missing(quantization, **{name: _stand_in(f"torchao.quantization.{name}")})
    _installed = True


def _set_missing(module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def _stand_in(path: str) -> type:
    """A class with the name of the removed object ``path``, whose construction (or call) raises."""
    name = path.rpartition(".")[2]

    def __init__(self: object, *args: Any, **kwargs: Any) -> None:
        import torchao

        raise NotImplementedError(
            f"{path} does not exist in torchao {torchao.__version__}, and torchtune 0.6.1's post-training "
            f"quantizers need it: quantize the saved checkpoint with torchao's own quantize_ instead"
        )

    return type(name, (), {"__init__": __init__, "__module__": __name__, "__doc__": f"Stand-in for {path}."})


class _DropUnusedKernels(logging.Filter):
    """Drops torchao's complaints about compiled kernels that do not load here: none of them is used."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not (
            message.startswith(("Failed to load", "Skipping import of cpp extensions"))
            or "is an Enum subclass and is now natively supported" in message
        )


def _import_quietly(name: str) -> ModuleType:
    """Imports ``name`` without the lines that torchao writes to stderr about itself at import."""
    dropping = _DropUnusedKernels()
    loggers = [logging.getLogger(n) for n in (None, "torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(dropping)
    try:
        return importlib.import_module(name)
    finally:
        for logger in loggers:
            logger.removeFilter(dropping)
