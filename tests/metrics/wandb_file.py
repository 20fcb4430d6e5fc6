"""Reads what wandb wrote to disk (``run-<id>.wandb``), for tests.

The file is a LevelDB log (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind a header of
seven bytes, and its records are protobuf messages ``wandb_internal.Record``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = b":W&B"
BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """Attributes: run id, project, tags, config by key, history rows (with ``_step``), summary, exit code."""

    run_id: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read_run(path: Path) -> OfflineRun:
    """Reads the one run below ``path``: a ``.wandb`` file, a run's folder or an output folder."""
    if path.is_dir():
        files = list(path.rglob("run-*.wandb"))
        assert len(files) == 1, files
        path = files[0]
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for content in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.project, run.tags = record.run.run_id, record.run.project, list(record.run.tags)
            run.config.update(_items(record.run.config.update))
        elif kind == "config":
            run.config.update(_items(record.config.update))
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary.update(_items(record.summary.update))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(content: bytes) -> Iterator[bytes]:
    assert content[:4] == HEADER, content[:8]
    position, record = 7, b""
    while position < len(content):
        room = BLOCK - position % BLOCK
        if room < 7:  # a block's last bytes cannot hold a header
            position += room
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", content, position)
        chunk = content[position + 7 : position + 7 + length]
        position += 7 + length
        record = chunk if kind in (FULL, FIRST) else record + chunk
        if kind in (FULL, LAST):
            yield record
