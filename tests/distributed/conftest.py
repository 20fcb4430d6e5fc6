"""Ranks for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.ranks import Ranks
from tests.recipes.conftest import _workspace, workspace  # noqa: F401


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.fixture
def mesh_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """In this process, which is the first of two ranks without the other: its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a process group replaces
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()
