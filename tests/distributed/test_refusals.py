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
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import offload.optim
from offload import OffloadOptimizer
from offload.engine.fsdp import groups_of
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


@pytest.mark.parametrize("early", ["update_in_backward", "offload_gradients"])
def test_gradients_that_ddp_has_not_reduced(early: str) -> None:
    inner = nn.Linear(2, 2)
    OffloadOptimizer(inner.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]
    model = DistributedDataParallel(inner)
    with pytest.raises(UserError, match=r"^optimizer: DistributedDataParallel.*set both to False.*fully_shard"):
        OffloadOptimizer(inner.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]
    OffloadOptimizer(model.named_parameters(), strategy="stream", lr=0.1)
    other = nn.Linear(2, 2)
    OffloadOptimizer(other.named_parameters(), strategy="stream", lr=0.1, **{early: True})  # type: ignore[arg-type]


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
