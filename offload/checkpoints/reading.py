"""What the runs of others left, to be read and not gone on with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from offload.checkpoints import state
from offload.checkpoints.manager import STATE_NAME, CheckpointManager, whole_checkpoints
from offload.models.protocol import ModelFormat


class SavedRuns:
    """A :class:`offload.models.protocol.SavedRuns`: runs of these recipes."""

    def newest(self, folder: Path) -> Path | None:
        checkpoints = whole_checkpoints(folder)
        return checkpoints[-1] if checkpoints else None

    def config(self, folder: Path) -> Mapping[str, Any] | None:
        if not (folder / STATE_NAME).is_file():
            return None
        config: Mapping[str, Any] = state.read(folder / STATE_NAME)["recipe_state"]["config"]
        return config

    def adapter(self, folder: Path, format: ModelFormat) -> Mapping[str, Tensor] | None:
        with tempfile.TemporaryDirectory() as nowhere:
            return CheckpointManager(format, nowhere).load(folder).adapter
