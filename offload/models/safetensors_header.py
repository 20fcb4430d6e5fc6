"""What a safetensors file says of itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> ``{dtype, shape, data_offsets}``, without its metadata.

    Source of the layout: https://github.com/huggingface/safetensors#format

    Raises:
        ValueError: if it is not such a file, or its size is not the one that the header tells.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if length < 2 or 8 + length > size:
            raise ValueError("it does not begin with the header of a safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((_end_of(entry) for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ValueError("its header is damaged") from error
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes where its header tells of {8 + length + end}")
    return header


def _end_of(entry: Mapping[str, Any]) -> int:
    start, end = entry["data_offsets"]
    numbers = [start, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor is not described by a dtype, a shape and offsets")
    return end
