"""What a process takes while it loads, saves and resumes, run on every rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.recipes.conftest import ROOT, load_module

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
_M_MMAP_THRESHOLD = -3


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Inside, this process's anonymous memory is looked at all the time; afterwards, by how many bytes it grew."""
    script = load_module(ROOT / "scripts" / "distributed_memory.py")
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)  # what is freed goes back to the system
    gc.collect()
    seen = [script.anonymous_bytes(os.getpid())]
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(script.anonymous_bytes(os.getpid()))
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield (grown := [0])
    finally:
        is_over.set()
        thread.join()
    grown[0] = max(seen) - seen[0]


def phases(base: str, out: str, loads_whole: bool) -> dict[str, int]:
    """Bytes by which memory grew: at most while loading, while saving, while resuming."""
    from offload.checkpoints.manager import CheckpointManager
    from offload.training.resume import put_back

    script: Any = load_module(ROOT / "scripts" / "distributed_memory.py")
    source = script.source_of(base)
    manager = CheckpointManager(source.format, out)
    count = torch.distributed.get_world_size()
    with peak() as loading:
        parts, optimizer = script.begin(source, 1 if loads_whole else count, None, None)
    if loads_whole:
        return {"loading": loading[0]}
    for param in parts.module.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    with peak() as saving:
        state = {"optimizer": optimizer.state_dict(), "config": {"checkpointer": {}}}
        folder = manager.save(1, model=parts.module.state_dict(), recipe_state=state)
    del parts, optimizer, state
    with peak() as resuming:
        loaded = manager.load(folder)
        parts, optimizer = script.begin(source, count, None, folder)
        put_back(loaded.recipe_state, optimizer, None, folder)
    return {"loading": loading[0], "saving": saving[0], "resuming": resuming[0]}
