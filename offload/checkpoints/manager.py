"""Checkpoints of a training run: loading the base model, saving, finding the newest, resuming.

A run leaves ``output_dir/step_<n>``. With a full model the folder is what ``from_pretrained`` of transformers
loads; an adapter is in ``step_<n>/adapter``, which peft loads; ``recipe_state.pt`` holds what a resumed run
needs besides. The adapter has a folder of its own because transformers, where peft is installed, takes a
folder with an ``adapter_config.json`` for an adapter and leaves the (merged) model beside it unread.

A folder named ``step_<n>`` is whole: it is written under another name, forced to the disk and then renamed. What
became of it on the disk since, the checksums in its manifest tell.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from offload import torchao_shim
from offload.checkpoints import folders as checkpoint_folders
from offload.checkpoints import manifest as checkpoint_manifest
from offload.checkpoints import state as state_file
from offload.checkpoints.manifest import FORMAT, DamagedCheckpoint, whole_checkpoints
from offload.checkpoints.sums import checksum
from offload.errors import UserError
from offload.models.torchtune import base_checkpoint, peft_adapter

logger = logging.getLogger(__name__)

ADAPTER_DIR = "adapter"
STATE_NAME = "recipe_state.pt"
INDEX_NAME = "model.safetensors.index.json"

# Bytes in one weight file. Only one at a time is held in host memory when the model is on an accelerator.
SHARD_BYTES = 4 * 2**30
# The only biases among the models here are those of Qwen2's q, k and v projections.
_BIASED_MAGNITUDE = re.compile(r"\.[qkv]_proj\.magnitude$")
# Headers, indexes and the file system's own blocks, on top of the tensors.
_SPARE_BYTES = 4 * 2**20


@dataclass
class Loaded:
    """What a checkpoint holds.

    Attributes:
        model: torchtune's names, on the CPU; None where the checkpoint has an adapter, since training goes on
            from the base model and the adapter then, not from merged weights.
        adapter: torchtune's names, on the CPU; None for full fine-tuning.
        recipe_state: as it was given to :meth:`CheckpointManager.save`. Its tensors are mapped from the file:
            copy what is kept for long, or a deleted checkpoint goes on occupying the disk.
        step: the step after which it was saved.
    """

    model: dict[str, Tensor] | None
    adapter: dict[str, Tensor] | None
    recipe_state: dict[str, Any]
    step: int


class CheckpointManager:
    """Reads the base model and keeps the checkpoints of one run.

    "Newest" means saved last, not highest step: a run that went back to an earlier checkpoint resumes from
    what it saved since.

    Args:
        checkpointer: the config's section: ``_component_: torchtune.training.FullModelHFCheckpointer``,
            ``checkpoint_dir``, ``model_type``, optionally ``checkpoint_files``.
        output_dir: folder of the run; created if need be.
        keep_last_n: how many checkpoints to keep, None for all.

    Raises:
        UserError: if the base checkpoint is incomplete or damaged, or ``output_dir`` cannot be written.
    """

    def __init__(
        self, checkpointer: Mapping[str, Any], output_dir: str | Path, *, keep_last_n: int | None = None
    ) -> None:
        torchao_shim.install()
        if keep_last_n is not None and (isinstance(keep_last_n, bool) or keep_last_n < 1):
            raise UserError(f"keep_last_n: got {keep_last_n}, expected at least 1, or null to keep all checkpoints")
        self.keep_last_n = keep_last_n
        self.best: Path | None = None
        """A checkpoint that is kept besides the last ones."""
        self.output_dir = output_folder(output_dir)
        self.base = base_checkpoint.read_base(checkpointer)
        _check_apart(self.base.directory, self.output_dir)
        _check_writable(self.output_dir)
        self._damaged: set[Path] = set()
        # Made once: the base checkpoint's weight files may be gone by the time a checkpoint is saved.
        self._torchtune = _torchtune_checkpointer(self.base.directory, self.base.files, self.base, self.output_dir)

    # ----------------------------------------------------------------------------------------- loading

    def load_base(self) -> dict[str, Tensor]:
        """The base model's weights under torchtune's names, on the CPU, in the files' dtypes.

        Raises:
            UserError: if they cannot be read or do not belong to ``model_type`` and ``config.json``.
        """
        return _load_model(self._torchtune, self.base, self.base.directory)

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
        checkpoint_folders.clean(self.output_dir)
        for path in reversed(whole_checkpoints(self.output_dir)):
            try:
                return path, self.load(path)
            except DamagedCheckpoint as error:
                logger.warning("skipped: %s", error)
                self._damaged.add(path)
        return None

    def load_chosen(self, name: str) -> tuple[Path, Loaded]:
        """The checkpoint of that name in ``output_dir`` (``step_20``), or in the folder of that path.

        Raises:
            UserError: as :meth:`load`.
        """
        path = self.output_dir / name
        if not path.is_dir():
            path = _expanded(name, "resume_from_checkpoint")
        if not path.is_dir():
            here = [checkpoint.name for checkpoint in whole_checkpoints(self.output_dir)]
            raise UserError(
                f"resume_from_checkpoint: there is no folder {name}, neither in {self.output_dir} nor as a path; give "
                f"True for the newest checkpoint, False to start anew, or one of {', '.join(here) or '(none there)'}"
            )
        return path, self.load(path)

    def load(self, path: str | Path) -> Loaded:
        """Reads a checkpoint that :meth:`save` wrote.

        Raises:
            DamagedCheckpoint: if it is incomplete or damaged.
            UserError: if it is none, or another model's.
        """
        path = Path(path).expanduser().absolute()
        manifest = checkpoint_manifest.read(path)
        checkpoint_manifest.verify(path, manifest)
        adapter, state = _read_state(path / STATE_NAME)
        model = None
        if adapter is None:
            names = [name for name in manifest.sizes if "/" not in name and name.endswith(".safetensors")]
            for name in names:
                try:
                    base_checkpoint.read_safetensors_header(path / name)
                except (OSError, ValueError) as error:
                    raise DamagedCheckpoint(
                        f"{path / name} is damaged: {error}: resume from another checkpoint"
                    ) from error
            try:
                reader = _torchtune_checkpointer(path, tuple(names), self.base, self.output_dir)
            except Exception as error:  # it reads config.json
                raise DamagedCheckpoint(
                    f"{path} is damaged ({_one_line(error)}): resume from another checkpoint"
                ) from error
            model = _load_model(reader, self.base, path)
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

        Nothing that is given is modified, and nothing of it may change until this returns: tensors of the CPU
        are written from where they are, those of an accelerator by way of the host, at most
        :data:`SHARD_BYTES` of the model at once.

        Args:
            step: optimizer steps done.
            model: the full model (for LoRA the merged one) under torchtune's names, or None.
            recipe_state: nested dicts, lists and tuples of tensors and Python scalars.
            adapter: LoRA or DoRA tensors under torchtune's names.
            adapter_config: with ``adapter``: ``r``, ``lora_alpha``, ``target_modules`` (torchtune's names)
                and other fields of peft's ``LoraConfig``.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: if the disk is full or cannot be written. No part of the checkpoint remains then, and
                earlier ones are untouched.
            TypeError: if ``recipe_state`` holds what could not be read back.
            ValueError: if the adapter or its configuration is not one.
        """
        if model is None and adapter is None:
            raise ValueError("a checkpoint needs a model, an adapter or both")
        if adapter is not None and adapter_config is None:
            raise ValueError("adapter_config is required with adapter")
        checkpoint_folders.clean(self.output_dir)
        state = _prepare_state(recipe_state, adapter)
        final = self.output_dir / f"step_{step}"
        needed = state.nbytes + _nbytes(model) + _nbytes(adapter) + _SPARE_BYTES
        self._check_space(final, needed)

        temporary = checkpoint_folders.sibling(final, "tmp")
        try:
            temporary.mkdir(parents=True)
            sums: dict[str, str] = {}
            if model is not None:
                sums |= self._write_model(temporary, model)
                self._write_companions(temporary, model)
            if adapter is not None:
                assert adapter_config is not None
                self._write_adapter(temporary / ADAPTER_DIR, adapter, adapter_config)
            sums[STATE_NAME] = _write_state(temporary / STATE_NAME, state)
            _allow_as_usual(temporary)
            self._write_manifest(temporary, step, sums)
            checkpoint_folders.fsync_tree(temporary)
            checkpoint_folders.publish(temporary, final)
        except BaseException as error:
            free = _free_bytes(self.output_dir)
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, (OSError, SafetensorError)):
                raise self._cannot_save(final, needed, free, _one_line(error)) from error
            raise
        self._delete_old(final)
        return final

    def _write_model(self, folder: Path, model: Mapping[str, Tensor]) -> dict[str, str]:
        """Writes the weights in Hugging Face's format, a shard at a time, and their index; returns checksums."""
        shards = _shards(model, SHARD_BYTES)
        staging = folder / "staging"
        nothing = folder / "nothing"
        nothing.mkdir()
        weight_map = {}
        sums = {}
        total = 0
        for number, names in enumerate(shards, 1):
            with _pointed_at(self._torchtune, output_dir=staging, checkpoint_dir=nothing), quiet_torchtune():
                tensors = _host_tensors(model, names)
                if self.base.model_type == "GEMMA2":
                    tensors = _with_gemma2_norms_exchanged(tensors)
                self._torchtune.save_checkpoint({"model": tensors}, epoch=0)
                del tensors
            (written,) = staging.glob("epoch_0/*.safetensors")
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            os.rename(written, folder / name)
            sums[name] = checksum(folder / name)  # while it is in the page cache
            for key, entry in base_checkpoint.read_safetensors_header(folder / name).items():
                weight_map[key] = name
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
        shutil.rmtree(staging)
        nothing.rmdir()
        # torchtune's own index lists the names of the base checkpoint, written or not.
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        return sums

    def _write_companions(self, folder: Path, model: Mapping[str, Tensor]) -> None:
        config = json.loads(self.base.config_text)
        # transformers loads in the dtype told here: fp32 weights would be rounded to a base model's bf16.
        dtype = _main_dtype(model)
        for key in ("dtype", "torch_dtype"):
            if key in config:
                config[key] = dtype
        _write_json(folder / "config.json", config)
        try:
            self.base.copy_companions(folder)
        except FileNotFoundError as error:
            # Hours into a run, weights without a tokenizer beat no weights.
            logger.warning("%s is gone: %s is saved without its tokenizer files", error.filename, folder)

    def _write_adapter(self, folder: Path, adapter: Mapping[str, Tensor], adapter_config: Mapping[str, Any]) -> None:
        if self.base.model_type in peft_adapter.UNSUPPORTED_TYPES:
            logger.warning(
                "peft has no counterpart for adapters of %s, whose projections Hugging Face's model fuses: "
                "the adapter is in %s only",
                self.base.model_type,
                STATE_NAME,
            )
            return
        if self.base.model_type == "QWEN2" and any(_BIASED_MAGNITUDE.search(name) for name in adapter):
            logger.warning(
                "torchtune's DoRA scales the biases of q, k and v too, peft's and merged weights do not: "
                "used there, %s gives other results than in training",
                folder,
            )
        peft_adapter.write(
            folder,
            _host_tensors(adapter, list(adapter)),
            adapter_config,
            base_model=self.base.name_or_path,
            model_type=self.base.model_type,
            config=self.base.config,
        )

    def _write_manifest(self, folder: Path, step: int, sums: Mapping[str, str]) -> None:
        sequence = checkpoint_manifest.next_sequence(self.output_dir)
        checkpoint_manifest.write(folder, step=step, sequence=sequence, sums=sums)

    def _check_space(self, final: Path, needed: int) -> None:
        free = _free_bytes(self.output_dir)
        if free is not None and free < needed:
            raise self._cannot_save(final, needed, free, "the disk is too full")

    def _cannot_save(self, final: Path, needed: int, free: int | None, reason: str) -> UserError:
        there = "" if free is None else f", {_size(free)} are free"
        way_out = "free some space or choose another output_dir"
        if self.keep_last_n is None:
            way_out = "free some space, set keep_last_n, or choose another output_dir"
        return UserError(
            f"cannot save the checkpoint {final}: {reason}; it needs {_size(needed)}{there}: {way_out} "
            "(earlier checkpoints are untouched)"
        )

    def _delete_old(self, newest: Path) -> None:
        if self.keep_last_n is None:
            return
        self._damaged.discard(newest)
        others = [path for path in whole_checkpoints(self.output_dir) if path not in (newest, self.best)]
        others.sort(key=lambda path: path not in self._damaged)
        for path in others[: max(0, len(others) - (self.keep_last_n - 1))]:
            # This run may have started from a checkpoint that an earlier run left in the same folder.
            if path.resolve() != self.base.directory.resolve():
                checkpoint_folders.delete(path)


