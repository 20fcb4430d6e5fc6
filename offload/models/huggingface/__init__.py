"""Causal language models of transformers."""

from offload.models.huggingface.adapter import AdaptedModel
from offload.models.huggingface.loading import from_pretrained
from offload.models.huggingface.model import HuggingFaceModel

__all__ = ["AdaptedModel", "HuggingFaceModel", "from_pretrained"]
