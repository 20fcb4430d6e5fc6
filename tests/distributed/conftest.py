"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks
from tests.recipes.conftest import _workspace, workspace  # noqa: F401


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()