# ------------------------------------------------------------------------------------------- torchtune


def _torchtune_checkpointer(
    directory: Path, files: tuple[str, ...], base: base_checkpoint.BaseCheckpoint, output_dir: Path
) -> Any:
    from torchtune.training import FullModelHFCheckpointer

    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=str(directory),
        checkpoint_files=list(files),
        model_type=base.model_type,
        output_dir=str(output_dir),
    )
    checkpointer._config = base.config
    return checkpointer


def _load_model(checkpointer: Any, base: base_checkpoint.BaseCheckpoint, directory: Path) -> dict[str, Tensor]:
    try:
        with quiet_torchtune():
            model = checkpointer.load_checkpoint()["model"]
    except MemoryError:
        raise
    except Exception as error:  # torchtune raises Exception itself for a key that it does not know
        # What torchtune says of a file that it cannot read is only that; the cause says more.
        cause = error.__cause__ if isinstance(error, ValueError) else None
        reason = _one_line(cause or error)
        raise UserError(
            f"cannot read the weights in {directory} as checkpointer.model_type={base.model_type}: {reason} "
            "(check model_type and config.json, or download the files again)"
        ) from error
    if base.model_type == "GEMMA2":
        model = _with_gemma2_norms_exchanged(model)
    if base.config["tie_word_embeddings"]:
        # Some files repeat the embedding as lm_head; torchtune's tied models have no such parameter.
        model.pop("output.weight", None)
    return model


