"""Checkpoints of a training run: saving, finding the newest, resuming.

A run leaves ``output_dir/step_<n>``. With a full model the folder is what ``from_pretrained`` of transformers
loads; an adapter is in ``step_<n>/adapter``, which peft loads; ``recipe_state.pt`` holds what a resumed run
needs besides. The adapter has a folder of its own because transformers, where peft is installed, takes a
folder with an ``adapter_config.json`` for an adapter and leaves the (merged) model beside it unread.

A folder named ``step_<n>`` is whole: it is written under another name, forced to the disk and then renamed. What
became of it on the disk since, the checksums in its manifest tell.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shutil
import stat
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from offload.checkpoints import folders as checkpoint_folders
from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints import shared_states
from offload.checkpoints import state as state_file
from offload.checkpoints.beside import Beside, Counted
from offload.checkpoints.disk_space import free_bytes, size
from offload.checkpoints.manifest import FORMAT, MANIFEST_NAME, DamagedCheckpoint, whole_checkpoints
from offload.checkpoints.sums import checksum
from offload.distributed.world import World, current
from offload.engine.copy_on_write import Snapshot, Source, Unchanging
from offload.engine.shards import is_distributed, local
from offload.errors import UserError, first_line, raise_shortage
from offload.models.protocol import ModelFormat
from offload.models.safetensors_header import read_safetensors_header
from offload.models.shares import Plan, begin_files, empty_like, write_share
from offload.models.tensors import whole
from offload.paths import expanded

logger = logging.getLogger(__name__)

ADAPTER_DIR = "adapter"
STATE_NAME = "recipe_state.pt"
Explained = Callable[[], "contextlib._GeneratorContextManager[None]"]
# Headers, indexes and the file system's own blocks, on top of the tensors.
_SPARE_BYTES = 4 * 2**20


@dataclass
class Loaded:
    """What a checkpoint holds.

    Attributes:
        model: the model's names, on the CPU; None where the checkpoint has an adapter, since training goes on
            from the base model and the adapter then, not from merged weights; and where the model reads its weights
            from the folder itself, as it does wherever several processes share it.
        adapter: the model's names, on the CPU; None for full fine-tuning.
        recipe_state: as it was given to :meth:`CheckpointManager.save`. Its tensors are mapped from the file:
            copy what is kept for long, or a deleted checkpoint goes on occupying the disk.
        step: the step after which it was saved.
    """

    model: dict[str, Tensor] | None
    adapter: dict[str, Tensor] | None
    recipe_state: dict[str, Any]
    step: int


@dataclass
class _Begun:
    """A checkpoint that is being written.

    Attributes:
        step: as its name says.
        final: the folder's name when it is whole.
        temporary: until then.
        shared: states of the optimizer that have files of their own.
        best: a checkpoint that is kept besides the last ones.
        needed: bytes of disk.
        explained: what writes to the disk is called in this.
        write_rest: writes all but weights and ``shared``; returns checksums.
    """

    step: int
    final: Path
    temporary: Path
    shared: dict[str, Tensor]
    best: Path | None
    needed: int
    explained: Explained
    write_rest: Callable[[], dict[str, str]]

    def give_up(self, world: World) -> None:
        """Leave nothing of it."""
        if world.is_main:
            shutil.rmtree(self.temporary, ignore_errors=True)


class CheckpointManager:
    """Keeps the checkpoints of one run.

    "Newest" means saved last, not highest step: a run that went back to an earlier checkpoint resumes from
    what it saved since.

    Args:
        format: how the model's weights are read and written.
        output_dir: folder of the run; created if need be.
        keep_last_n: how many checkpoints to keep, None for all.

    Raises:
        UserError: if ``output_dir`` cannot be written, or lies in the base model's folder.
    """

    def __init__(self, format: ModelFormat, output_dir: str | Path, *, keep_last_n: int | None = None) -> None:
        if keep_last_n is not None and (isinstance(keep_last_n, bool) or keep_last_n < 1):
            raise UserError(f"keep_last_n: got {keep_last_n}, expected at least 1, or null to keep all checkpoints")
        self.keep_last_n = keep_last_n
        self.best: Path | None = None
        """A checkpoint that is kept besides the last ones."""
        self.output_dir = output_folder(output_dir)
        self.format = format
        _check_apart(format, self.output_dir)
        _check_writable(self.output_dir)
        self._damaged: set[Path] = set()
        format.prepare(self.output_dir)

    # ----------------------------------------------------------------------------------------- loading

    def latest(self) -> Path | None:
        """The newest whole checkpoint in ``output_dir``, or None.

        Removes what killed processes left behind.
        """
        checkpoint_folders.clean(self.output_dir)
        checkpoints = whole_checkpoints(self.output_dir)
        return checkpoints[-1] if checkpoints else None

    def load_newest(self) -> tuple[Path, Loaded] | None:
        """The newest checkpoint in ``output_dir`` that is not damaged; None if there is none.

        A line tells of each damaged one, which is the first to be deleted from here on.
        """
        for path in reversed(current().from_main(self._whole)):
            try:
                return path, self.load(path)
            except DamagedCheckpoint as error:
                logger.warning("skipped: %s", error)
                self._damaged.add(path)
        return None

    def _whole(self) -> list[Path]:
        checkpoint_folders.clean(self.output_dir)
        return whole_checkpoints(self.output_dir)

    def load_chosen(self, name: str) -> tuple[Path, Loaded]:
        """The checkpoint of that name in ``output_dir`` (``step_20``), or in the folder of that path.

        Raises:
            UserError: as :meth:`load`.
        """
        path = self.output_dir / name
        if not path.is_dir():
            path = expanded(name, "resume_from_checkpoint").absolute()
        if not path.is_dir():
            here = [checkpoint.name for checkpoint in whole_checkpoints(self.output_dir)]
            raise UserError(
                f"resume_from_checkpoint: there is no folder {name}, neither in {self.output_dir} nor as a path; give "
                "auto or True for the newest checkpoint, False to start anew, or one of "
                f"{', '.join(here) or '(none there)'}"
            )
        inside = whole_checkpoints(path)
        if inside and not (path / MANIFEST_NAME).exists():
            names = ", ".join(checkpoint.name for checkpoint in inside)
            raise UserError(
                f"resume_from_checkpoint: {path} is a run's folder, expected one of its checkpoints ({names}): give "
                f"{inside[-1]}, the newest"
            )
        return path, self.load(path)

    def load(self, path: str | Path) -> Loaded:
        """Reads a checkpoint that :meth:`save` wrote in any number of processes.

        Where several processes train, every one of them has to call it; each takes its part of the weights from the
        files later, when it has the model, and of the states when they are put back.

        Raises:
            DamagedCheckpoint: if it is incomplete or damaged.
            UserError: if it is none, or another model's.
        """
        path = Path(path).expanduser().absolute()
        manifest = checkpoint_manifest.read(path)
        world = current()
        # Each process reads a part of the files, and all learn whether one of them is damaged.
        problem = checkpoint_manifest.difference(path, manifest, sorted(manifest.sums)[world.rank :: world.size])
        for message in filter(None, world.gathered(problem)):
            raise DamagedCheckpoint(message)
        adapter, state = _read_state(path)
        model = None
        if adapter is None:
            names = [name for name in manifest.sizes if "/" not in name and name.endswith(".safetensors")]
            for name in names:
                try:
                    read_safetensors_header(path / name)
                except (OSError, ValueError) as error:
                    raise DamagedCheckpoint(
                        f"{path / name} is damaged: {error}: resume from another checkpoint"
                    ) from error
            try:
                model = None if world.size > 1 else self.format.load(path, names)
            except (UserError, MemoryError):
                raise
            except Exception as error:  # it reads config.json
                raise_shortage(error)
                raise DamagedCheckpoint(
                    f"{path} is damaged ({first_line(error)}): resume from another checkpoint"
                ) from error
        return Loaded(model=model, adapter=adapter, recipe_state=state, step=manifest.step)

    # ------------------------------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor] | None,
        recipe_state: Mapping[str, Any],
        adapter: Mapping[str, Tensor] | None = None,
        adapter_config: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes ``output_dir/step_<step>``, replacing one of that name, and then deletes what is too old.

        Where several processes train, every one of them has to call it, with its parts of weights and states: each
        writes those, and the folder gets its name when all are done.

        Nothing that is given is modified, and nothing of it may change until this returns: tensors of the CPU
        are written from where they are, those of an accelerator by way of the host, a part
        of the model at once.

        Args:
            step: optimizer steps done.
            model: the full model (for LoRA the merged one) under the model's names, or None.
            recipe_state: nested dicts, lists and tuples of tensors and Python scalars.
            adapter: LoRA or DoRA tensors under the model's names.
            adapter_config: with ``adapter``: fields of peft's ``LoraConfig``, with the model's names.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: if the disk is full or cannot be written. No part of the checkpoint remains then, and
                earlier ones are untouched.
            TypeError: if ``recipe_state`` holds what could not be read back.
            ValueError: if the adapter or its configuration is not one.
        """
        world = current()
        begun = self._begin(step, model, recipe_state, adapter, adapter_config)
        try:
            sums = {} if model is None else self._write_model(begun, model, world)
            with world.together(), begun.explained():
                shared_states.write(begun.temporary, begun.shared)
            sums |= world.from_main(begun.explained()(begun.write_rest))
            self._finish(begun, world, sums)
        except BaseException:
            begun.give_up(world)
            raise
        return begun.final

    def save_beside(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor] | None,
        recipe_state: Mapping[str, Any],
        snapshot: Snapshot | None,
        world: World,
        adapter: Mapping[str, Tensor] | None = None,
        adapter_config: Mapping[str, Any] | None = None,
    ) -> Beside:
        """As :meth:`save`, but weights and states are written beside what the caller does next, the rest before this
        returns.

        Args:
            step, model, recipe_state, adapter, adapter_config: as there.
            snapshot: has the weights and states of now that change meanwhile; closed when all is written. States that
                it does not hold are written before this returns, weights may not change until all is written.
            world: the processes, which talk by a group of its own (:meth:`World.apart`).

        Raises:
            UserError, TypeError, ValueError: as there.
        """
        source: Source = Unchanging() if snapshot is None else snapshot
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(source.close)

            def is_apart(tensor: Tensor) -> bool:
                return is_distributed(tensor) or (snapshot is not None and snapshot.holds(tensor))

            def position(name: str) -> float:
                if model is None or snapshot is None:  # and merged weights are made when they are written
                    return math.inf
                return snapshot.position(local(model[name]))

            main = current()
            begun = self._begin(step, model, recipe_state, adapter, adapter_config, is_apart)
            unless_begun.callback(begun.give_up, main)
            shared = dict(sorted(begun.shared.items(), key=lambda item: source.position(local(item[1]))))
            if snapshot is None:
                with main.together(), begun.explained():
                    shared_states.write(begun.temporary, shared)
                shared = {}
            sums = main.from_main(begun.explained()(begun.write_rest))
            plan = None if model is None else self._plan(begun, model, main, position)
            if snapshot is not None:
                weights = [local(model[name]) for name in plan.uses()] if model is not None and plan is not None else []
                snapshot.expect([*weights, *map(local, shared.values())])
            values = Counted(source)

            def work() -> None:
                try:
                    with world.together(), begun.explained():
                        if model is not None and plan is not None:
                            convert = self.format.in_files
                            write_share(begun.temporary, plan, model, convert, world=world, source=values)
                    with world.together(), begun.explained():
                        shared_states.write_from(begun.temporary, shared, values, world)
                    self._finish(begun, world, sums)
                except BaseException:
                    begun.give_up(world)
                    raise

            beside = Beside(begun.final, work, values, begun.needed)
            unless_begun.pop_all()
            return beside

    def _begin(
        self,
        step: int,
        model: Mapping[str, Tensor] | None,
        recipe_state: Mapping[str, Any],
        adapter: Mapping[str, Tensor] | None,
        adapter_config: Mapping[str, Any] | None,
        is_apart: Callable[[Tensor], bool] = is_distributed,
    ) -> _Begun:
        """Make room and a folder for a checkpoint."""
        if model is None and adapter is None:
            raise ValueError("a checkpoint needs a model, an adapter or both")
        if adapter is not None and adapter_config is None:
            raise ValueError("adapter_config is required with adapter")
        world = current()
        world.from_main(lambda: checkpoint_folders.clean(self.output_dir))
        recipe_state, shared = _without_shared_states(recipe_state, is_apart)
        adapter = None if adapter is None else {name: whole(tensor) for name, tensor in adapter.items()}
        state = _prepare_state(recipe_state, adapter)
        final = self.output_dir / f"step_{step}"
        needed = state.nbytes + _nbytes(model) + _nbytes(adapter) + _nbytes(shared) + _SPARE_BYTES
        world.from_main(lambda: self._check_space(final, needed))
        temporary = world.from_main(lambda: checkpoint_folders.sibling(final, "tmp"))

        def write_rest() -> dict[str, str]:
            if adapter is not None:
                assert adapter_config is not None
                self.format.write_adapter(temporary / ADAPTER_DIR, adapter, adapter_config)
            checksum = _write_state(temporary / STATE_NAME, state)
            _allow_as_usual(temporary)
            return {STATE_NAME: checksum}

        explained = functools.partial(self._explained, final, needed)
        begun = _Begun(step, final, temporary, shared, self.best, needed, explained, write_rest)
        try:
            world.from_main(explained()(lambda: temporary.mkdir(parents=True)))
        except BaseException:
            begun.give_up(world)
            raise
        return begun

    def _finish(self, begun: _Begun, world: World, sums: dict[str, str]) -> None:
        """Give a folder that holds everything its name, and delete what is too old."""

        def finish() -> None:
            self._write_manifest(begun.temporary, begun.step, sums)
            checkpoint_folders.fsync_tree(begun.temporary)
            checkpoint_folders.publish(begun.temporary, begun.final)

        if world.size > 1:
            sums |= _sums_by_all(begun.temporary, world, begun.explained, without=sums)
        world.from_main(begun.explained()(finish))
        world.from_main(lambda: self._delete_old(begun.final, begun.best))

    def _plan(
        self, begun: _Begun, model: Mapping[str, Tensor], world: World, position: Callable[[str], float] | None = None
    ) -> Plan:
        """Files for a model's weights, and who writes what into them."""
        empty = empty_like(model)

        def begin() -> Plan:
            files = self.format.begin_model(begun.temporary, empty)
            return begin_files(begun.temporary, files, empty, self.format.in_files, position or (lambda name: 0.0))

        return world.from_main(begun.explained()(begin))

    def _write_model(self, begun: _Begun, model: Mapping[str, Tensor], world: World) -> dict[str, str]:
        """The model, by all processes, each its part; returns checksums that are known already."""
        sums = {}

        def written(file: Path) -> None:
            sums[file.name] = checksum(file)  # while it is in the page cache

        if world.size == 1:
            with begun.explained():
                self.format.write_model(begun.temporary, model, written)
            return sums
        plan = self._plan(begun, model, world)
        with world.together(), begun.explained():
            write_share(begun.temporary, plan, model, self.format.in_files)
        return sums

    @contextlib.contextmanager
    def _explained(self, final: Path, needed: int) -> Iterator[None]:
        """Turns a failure to write into what a user can mend."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise self._cannot_save(final, needed, free_bytes(self.output_dir), first_line(error)) from error

    def _write_manifest(self, folder: Path, step: int, sums: Mapping[str, str]) -> None:
        sequence = checkpoint_manifest.next_sequence(self.output_dir)
        checkpoint_manifest.write(folder, step=step, sequence=sequence, sums=sums)

    def _check_space(self, final: Path, needed: int) -> None:
        free = free_bytes(self.output_dir)
        if free is not None and free < needed:
            raise self._cannot_save(final, needed, free, "the disk is too full")

    def _cannot_save(self, final: Path, needed: int, free: int | None, reason: str) -> UserError:
        there = "" if free is None else f", {size(free)} are free"
        way_out = "free some space or choose another output_dir"
        if self.keep_last_n is None:
            way_out = "free some space, set keep_last_n, or choose another output_dir"
        return UserError(
            f"cannot save the checkpoint {final}: {reason}; it needs {size(needed)}{there}: {way_out} "
            "(earlier checkpoints are untouched)"
        )

    def _delete_old(self, newest: Path, best: Path | None) -> None:
        if self.keep_last_n is None:
            return
        self._damaged.discard(newest)
        others = [path for path in whole_checkpoints(self.output_dir) if path not in (newest, best)]
        others.sort(key=lambda path: path not in self._damaged)
        for path in others[: max(0, len(others) - (self.keep_last_n - 1))]:
            # This run may have started from a checkpoint that an earlier run left in the same folder.
            if path.resolve() != self.format.directory.resolve():
                checkpoint_folders.delete(path)


# ----------------------------------------------------------------------------------------------- files


def _prepare_state(state: Mapping[str, Any], adapter: Mapping[str, Tensor] | None) -> state_file.Prepared:
    prepared = state_file.Prepared(state)
    kept = None if adapter is None else state_file.Prepared(adapter, "adapter")
    prepared.value = {"recipe_state": prepared.value, "adapter": None if kept is None else kept.value}
    prepared.nbytes += 0 if kept is None else kept.nbytes
    return prepared


def _write_state(path: Path, state: state_file.Prepared) -> str:
    return state_file.write({"format": FORMAT, **state.value}, path)


def _without_shared_states(
    state: Mapping[str, Any], is_apart: Callable[[Tensor], bool]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(a recipe's state without the optimizer's states that are written apart, those)"""
    optimizer = state.get("optimizer")
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state"), Mapping):
        return dict(state), {}
    rest, shared = shared_states.split(optimizer["state"], is_apart)
    return {**state, "optimizer": {**optimizer, "state": rest}}, shared


