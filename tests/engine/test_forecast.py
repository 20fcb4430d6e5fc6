"""What a base optimizer keeps is known before its first step: keys, shapes and dtypes equal those of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from offload import OffloadOptimizer
from offload.component import resolve
from offload.engine import memory
from offload.engine.forecast import Forecast, forecast, kind_of
from offload.engine.units import components
from offload.simulation.accelerator import SimulatedAccelerator

FP32, BF16 = torch.float32, torch.bfloat16

BASES: list[tuple[str, dict[str, Any]]] = [
    ("torch.optim.AdamW", {}),
    ("torch.optim.AdamW", {"amsgrad": True, "fused": True}),
    ("torch.optim.SGD", {"momentum": 0.9, "lr": 0.1}),
    ("torch.optim.SGD", {"lr": 0.1}),
    ("torch.optim.NAdam", {}),
    ("torch.optim.Rprop", {}),
    ("offload.optim.AdamW", {}),
    ("offload.optim.AdamW", {"state_dtype": "bf16", "master": "none"}),
    ("offload.optim.AdamW", {"state_dtype": "int8", "master": "stochastic"}),
    ("torchao.optim.AdamW8bit", {}),
    ("torchao.optim.AdamW4bit", {}),
    ("bitsandbytes.optim.AdamW8bit", {}),
]


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in [(96, 512), (128, 64, 2), (16384,), (3, 5), (7,), ()]
    ]


def known(foreseen: Forecast | None, param: nn.Parameter) -> dict[str, list[tuple[torch.Size, torch.dtype]]]:
    assert foreseen is not None
    forms = foreseen[kind_of(param)]
    likes = {form.key: [component.of(param) for component in form.components] for form in forms}
    return {key: [(like.shape, like.dtype) for like in tensors] for key, tensors in likes.items()}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(("name", "kwargs"), BASES, ids=lambda value: str(value))
def test_states_are_as_foreseen(name: str, kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    base_class, trained = resolve(name, key="base"), params(dtype)
    foreseen = forecast(base_class, kwargs, trained)
    with torch.compiler.set_stance("force_eager"):
        base = base_class(trained, **kwargs)
        for param in trained:
            param.grad = torch.randn_like(param)
        base.step()
    for param in trained:
        tensors = {key: value for key, value in base.state[param].items() if isinstance(value, Tensor)}
        actual = {key: [(part.shape, part.dtype) for part in components(value)] for key, value in tensors.items()}
        assert known(foreseen, param) == actual


def test_factored_states_have_the_keys_of_their_dimension() -> None:
    """Their sizes do not follow from one small parameter, so their memory is page-locked when they are made."""
    matrix, vector = nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(3))
    foreseen = forecast(torch.optim.Adafactor, {}, [matrix, vector])
    assert set(known(foreseen, matrix)) == {"step", "row_var", "col_var"}
    assert set(known(foreseen, vector)) == {"step", "variance"}


def test_an_optimizer_that_does_not_run_here_is_not_foreseen() -> None:
    class Elsewhere(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no kernel for this device")

    assert forecast(Elsewhere, {}, params(FP32)) is None


def test_the_small_step_is_nobodys_business() -> None:
    """Hooks that are registered for all optimizers do not hear of it, and the generator is where it was."""
    heard: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *args: heard.append(args))
    trained = params(BF16)
    before = torch.get_rng_state()
    try:
        forecast(torch.optim.AdamW, {}, trained)
        forecast(resolve("torchao.optim.AdamW8bit", key="base"), {"bf16_stochastic_round": True}, trained)
    finally:
        handle.remove()
    assert not heard and torch.equal(before, torch.get_rng_state())


class Other(torch.optim.SGD):
    per_parameter = True
    steps = 0

    def step(self, closure: Any = None) -> Any:
        Other.steps += 1
        return super().step(closure)


@pytest.mark.parametrize("foreseeable", [False, True])
def test_optimizers_from_elsewhere_are_tried_only_if_they_say_so(
    foreseeable: bool, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may do anything: wait for other processes, write a file."""
    monkeypatch.setattr(Other, "foreseeable", foreseeable, raising=False)
    monkeypatch.setattr(Other, "steps", 0)
    OffloadOptimizer(nn.Linear(2, 2).named_parameters(), Other, strategy="stream", lr=0.1, momentum=0.9)
    assert (Other.steps > 0) is foreseeable


class Pins(SimulatedAccelerator):
    """Notes what is page-locked."""

    pinned: list[int]

    def empty_pinned(self, nbytes: int) -> Tensor:
        self.pinned = [*getattr(self, "pinned", []), nbytes]
        return super().empty_pinned(nbytes)


@pytest.mark.parametrize("base", ["torch.optim.AdamW", "offload.optim.AdamW", "torchao.optim.AdamW8bit"])
@pytest.mark.parametrize("offload_gradients", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["at step", "in backward"])
@pytest.mark.parametrize("strategy", ["stream", "host"])
def test_nothing_is_page_locked_after_construction(
    strategy: Any, in_backward: bool, offload_gradients: bool, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation makes its buffers when the first micro-batch begins, and not in a hook."""
    monkeypatch.setattr("offload.optim.cpu.load", lambda: None)
    monkeypatch.setattr(memory, "SLAB_BYTES", 1 << 14)
    with Pins() as simulator, torch.compiler.set_stance("force_eager"):
        monkeypatch.setattr("offload.machinery.runtime_for", lambda device: simulator)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).bfloat16()
        optimizer = OffloadOptimizer(
            model.named_parameters(),
            base,
            strategy=strategy,
            update_in_backward=in_backward,
            offload_gradients=offload_gradients,
            model=model,
            lr=1e-2,
        )
        built = list(simulator.pinned)
        assert built
        for _ in range(3):
            model(torch.ones(2, 64, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert simulator.pinned == built
        with optimizer.accumulate():
            before = list(simulator.pinned)
            model(torch.ones(2, 64, dtype=BF16)).sum().backward()
        model(torch.ones(2, 64, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        assert simulator.pinned == before
