"""Optimizers of our own, with packed states: ``offload.optim.AdamW`` and ``Adam``."""

from offload.optim.adamw import Adam, AdamW
from offload.optim.interchange import from_plain, to_plain, unpacked

__all__ = ["Adam", "AdamW", "from_plain", "to_plain", "unpacked"]
