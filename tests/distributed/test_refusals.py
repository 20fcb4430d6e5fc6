"""What is refused for parameters that several ranks share, by name and with the way out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import offload.optim
from offload import OffloadOptimizer
from offload.engine import fsdp as engine_fsdp
from offload.engine import shards
from offload.engine.fsdp import VERSIONS, difference, groups_of
from offload.errors import UserError


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shared(*shape: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.ones(shape), init_device_mesh("cpu", (1,))))


@pytest.mark.parametrize("strategy", ["resident", "host", "stream"])
def test_cpu_offload_policy(strategy: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    with pytest.raises(UserError, match=r"^optimizer: .*CPUOffloadPolicy.*leave it out"):
        OffloadOptimizer(model.named_parameters(), strategy=strategy, model=model, lr=0.1)


def test_parameters_that_rest_on_the_host_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CPUOffloadPolicy leaves behind, where nobody gave the model."""
    param = shared(4, 2)
    monkeypatch.setattr(type(param.device_mesh), "device_type", "cuda")
    with pytest.raises(UserError, match="CPUOffloadPolicy"):
        OffloadOptimizer([param], lr=0.1)


@pytest.mark.parametrize(
    "base", ["torch.optim.Muon", "torch.optim.Adafactor", "torchao.optim.AdamW8bit", "bitsandbytes.optim.AdamW8bit"]
)
def test_base_optimizers_that_need_the_whole(base: str) -> None:
    with pytest.raises(UserError, match=rf"^optimizer.optimizer_class: {base} is not known.*torch.optim.AdamW"):
        OffloadOptimizer([shared(4, 2)], base, lr=0.1)
    optimizer = OffloadOptimizer([nn.Parameter(torch.ones(4, 2))], base, lr=0.1)
    with pytest.raises(UserError, match=r"^optimizer.optimizer_class: "):
        optimizer.add_param_group({"params": [shared(4, 2)]})


def test_only_the_groups_of_such_a_class() -> None:
    muon = {"params": "matrix", "optimizer_class": "torch.optim.Muon"}
    shared_matrix = [("matrix", shared(4, 4)), ("vector", nn.Parameter(torch.ones(4)))]
    shared_vector = [("matrix", nn.Parameter(torch.ones(4, 4))), ("vector", shared(4))]
    OffloadOptimizer(shared_vector, param_groups=[muon], strategy="resident", lr=0.1)
    with pytest.raises(UserError, match="torch.optim.Muon is not known"):
        OffloadOptimizer(shared_matrix, param_groups=[muon], strategy="resident", lr=0.1)


def test_sums_that_nobody_has() -> None:
    summand = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
    with pytest.raises(UserError, match=r"^optimizer: .*Partial.*redistribute"):
        OffloadOptimizer([nn.Parameter(summand)], lr=0.1)


class Subclassed(DistributedDataParallel):
    pass


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, type("Twice", (Subclassed,), {})])
@pytest.mark.parametrize("early", ["update_in_backward", "offload_gradients"])
def test_gradients_that_ddp_has_not_reduced(early: str, wrapper: type[DistributedDataParallel]) -> None:
    inner = nn.Linear(2, 2)
    OffloadOptimizer(inner.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]
    model = wrapper(inner)
    with pytest.raises(UserError, match=r"^optimizer: DistributedDataParallel.*set both to False.*fully_shard"):
        OffloadOptimizer(inner.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]
    OffloadOptimizer(model.named_parameters(), strategy="stream", lr=0.1)
    other = nn.Linear(2, 2)
    OffloadOptimizer(other.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]


@pytest.mark.parametrize("early", ["update_in_backward", "offload_gradients"])
def test_ddp_around_a_model_whose_optimizer_is_there(threaded: Any, early: str) -> None:
    """As by accelerate, which wraps the model when it prepares it."""
    inner = nn.Linear(2, 2)
    options: dict[str, Any] = {early: True}
    optimizer = OffloadOptimizer(inner.named_parameters(), strategy="stream", lr=0.1, **options)
    model = DistributedDataParallel(inner)
    with pytest.raises(UserError, match=r"^optimizer: DistributedDataParallel.*set both to False.*fully_shard"):
        model(torch.ones(1, 2)).sum().backward()
    del optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["resident", "host", "stream"])
def test_fsdp1(strategy: Any, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(
        nn.Linear(2, 2), use_orig_params=use_orig_params, device_id=torch.device("cpu"), sync_module_states=False
    )
    with pytest.raises(
        UserError, match=r"^optimizer: FullyShardedDataParallel \(FSDP1\).*fully_shard.*fsdp_version: 2"
    ):
        OffloadOptimizer(model.named_parameters(), strategy=strategy, lr=0.1)


@pytest.mark.parametrize("strategy", ["resident", "host", "stream"])
def test_parameters_that_are_laid_out_flat_afterwards(threaded: Any, strategy: Any) -> None:
    """As FSDP1 does with use_orig_params, in place, and DeepSpeed, with other parameters."""
    model = nn.Linear(4, 2)
    optimizer = OffloadOptimizer(model.named_parameters(), strategy=strategy, lr=0.1)
    model.weight.data = model.weight.data.flatten()[:4]
    model.weight.grad = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"^parameters .* have another shape .*DeepSpeed and Full.*\(fully_shard, or"
    ):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(10))]
    with pytest.raises(
        RuntimeError, match=r"^parameters .* are others \(one has the shape \(10,\).*DeepSpeed and Full"
    ):
        optimizer.step()


