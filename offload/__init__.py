"""Fine-tuning with the optimizer offloaded to host memory.

``offload.OffloadOptimizer`` is a ``torch.optim.Optimizer`` for any PyTorch loop; it needs torch alone.
``offload.TorchAOCPUOffloadOptimizer`` wraps torchao's offloader the same way, for comparison.
``offload.OffloadTrainerMixin`` lets Hugging Face's ``Trainer`` clip and accumulate gradients that were taken.

Importing this package imports nothing else: every Python start of the environment passes through here (see
``offload/_startup.py``), and ``tune --help`` has to answer at once. The classes are loaded when first named.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would double the cost of this import; type checkers know this name
if TYPE_CHECKING:
    from typing import Any

    from offload.optimizer import OffloadOptimizer
    from offload.peers import TorchAOCPUOffloadOptimizer
    from offload.trainer import OffloadTrainerMixin

__version__ = "0.1.0"

__all__ = ["OffloadOptimizer", "OffloadTrainerMixin", "TorchAOCPUOffloadOptimizer", "__version__"]

_LAZY = {
    "OffloadOptimizer": "offload.optimizer",
    "OffloadTrainerMixin": "offload.trainer",
    "TorchAOCPUOffloadOptimizer": "offload.peers",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
