"""Folders whose weights are stored quantised: what becomes of them in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload.errors import UserError

DEQUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats in which models are published, and transformers' class for each: their weights become plain ones."""


def stored_format(folder: Path) -> str | None:
    """How the weights in a model's folder are quantised, by ``config.json``; None where they are not."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        section = part.get("quantization_config") if isinstance(part, dict) else None
        if section:
            return str(section.get("quant_method", "an unnamed method") if isinstance(section, dict) else section)
    return None


def loading_arguments(folder: Path) -> dict[str, Any]:
    """What ``from_pretrained`` has to be told, so that the weights can be trained.

    Raises:
        UserError: for a format that is for inference.
    """
    import transformers

    stored = stored_format(folder)
    if stored is None:
        return {}
    if stored not in DEQUANTIZED:
        raise UserError(
            f"model.path: the weights in {folder} are quantised ({stored}) and cannot be trained: give the folder of "
            f"the original model; of quantised ones only {' and '.join(DEQUANTIZED)} are read, as plain weights"
        )
    return {"quantization_config": getattr(transformers, DEQUANTIZED[stored])(dequantize=True)}
