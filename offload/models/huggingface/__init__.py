"""Causal language models of transformers."""

from offload.models.huggingface.adapter import AdaptedModel
from offload.models.huggingface.loading import load
from offload.models.huggingface.model import HuggingFaceModel

__all__ = ["AdaptedModel", "HuggingFaceModel", "load"]