def _with_gemma2_norms_exchanged(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the norms before and after each MLP into one another.

    torchtune 0.6.1 reads and writes Hugging Face's ``pre_feedforward_layernorm`` as the norm after the MLP
    and ``post_feedforward_layernorm`` as the one before it
    (https://github.com/meta-pytorch/torchtune/issues/2850).
    """
    other = {"mlp_norm": "mlp_scale", "mlp_scale": "mlp_norm"}
    return {".".join(other.get(part, part) for part in name.split(".")): model[name] for name in model}


class _OneFile(dict[str, str]):
    """Sends every tensor to the same weight file."""

    def __missing__(self, key: str) -> str:
        return "0001"


@contextlib.contextmanager
def _pointed_at(checkpointer: Any, *, output_dir: Path, checkpoint_dir: Path) -> Iterator[None]:
    """Directs one call of ``save_checkpoint``.

    ``checkpoint_dir`` is an empty folder, since torchtune copies all that is in it, subfolders included.
    """
    before = checkpointer._output_dir, checkpointer._checkpoint_dir, checkpointer._weight_map
    checkpointer._output_dir, checkpointer._checkpoint_dir = output_dir, checkpoint_dir
    checkpointer._weight_map = _OneFile()
    try:
        yield
    finally:
        checkpointer._output_dir, checkpointer._checkpoint_dir, checkpointer._weight_map = before


@contextlib.contextmanager
def quiet_torchtune() -> Iterator[None]:
    """Without torchtune's own log lines below a warning."""
    chatty = logging.getLogger("torchtune.utils._logging")
    level = chatty.level
    chatty.setLevel(logging.WARNING)
    try:
        yield
    finally:
        chatty.setLevel(level)


def _shards(model: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Cuts the model's names, in order, into shards of at most ``limit`` bytes where possible.

    A layer stays whole, because conversions fuse tensors of one layer.
    """
    groups: dict[str, list[str]] = {}
    for name in model:
        parts = name.split(".")
        # layers.<n>.…: one group; anything else: a group of its own
        groups.setdefault(".".join(parts[:2]) if parts[0] == "layers" else name, []).append(name)
    shards: list[list[str]] = []
    room = 0
    for names in groups.values():
        size = sum(model[name].numel() * model[name].element_size() for name in names)
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1] += names
        room -= size
    return shards


def _host_tensor(tensor: Tensor, name: str) -> Tensor:
    """``tensor`` on the CPU, contiguous and alone in its storage; not copied where it is so already."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # DTensor
        tensor = tensor.full_tensor()
    if type(tensor) is not Tensor:
        raise TypeError(f"{name} is a {type(tensor).__name__}: a model is saved with plain tensors only")
    return state_file.standalone(tensor.to("cpu").contiguous())


def _host_tensors(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in names:
        tensor = _host_tensor(tensors[name], name)
        if tensor.data_ptr() in seen:  # safetensors refuses one memory under two names
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        result[name] = tensor
    return result


def _main_dtype(model: Mapping[str, Tensor]) -> str:
    """The floating dtype of most of the model's elements, as ``config.json`` writes it: ``bfloat16``."""
    elements: dict[torch.dtype, int] = {}
    for tensor in model.values():
        if tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------- files


def _prepare_state(state: Mapping[str, Any], adapter: Mapping[str, Tensor] | None) -> state_file.Prepared:
    prepared = state_file.Prepared(state)
    kept = None if adapter is None else state_file.Prepared(adapter, "adapter")
    prepared.value = {"recipe_state": prepared.value, "adapter": None if kept is None else kept.value}
    prepared.nbytes += 0 if kept is None else kept.nbytes
    return prepared


def _write_state(path: Path, state: state_file.Prepared) -> str:
    return state_file.write({"format": FORMAT, **state.value}, path)


def _read_state(path: Path) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
    """(adapter, recipe_state)"""
    try:
        content = state_file.read(path)
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        adapter, state = content["adapter"], content["recipe_state"]
        if not isinstance(state, dict):
            raise TypeError(f"recipe_state is a {type(state).__name__}")
        if adapter is not None and not (
            isinstance(adapter, dict) and all(isinstance(value, Tensor) for value in adapter.values())
        ):
            raise TypeError("adapter holds what is no tensor")
    except MemoryError:
        raise
    except Exception as error:  # PyTorch's unpickler raises whatever a damaged file leads it into
        raise DamagedCheckpoint(f"{path} is damaged ({_one_line(error)}): resume from another checkpoint") from error
    return adapter, state


def _allow_as_usual(folder: Path) -> None:
    """Gives weight files the permissions of any new file: safetensors makes them readable by their owner alone."""
    usual = stat.S_IMODE((folder / STATE_NAME).stat().st_mode)
    for path in folder.rglob("*.safetensors"):
        path.chmod(usual)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_apart(checkpoint_dir: Path, output_dir: Path) -> None:
    base, out = checkpoint_dir.resolve(), output_dir.resolve()
    if out == base or base in out.parents:
        raise UserError(
            f"output_dir: {output_dir} is {'' if out == base else 'inside '}checkpointer.checkpoint_dir: "
            "choose another output_dir"
        )


def output_folder(output_dir: str | Path) -> Path:
    """``output_dir`` as an absolute path; UserError where it is none."""
    return _expanded(output_dir, "output_dir")


def _expanded(path: str | Path, key: str) -> Path:
    if not str(path).strip() or "\0" in str(path):
        raise UserError(f"{key}: got {str(path)!r}, expected the path of a folder, e.g. {key}=outputs/run1")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UserError(
            f"{key}: {path}: there is no such user on this machine: give the folder's whole path"
        ) from error


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # has no name, so a kill leaves nothing
            pass
    except OSError as error:
        raise UserError(
            f"output_dir: cannot write to {folder}: {error.strerror or error}: choose another output_dir"
        ) from error


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _nbytes(tensors: Mapping[str, Tensor] | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (tensors or {}).values())


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
