"""Models of torchtune's builders."""

from offload.models.torchtune.model import AdaptedTorchtuneModel, TorchtuneModel

__all__ = ["AdaptedTorchtuneModel", "TorchtuneModel"]
