"""Which attention kernels a model of transformers may be asked for."""

from __future__ import annotations

import torch

from offload.component import nearest
from offload.errors import UserError

KNOWN = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3", "flash_attention_4": "flash-attn-4"}
KEY = "model.attn_implementation"
LEAVE_OUT = "leave it out for sdpa, or eager where the model has no sdpa"


def check_attention(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse kernels that nobody has, or that cannot train on ``device`` in ``dtype``.

    Args:
        name: one of :data:`KNOWN`; ``OWNER/KERNEL`` of the Hub, which the package ``kernels`` loads; None for any.

    Raises:
        UserError: names the key, the nearest that there is, and the way out.
    """
    if name is None or "/" in name:
        return
    if name not in KNOWN:
        near = nearest(name, KNOWN)
        meant = f", did you mean {near}?" if near else "."
        raise UserError(f"{KEY}: there is no {name!r}{meant} Expected one of {', '.join(KNOWN)}; {LEAVE_OUT}")
    if device.type == "cpu" and name == "flex_attention":
        raise UserError(f"{KEY}: flex_attention has no backward on the CPU; {LEAVE_OUT}")
    if name.startswith("flash_attention"):
        if device.type == "cpu":
            raise UserError(f"{KEY}: {name} needs a GPU, and device is cpu; {LEAVE_OUT}")
        if dtype not in (torch.bfloat16, torch.float16):
            raise UserError(f"{KEY}: {name} computes in bf16 and fp16 alone; set dtype=bf16, or {LEAVE_OUT}")


def not_usable(name: str, reason: str) -> UserError:
    """What to tell when transformers refuses kernels for a ``reason`` of its own."""
    missing = "kernels" if "/" in name else PACKAGES.get(name)
    if missing is not None and "installed" in reason:
        return UserError(
            f"{KEY}: {name} needs {missing}, which is not installed: pip install {missing}; or {LEAVE_OUT}"
        )
    return UserError(f"{KEY}={name}: {reason}: leave it out for one that the model can use")
