"""What the studies of the packed AdamW share: gradients, and how records are described and rounded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"


def gradient_scales(rows: int, columns: int, draw: torch.Generator, six_decades: bool = False) -> Tensor:
    """Of synthetic gradients, ``[rows, columns]``: log-normal over rows and within them, or six decades in each row."""
    shape = (rows, columns)
    scale = 1e-3 * torch.randn(rows, 1, generator=draw).exp() * torch.randn(shape, generator=draw).exp()
    return 10 ** (-6 * torch.rand(shape, generator=draw)) if six_decades else scale


def significant(value: Any) -> Any:
    """Floats to three significant digits, in dicts and lists too."""
    return _each_float(value, lambda number: float(f"{number:.3g}"))


def rounded(value: Any) -> Any:
    """Floats to four decimals, in dicts and lists too."""
    return _each_float(value, lambda number: round(number, 4))


def _each_float(value: Any, change: Callable[[float], float]) -> Any:
    if isinstance(value, dict):
        return {key: _each_float(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_each_float(inner, change) for inner in value]
    return change(value) if isinstance(value, float) else value


def description(study: str, command: str, *packages: str) -> dict[str, Any]:
    """What every record begins with; ``packages`` matter beside torch, torchao and bitsandbytes."""
    versions = {name: version(name) for name in ("torch", "torchao", "bitsandbytes", *packages)}
    return {"study": study, "command": command, "date": time.strftime("%Y-%m-%d"), "versions": versions}


def save(record: dict[str, Any], path: Path, line: str) -> None:
    """As JSON, with a line for each object whose first key is ``line``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, separators=(",", ":"))
    path.write_text(text.replace(f'{{"{line}"', f'\n{{"{line}"') + "\n", encoding="utf-8")