def _without_unshard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPParamGroup, "gather", FSDPParamGroup.unshard, raising=False)
    patch.delattr(FSDPParamGroup, "unshard")


def _past_unshard(patch: pytest.MonkeyPatch) -> None:
    def pre_forward(group: Any, module: Any, args: Any, kwargs: Any) -> Any:
        _fsdp_param_group.foreach_all_gather(group)  # type: ignore[call-arg]
        return args, kwargs

    patch.setattr(FSDPParamGroup, "pre_forward", pre_forward)


def _around_unshard(patch: pytest.MonkeyPatch) -> None:
    def pre_backward(group: Any, *args: Any) -> None:
        group.gather()

    patch.setattr(FSDPParamGroup, "pre_backward", pre_backward)


def _with_other_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPCommContext, "get_all_gather_streams", lambda context, training_state: None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without_unshard, "FSDPParamGroup has no unshard"),
        (_past_unshard, "all-gathers do not go through FSDPParamGroup.unshard"),
        (_around_unshard, "FSDPParamGroup.pre_backward does not call unshard"),
        (_with_other_streams, "FSDPCommContext does not tell get_all_gather_streams"),
    ],
)
def test_an_fsdp2_that_is_not_known_is_told_of(
    threaded: Any, monkeypatch: pytest.MonkeyPatch, change: Any, told: str
) -> None:
    """Nothing waits in its all-gathers, so step() waits for all."""
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert difference(model) == ""
    engine_fsdp._calls.cache_clear()
    change(monkeypatch)
    with pytest.warns(UserWarning, match=rf"^optimizer: fully_shard of torch .* {VERSIONS}.*{told}.*waits for all"):
        optimizer = OffloadOptimizer(model.named_parameters(), strategy="stream", model=model, lr=0.1)
    assert optimizer._machinery.engine._waits is None
    assert "unshard" not in vars(next(groups_of(model)))
    engine_fsdp._calls.cache_clear()


def test_dtensors_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    param = shared(4, 2)
    shards.difference.cache_clear()
    monkeypatch.setitem(shards.PRIVATE, "torch.distributed.tensor._utils", ("compute_local_shape_and_offset",))
    with pytest.raises(UserError, match=rf"^optimizer: DTensors of torch .* {VERSIONS} .*compute_local_shape_and_off"):
        OffloadOptimizer([param], lr=0.1)
    shards.difference.cache_clear()


def test_states_that_cannot_be_saved() -> None:
    class Odd(torch.optim.SGD):
        per_parameter = elementwise = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["extremes"] = torch.zeros(2)

    param = shared(4, 2)
    optimizer = OffloadOptimizer([param], Odd, strategy="resident", lr=0.1)
    param.grad = shared(4, 2).detach()
    optimizer.step()
    with pytest.raises(UserError, match=r"keeps a state of shape \(2,\), expected \(4, 2\).*use torch.optim.AdamW"):
        optimizer.state_dict()


def test_moments_that_are_larger_than_asked_for() -> None:
    wide, narrow = shared(100, 256), shared(100, 100)
    for params, options in [([wide, shared(256)], {}), ([narrow], {"state_dtype": "bf16"})]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            OffloadOptimizer(params, "offload.optim.AdamW", lr=0.1, **options)
    with pytest.warns(UserWarning, match=r"28% of the elements keep fp32.*\(100, 100\).*multiples of 256.*=bf16"):
        OffloadOptimizer([wide, narrow], "offload.optim.AdamW", lr=0.1)


def test_parts_are_not_made_plain() -> None:
    with pytest.raises(ValueError, match="to_plain: .*DTensors.*full_state_dict=True"):
        offload.optim.to_plain(OffloadOptimizer([shared(4, 256)], "offload.optim.AdamW", lr=0.1))


def test_a_discarded_optimizer_leaves_the_model_as_it_was(threaded: Any) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    (group,) = groups_of(model)
    first = OffloadOptimizer(model.named_parameters(), strategy="stream", model=model, lr=0.1)
    second = OffloadOptimizer(model.named_parameters(), strategy="stream", model=model, lr=0.1)
    assert "unshard" in vars(group)
    del second
    gc.collect()
    assert "unshard" in vars(group)
    del first
    gc.collect()
    assert "unshard" not in vars(group)
    model(torch.ones(2, 4)).sum().backward()


def test_a_taken_gradient_of_a_shard_cannot_be_changed() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = OffloadOptimizer(model.named_parameters(), strategy="stream", offload_gradients=True, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="already taken"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="already taken"):
        model.weight.grad.mul_(0.5)  # type: ignore[union-attr]
    optimizer.zero_grad(set_to_none=False)
    assert float(optimizer.grad_norm()) == 0.0
