"""Which overrides a run is offered that take less memory, and in what words they cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from offload.training.changes import COSTS, TIMES, cheaper, cost, keys_of

OURS = "offload.OffloadOptimizer"
PACKED = {"_component_": OURS, "optimizer_class": "offload.optim.AdamW", "strategy": "stream", "in_flight_gib": 0.125,
          "update_in_backward": True, "offload_gradients": True, "master": "stochastic"}  # fmt: skip
"""With nothing left to save."""


def settings(optimizer: dict[str, Any], **more: Any) -> Any:
    given = {
        "loss": {}, "clip_grad_norm": None, "gradient_accumulation_steps": 1, "dtype": "bf16", "batch_size": 1,
        "enable_activation_checkpointing": True, "tokenizer": {}, **more,
    }  # fmt: skip
    for name in ("loss", "tokenizer"):
        given[name] = OmegaConf.create(given[name])
    return SimpleNamespace(optimizer=optimizer, **given)


def offered(optimizer: dict[str, Any], **more: Any) -> list[str]:
    return [" ".join(changes) for changes in cheaper(settings(optimizer, **more))]


def changed(**more: Any) -> dict[str, Any]:
    return {key: value for key, value in {**PACKED, **more}.items() if value is not None}


@pytest.mark.parametrize(
    ("optimizer", "more", "expected"),
    [
        (PACKED, {}, []),
        (changed(update_in_backward=False), {}, ["optimizer.update_in_backward=True"]),
        (
            changed(update_in_backward=None),
            {"clip_grad_norm": 1.0},
            ["optimizer.update_in_backward=True clip_grad_norm=null"],
        ),
        (changed(update_in_backward=False), {"gradient_accumulation_steps": 2}, []),
        (changed(strategy="resident"), {}, ["optimizer.strategy=stream"]),
        (changed(strategy=None), {}, ["optimizer.strategy=stream"]),
        (changed(strategy="auto"), {}, []),
        (changed(in_flight_gib=0.25), {}, ["optimizer.in_flight_gib=0.125"]),
        (changed(in_flight_gib=None), {}, ["optimizer.in_flight_gib=0.25", "optimizer.in_flight_gib=0.125"]),
        (changed(offload_gradients=None), {}, ["optimizer.offload_gradients=True"]),
        (changed(state_dtype="bf16"), {}, ["optimizer.state_dtype=int8"]),
        (changed(master=None), {}, ["optimizer.master=split24", "optimizer.master=stochastic"]),
        (changed(master="split24"), {}, ["optimizer.master=stochastic"]),
        (changed(master="split"), {"dtype": "fp32"}, []),
        (
            changed(optimizer_class=None, master=None, fused=True),
            {},
            ["optimizer.optimizer_class=offload.optim.AdamW ~optimizer.fused"],
        ),
        (changed(optimizer_class="torch.optim.SGD", master=None), {}, []),
        (PACKED, {"loss": {"num_output_chunks": 8}}, ["loss.num_output_chunks=32"]),
        (PACKED, {"enable_activation_checkpointing": False}, ["enable_activation_checkpointing=True"]),
        (PACKED, {"batch_size": 5}, ["batch_size=2", "batch_size=1"]),
        (PACKED, {"batch_size": 2}, ["batch_size=1"]),
        (PACKED, {"tokenizer": {"max_seq_len": 2048}}, ["tokenizer.max_seq_len=1024", "tokenizer.max_seq_len=512"]),
        (PACKED, {"tokenizer": {"max_seq_len": 512}}, ["tokenizer.max_seq_len=256"]),
        (PACKED, {"tokenizer": {"max_seq_len": 511}}, []),
        (
            {"_component_": "torch.optim.AdamW"},
            {},
            ["optimizer=offload.OffloadOptimizer optimizer.optimizer_class=offload.optim.AdamW "
             "optimizer.strategy=stream"],
        ),
        ({"_component_": "schedulefree.AdamWScheduleFree"}, {}, []),
    ],
)  # fmt: skip
def test_what_is_offered(optimizer: dict[str, Any], more: dict[str, Any], expected: list[str]) -> None:
    assert offered(optimizer, **more) == expected


def test_costs_are_those_of_each_key_told_once() -> None:
    changes = ["+batch_size=1", "~optimizer.master", "optimizer.state_dtype=int8", "optimizer.optimizer_class=x"]
    assert keys_of(changes) == ["batch_size", "optimizer.master", "optimizer.state_dtype", "optimizer.optimizer_class"]
    assert cost(changes) == "; ".join([COSTS["batch_size"], COSTS["optimizer.master"], COSTS["optimizer.state_dtype"]])
    again = ["enable_activation_checkpointing=True"]
    assert cost(again).startswith(TIMES["enable_activation_checkpointing"] + "; ")
    assert cost(again, "+5 ms a step") == "+5 ms a step; " + COSTS["enable_activation_checkpointing"]
