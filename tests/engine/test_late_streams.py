"""The packed AdamW to the last bit, and streams that are late: on a real accelerator, and what can be on the CPU.

See ``test_on_accelerator.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadOptimizer
from offload.engine import units
from offload.engine.runtime import AcceleratorRuntime
from offload.optim import AdamW
from offload.simulation.accelerator import RaceError
from tests.engine.accelerated import (
    ACCELERATOR,
    ALL,
    IS_SANITIZED,
    LATE,
    MANY,
    OFFLOADED,
    Place,
    Plain,
    assert_same,
    check_parity,
    choices,
    make_model,
    name_of,
    train,
)
from tests.engine.sleeping import current, sleep

# The packed AdamW: one kernel's bits, wherever it runs

FORMATS = [("int8", "split"), ("bf16", "stochastic"), ("fp32", "split"), ("int8", "none")]
PACKED: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "seed": 3}


class ClippedTo(Plain):
    """The packed AdamW, clipped by norms that are given, because a factor that differs in its last bit changes updates.
    They have to be those of the gradients, within the rounding of another order of addition."""

    def __init__(self, model: nn.Module, norms: list[Tensor], **kwargs: Any) -> None:
        super().__init__(model, AdamW, False, **kwargs)
        self.norms = iter(norms)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        norm = next(self.norms)
        expected = torch.nn.utils.get_total_norm([p.grad.float() for p in self.params if p.grad is not None])
        torch.testing.assert_close(norm.to(expected), expected, rtol=1e-5, atol=0)
        assert norm > 2 * max_norm  # so the limit binds
        self.base.gradient_scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


def check_packed(
    place: Place,
    options: dict[str, Any],
    *,
    state_dtype: str = "int8",
    master: str = "split",
    accumulation: int = 1,
    clip: float | None = None,
    attached: bool = True,
    is_slow: bool = False,
) -> None:
    """Trains a bf16 model with its states resident and with the options; parameters and states stay equal to the last
    bit, also where one is updated on the device and the other on the CPU."""
    kwargs = {**PACKED, "state_dtype": state_dtype, "master": master}
    model, twin = (make_model(place, torch.bfloat16) for _ in range(2))
    model.is_slow = is_slow
    params, theirs = ([p for p in each.parameters() if p.requires_grad] for each in (model, twin))
    own = {**kwargs, **options, **({"model": model} if attached else {})}
    optimizer = OffloadOptimizer(params, "offload.optim.AdamW", **own)
    norms = train(model, optimizer, place, accumulation=accumulation, clip=clip)
    reference = ClippedTo(twin, norms, **kwargs)
    train(twin, reference, place, accumulation=accumulation, clip=clip)
    assert_same(model, twin)
    states, expected = optimizer.state, reference.base.state
    assert len(expected) == len(theirs) - 2  # of the linear layer that is not used
    for mine, other in zip(params, theirs, strict=True):
        if other not in expected:
            assert mine not in states
            continue
        assert states[mine].keys() == expected[other].keys()
        for key, value in expected[other].items():
            assert torch.equal(states[mine][key].cpu(), value.cpu()), key


@MANY
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("state_dtype", "master"), FORMATS)
@ALL
def test_packed_states_are_the_same_to_the_last_bit(
    place: Place,
    options: dict[str, Any],
    state_dtype: str,
    master: str,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large tensors are cut, so that ranges of them are updated."""
    monkeypatch.setattr(units, "CHUNK_ELEMENTS", 1024)
    check_packed(place, options, state_dtype=state_dtype, master=master, accumulation=accumulation)


AT_STEP = [o for o in choices("stream", "host") if not o["update_in_backward"]]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("options", AT_STEP, ids=name_of)
def test_packed_updates_are_clipped_to_the_last_bit(place: Place, options: dict[str, Any], accumulation: int) -> None:
    check_packed(place, options, accumulation=accumulation, clip=0.1)


# Races


@contextmanager
def late_stream(stream: str, monkeypatch: pytest.MonkeyPatch, milliseconds: float = LATE) -> Iterator[None]:
    """Each piece of work on one of the engine's streams begins late."""
    copy, updating = AcceleratorRuntime.copy, AcceleratorRuntime.updating
    sleeping = torch.Stream()

    def late_copy(
        self: AcceleratorRuntime, dst: Tensor, src: Tensor, direction: Any, after: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        if direction == stream:
            # The copy streams are the engine's; one that waits for a stream that sleeps is as late.
            with current(sleeping):
                sleep(milliseconds)
                after = (*after, self.record())
        return copy(self, dst, src, direction, after, *args, **kwargs)

    @contextmanager
    def late_updating(self: AcceleratorRuntime, *args: Any, **kwargs: Any) -> Iterator[None]:
        with updating(self, *args, **kwargs):
            if stream == "update":
                sleep(milliseconds)
            yield

    with monkeypatch.context() as patch:
        patch.setattr(AcceleratorRuntime, "copy", late_copy)
        patch.setattr(AcceleratorRuntime, "updating", late_updating)
        yield


@pytest.mark.parametrize("place", [ACCELERATOR], indirect=True)
@pytest.mark.parametrize("stream", ["compute", "up", "down", "update"])
@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
@OFFLOADED
def test_late_streams(
    place: Place, options: dict[str, Any], attached: bool, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not wait for a stream that is late reads old values. The simulator makes every stream late."""
    with late_stream(stream, monkeypatch):
        check_parity(
            place,
            options,
            attached=attached,
            accumulation=2,
            prepare=lambda model: setattr(model, "is_slow", stream == "compute"),
        )


@pytest.mark.parametrize("place", [ACCELERATOR], indirect=True)
@pytest.mark.parametrize("stream", ["compute", "up", "down", "update"])
@OFFLOADED
def test_late_streams_with_packed_states(
    place: Place, options: dict[str, Any], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, and clipped where that can be."""
    clip = 0.1 if options in AT_STEP else None
    with late_stream(stream, monkeypatch):
        check_packed(place, options, accumulation=2, clip=clip, is_slow=stream == "compute")


@pytest.mark.parametrize("place", ["simulated", ACCELERATOR], indirect=True)
@pytest.mark.parametrize("attached", [False, True], ids=["", "model"])
def test_a_missing_wait_shows(place: Place, attached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for the update stream, the next forward reads parameters that are being updated."""
    options = {"strategy": "stream", "update_in_backward": False, "offload_gradients": False}
    if place.name == "simulated":
        monkeypatch.setattr("offload.simulation.accelerator.SimulatedAccelerator.wait", lambda self, event: None)
        with pytest.raises(RaceError):
            check_parity(place, options, attached=attached)
        return
    monkeypatch.setattr(AcceleratorRuntime, "wait", lambda self, event: None)
    with late_stream("update", monkeypatch, 20 * LATE), pytest.raises(Exception if IS_SANITIZED else AssertionError):
        check_parity(place, options, attached=attached)
