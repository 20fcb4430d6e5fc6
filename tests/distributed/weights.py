"""Models of which every rank has a part, read from files and written to them; run on every rank."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload.checkpoints.manager import CheckpointManager
from offload.distributed.sharding import find_mesh, shard
from offload.distributed.world import PeerError, World, current
from offload.engine.units import clean_name
from offload.models.merging import MergedWeights
from offload.models.shares import begin_files, empty_like, write_share
from offload.models.source import find_source
from offload.models.torchtune.building import build_as_the_base, fill_share
from offload.models.torchtune.checkpoint import TorchtuneFormat

CPU = torch.device("cpu")


class Tokenizer:
    vocab_size = 64


def sharded(model: Any, layers: Any, replicas: int = 1) -> None:
    count = torch.distributed.get_world_size()
    shape = (count,) if replicas == 1 else (replicas, count // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    values = {clean_name(name): value.detach() for name, value in named}
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in values.items()}


def torchtune_format(folder: str, model_type: str) -> TorchtuneFormat:
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    return TorchtuneFormat({**section, "checkpoint_dir": folder, "model_type": model_type})


def read_torchtune(
    folder: str,
    model_type: str,
    component: str,
    dtype: torch.dtype,
    *,
    replicas: int = 1,
    checkpoint: Path | None = None,
) -> Any:
    """The base model in a folder, or with the weights of a checkpoint."""
    base = torchtune_format(folder, model_type).base
    section = OmegaConf.create({"_component_": component})
    model: Any = build_as_the_base(
        section, base, Tokenizer(), device=torch.device("meta"), dtype=dtype, tell=lambda note: None
    )
    sharded(model, model.layers, replicas)
    files = sorted((checkpoint or base.directory).glob("*.safetensors"))
    fill_share(model, base, files, device=CPU, dtype=dtype, source=folder)
    return model


def torchtune_there_and_back(
    cases: list[tuple[str, str, str, str, torch.dtype]],
) -> list[dict[str, torch.Tensor]]:
    """Of each ``(folder, out, model type, component, dtype)``, what every rank has read, whole; written to ``out``."""
    results = []
    for folder, out, model_type, component, dtype in cases:
        model = read_torchtune(folder, model_type, component, dtype)
        write(torchtune_format(folder, model_type), Path(out), model.state_dict())
        results.append(whole_of(model))
    return results


SHARD_BYTES = 50_000
"""Of a file: several of them, for models this small."""


def write(format: Any, folder: Path, weights: Any) -> None:
    empty = empty_like(weights)
    plan: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module(type(format).__module__), "SHARD_BYTES", SHARD_BYTES)
            plan = [begin_files(folder, format.begin_model(folder, empty), empty, format.in_files)]
    torch.distributed.broadcast_object_list(plan)
    write_share(folder, plan[0], weights, format.in_files)
    torch.distributed.barrier()


def runs_that_differ(placements: Any) -> list[str]:
    """Of parts of tensors whose elements are their positions, the ranges that lie elsewhere; and parts told twice."""
    from torch.distributed.tensor import distribute_tensor

    from offload.engine.shards import is_first_copy, local, runs

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wrong = []
    for shape in ((5, 3, 4), (2, 6), (7,), (1, 1)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        if any(getattr(placement, "dim", 0) >= len(shape) for placement in placements):
            continue
        tensor = distribute_tensor(whole, mesh, placements)
        part = local(tensor).reshape(-1)
        seen = torch.zeros_like(part)
        for first, at, count in runs(tensor):
            seen[first : first + count] += 1
            if not torch.equal(part[first : first + count], torch.arange(at, at + count)):
                wrong.append(f"{shape}: {first} is not {at}")
        if bool((seen != 1).any()):
            wrong.append(f"{shape}: {seen}")
        copies = torch.zeros(whole.numel(), dtype=torch.int64)
        if is_first_copy(tensor):
            copies[part] += 1
        torch.distributed.all_reduce(copies)
        if bool((copies != 1).any()):
            wrong.append(f"{shape}: written {copies.tolist()} times")
    return wrong


def read_huggingface(folder: str, dtype: torch.dtype) -> Any:
    from offload.models.huggingface.loading import from_pretrained
    from offload.models.huggingface.shares import fill

    def bare() -> Any:
        return from_pretrained(folder, device=torch.device("meta"), dtype=dtype)

    model = bare()
    sharded(model.module, layers_of(model.module))
    fill(model.module, model.module, Path(folder), lambda: bare().module, CPU)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    inside = {id(part) for outer in lists for layer in outer for part in layer.modules()}
    return [layer for part in lists if id(part) not in inside for layer in part]


def huggingface_there_and_back(cases: list[tuple[str, str, torch.dtype]]) -> list[dict[str, torch.Tensor]]:
    """Of each ``(folder, out, dtype)``, what every rank has read, whole; written to ``out`` again."""
    from offload.models.huggingface.checkpoint import HuggingFaceFormat

    results = []
    for folder, out, dtype in cases:
        model = read_huggingface(folder, dtype)
        format = HuggingFaceFormat(Path(folder))
        format.model = model
        write(format, Path(out), model.module.state_dict())
        results.append(whole_of(model.module))
    return results


def begin_adapted(
    model: dict[str, Any], checkpointer: dict[str, Any] | None, adapter: dict[str, Any] | None, out: str
) -> tuple[Any, CheckpointManager]:
    """An adapted model as a recipe begins it, and the checkpoints of its run."""
    sections = [None if each is None else OmegaConf.create(each) for each in (model, checkpointer, adapter)]
    source: Any = find_source(*sections, Tokenizer(), CPU, torch.float32, len)  # type: ignore[arg-type]
    manager = CheckpointManager(source.format, out)
    world = current()
    torch.manual_seed(5)
    if world.size == 1:
        return source.adapted(None, None), manager
    assert source.can_fill(adapts=True)
    parts = source.empty_adapted(None, None)
    shard(parts.module, parts.blocks(), find_mesh(world, CPU))
    source.fill(parts, None, CPU)
    return parts, manager


def adapted(
    model: dict[str, Any],
    checkpointer: dict[str, Any] | None,
    adapter: dict[str, Any] | None,
    out: str,
    *,
    trained: bool = False,
    beside: bool = False,
) -> dict[str, torch.Tensor]:
    """An adapted model as a recipe begins it, whole; with an adapter that changes it, merged into ``out``.

    Args:
        model, checkpointer, adapter: sections of a configuration.
        out: folder of the run.
        trained: after a step.
        beside: written while the model is in the middle of a forward, after another step.
    """
    parts, manager = begin_adapted(model, checkpointer, adapter, out)
    begun = whole_of(parts.module)
    with torch.no_grad():
        for name, param in parts.module.named_parameters():
            if "lora_" in name:
                param.add_(0.25)
    optimizer = torch.optim.AdamW([param for param in parts.module.parameters() if param.requires_grad])
    if trained:
        step(parts, optimizer)
    content = {
        "model": parts.merged_weights(goes_on=beside),
        "adapter": parts.adapter_weights(),
        "adapter_config": parts.adapter_config(),
        "recipe_state": {"optimizer": optimizer.state_dict()} if trained else {},
    }
    if not beside:
        manager.save(1, **content)
        return begun
    begins = threading.Event()
    gathered = MergedWeights.gathered

    def late(self: MergedWeights, name: str, rank: int, world: World) -> Any:
        begins.wait()
        return gathered(self, name, rank, world)

    def in_the_middle(*_: Any) -> None:
        begins.set()
        assert writer.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MergedWeights, "gathered", late)
        writer = manager.save_beside(1, **content, snapshot=None, world=current().apart())
        step(parts, optimizer)
        inside = next(module for module in parts.blocks()[-1].modules() if not list(module.children()))
        with inside.register_forward_pre_hook(in_the_middle):
            step(parts, optimizer)
        writer.result()
    return begun


def merged_without_room(
    model: dict[str, Any], checkpointer: dict[str, Any] | None, adapter: dict[str, Any] | None, out: str, failing: int
) -> str:
    """What a rank raises where one cannot make a weight."""
    parts, manager = begin_adapted(model, checkpointer, adapter, out)
    merged = parts.merged_weights(goes_on=True)
    made = type(merged).made

    def fail(self: MergedWeights, name: str, wholes: Any) -> torch.Tensor:
        if wholes and current().rank == failing:
            raise MemoryError("no room to merge")
        return made(self, name, wholes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(merged), "made", fail)
        writer = manager.save_beside(
            1,
            model=merged,
            adapter=parts.adapter_weights(),
            adapter_config=parts.adapter_config(),
            recipe_state={},
            snapshot=None,
            world=current().apart(),
        )
        with pytest.raises((MemoryError, PeerError)) as raised:
            writer.result()
    return type(raised.value).__name__


def step(parts: Any, optimizer: torch.optim.Optimizer) -> None:
    parts.logits({"tokens": torch.arange(8).view(1, 8)}).float().pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
