"""Models of torchtune's builders."""

from offload.models.torchtune.model import TorchtuneModel

__all__ = ["TorchtuneModel"]
