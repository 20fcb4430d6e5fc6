"""Where a model is traced: on the meta device, and on fake tensors where the meta device cannot tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from offload.plan import without_memory as tracing
from offload.plan import work
from offload.plan.footprint import footprint
from offload.plan.without_memory import without_memory

TOKENS, WIDTH = 8, 16


class Model(nn.Module):
    """``asks``: for a value, unless tensors are fake, as masks of transformers do. ``view``: writes into one, as the
    soft cap of Gemma 2's scores does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.kind == "asks" and not isinstance(x, FakeTensor) and x.sum().item() > 0:
                raise AssertionError("a tensor without memory has no value")
            if self.kind == "view":
                x[:, 0].mul_(0.5)
        return x.sum()

    def step(self) -> Tensor:
        return self(torch.zeros(TOKENS, WIDTH, device=self.layers[0].weight.device))


def model(kind: str = "plain") -> Model:
    with torch.device("meta"):
        return Model(kind)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that fake tensors were turned to for."""
    modules: list[nn.Module] = []
    real = tracing._with_fake_tensors
    monkeypatch.setattr(
        tracing, "_with_fake_tensors", lambda module, run: (modules.append(module), real(module, run))[1]
    )
    return modules


def test_a_model_runs_once_on_the_meta_device(fakes: list[nn.Module]) -> None:
    made, devices = model(), []

    def run() -> None:
        loss = made.step()
        devices.append(loss.device.type)
        loss.backward()

    without_memory(made, run)
    assert devices == ["meta"] and not fakes
    assert all(param.grad is None for param in made.parameters())


def test_a_model_that_asks_for_values_runs_on_fake_tensors_and_takes_as_much(fakes: list[nn.Module]) -> None:
    plain, asking = model(), model("asks")
    expected = footprint(plain, plain.step, keeps_gradients=True)
    assert not fakes
    assert footprint(asking, asking.step, keeps_gradients=True) == expected
    assert fakes == [asking]


def test_the_work_of_writing_into_a_view_is_counted_as_where_there_is_memory(
    fakes: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd copies more for the meta device."""
    view = model("view")
    assert counted(model()) != (found := counted(view)) and fakes == [view]
    monkeypatch.setattr(work, "without_memory", lambda module, run: run())
    assert counted(Model("view")) == found


def counted(model: Model) -> work.Work:
    return work.count(model, list(model.layers), model.step, batch=1, length=TOKENS, fused_norms=True)