def _sums_by_all(folder: Path, world: World, explained: Explained, without: Container[str]) -> dict[str, str]:
    """Checksums of a folder's files, computed by all processes."""

    def list_files() -> list[str]:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return [name for name in names if name not in without]

    names = world.from_main(list_files)
    with world.together(), explained():
        mine = {name: checksum(folder / name) for name in names[world.rank :: world.size]}
    return {name: text for sums in world.gathered(mine) for name, text in sums.items()}


def _read_state(folder: Path) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
    """(adapter, recipe_state)"""
    path = folder / STATE_NAME
    try:
        content = state_file.read(path)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        adapter, state = content["adapter"], content["recipe_state"]
        if not isinstance(state, dict):
            raise TypeError(f"recipe_state is a {type(state).__name__}")
        if adapter is not None and not (
            isinstance(adapter, dict) and adapter and all(isinstance(value, Tensor) for value in adapter.values())
        ):
            raise TypeError("adapter is empty, or holds what is no tensor")
        if shared_states.SavedStates.are_in(folder):
            states = shared_states.SavedStates(folder, state["optimizer"]["state"])
            state = {**state, "optimizer": {**state["optimizer"], "state": states}}
    except MemoryError:
        raise
    except Exception as error:  # PyTorch's unpickler raises whatever a damaged file leads it into
        raise_shortage(error)
        raise DamagedCheckpoint(f"{path} is damaged ({first_line(error)}): resume from another checkpoint") from error
    return adapter, state


def _allow_as_usual(folder: Path) -> None:
    """Gives weight files the permissions of any new file: safetensors makes them readable by their owner alone."""
    usual = stat.S_IMODE((folder / STATE_NAME).stat().st_mode)
    for path in folder.rglob("*.safetensors"):
        path.chmod(usual)


def _check_apart(format: ModelFormat, output_dir: Path) -> None:
    base, out = format.directory.resolve(), output_dir.resolve()
    if out == base or base in out.parents:
        raise UserError(
            f"output_dir: {output_dir} is {'' if out == base else 'inside '}{format.key}: choose another output_dir"
        )


def output_folder(output_dir: str | Path) -> Path:
    """``output_dir`` as an absolute path; UserError where it is none."""
    return expanded(output_dir, "output_dir").absolute()


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name, so a kill leaves nothing
            pass
    except OSError as error:
        raise UserError(
            f"output_dir: cannot write to {folder}: {error.strerror or error}: choose another output_dir"
        ) from error


def _nbytes(tensors: Mapping[str, Tensor] | None) -> int:
    known: int | None = getattr(tensors, "nbytes", None)  # of weights that are made when they are asked for
    if known is not None:
        return known
    return sum(tensor.numel() * tensor.element_size() for tensor in (tensors or {}).values())
