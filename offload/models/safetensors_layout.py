"""Where tensors lie in a safetensors file that is yet to be written, so that several processes can write parts of it.

Source of the layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""In the order in which safetensors writes the tensors of a file: those that need the widest alignment first."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: position for position, dtype in enumerate(DTYPES.values())}
_ALIGNMENT = 8


def lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """What a file of tensors begins with, byte for byte as ``safetensors.torch.save_file`` writes it.

    Args:
        tensors: by name; only dtypes and shapes are looked at.

    Returns:
        (the header, where in the file each tensor begins, the file's size in bytes)
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor = tensors[name]
        offsets[name], end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + at for name, at in offsets.items()}, start + end
