"""What orders updates and FSDP2's collectives is needed: without any part of it, the simulator sees a race."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from offload.engine import fsdp
from offload.engine.engine import Engine
from offload.engine.norms import Norms
from offload.engine.pipeline import Pipeline
from offload.simulation.ledger import RaceError
from tests.distributed.ranks import Ranks
from tests.distributed.test_fsdp import FUSED, on_a_grid, plain_optimizer, prefetching
from tests.distributed.training import Case, device, loss_of, made, optimizer_of, train

BACKWARD = Case("stream", in_backward=True, options=FUSED)
AT_STEP = Case("host", options=FUSED)
CLIPPED = Case("stream", offload_gradients=True, clip=0.5, options=FUSED)


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "wait_to_gather", lambda engine, unit: None)


def on_the_computing_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fsdp, "_reading", lambda group, async_op: nullcontext())


def for_one_stream_only(patch: pytest.MonkeyPatch) -> None:
    wait = Pipeline.wait
    patch.setattr(Pipeline, "wait", lambda pipeline, unit, keep=False: wait(pipeline, unit))


def letting_go_of_norms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Norms, "taken_early", lambda norms: [])


MUTATIONS = {
    "no wait": (without_waiting, prefetching, BACKWARD),
    "no wait at step": (without_waiting, prefetching, AT_STEP),
    "another stream": (on_the_computing_stream, prefetching, BACKWARD),
    "one stream": (for_one_stream_only, prefetching, AT_STEP),
    "no gather": (without_waiting, lambda: on_a_grid(2, 1), BACKWARD),
    "norms": (letting_go_of_norms, prefetching, CLIPPED),
}


def use_without_the_last_layer(model: Any, optimizer: Any) -> None:
    """After a step: a forward that gathers the last layer ahead and does not use it, and then a look at its shards."""
    loss_of(model, 99).backward()
    optimizer.step()
    layers = model.layers
    model.layers = layers[:-1]
    with torch.no_grad():
        loss_of(model, 100)
        for param in layers[-1].parameters():
            param.to_local() * 2
    model.layers = layers


def races(name: str) -> tuple[str, str]:
    """What the simulator says, of the engine as it is and of the changed one."""
    mutate, build, case = MUTATIONS[name]
    model: Any = made(build)
    train(case, model, plain_optimizer(model))  # DTensor's rules for operations are found out, which is not simulated
    found = []
    for change in (lambda patch: None, mutate):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            try:
                with device("simulated"):
                    model = made(build)
                    optimizer = optimizer_of(case, model)
                    train(case, model, optimizer)
                    use_without_the_last_layer(model, optimizer)
                found.append("")
            except RaceError as error:
                found.append(str(error))
    return found[0], found[1]


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_an_order_there_is_a_race(ranks: Ranks, name: str) -> None:
    for as_it_is, changed in ranks.run(2, races, name):
        assert as_it_is == ""
        assert "nothing orders two accesses" in changed or "memory was freed" in changed
