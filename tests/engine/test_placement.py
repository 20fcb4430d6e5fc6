"""Rules over state paths: what they match, which one decides, and what is said of those that match nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from offload import OffloadOptimizer
from offload.engine.placement import Placement
from offload.errors import UserError

NORMS = "exp_avg/.*norm.*"


def rule(pattern: str, memory: str) -> dict[str, str]:
    return {"pattern": pattern, "memory": memory}


@pytest.mark.parametrize(
    ("rules", "norm", "weight", "square"),
    [
        (".*", "pinned_host", "pinned_host", "pinned_host"),
        ([".*"], "pinned_host", "pinned_host", "pinned_host"),
        ([], "device", "device", "device"),
        ("exp_avg/.*", "pinned_host", "pinned_host", "device"),
        ([".*", rule(NORMS, "device")], "device", "pinned_host", "pinned_host"),
        ([rule(NORMS, "device"), ".*"], "pinned_host", "pinned_host", "pinned_host"),  # later rules win
        (
            [rule(".*", "host"), rule("exp_avg_sq/.*", "pinned_host"), rule(NORMS, "device")],
            "device",
            "host",
            "pinned_host",
        ),
        (rule("x", "y") and [rule("exp_avg/layers", "host")], "device", "device", "device"),  # whole paths only
        ("layers.*", "device", "device", "device"),
        (r"exp_avg(_sq)?/layers\.\d+\..*weight", "device", "pinned_host", "pinned_host"),
    ],
    ids=str,
)
def test_the_last_rule_that_matches_the_whole_path_decides(rules: Any, norm: str, weight: str, square: str) -> None:
    placement = Placement(rules)
    assert placement.memory("exp_avg", "layers.0.norm.scale") == norm
    assert placement.memory("exp_avg", "layers.0.attn.weight") == weight
    assert placement.memory("exp_avg_sq", "layers.0.attn.weight") == square


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (7, "optimizer.offload_states: expected a regular expression or a list of rules, got 7"),
        ([7], "optimizer.offload_states[0]: expected a regular expression or {pattern: ..., memory: ...}, got 7"),
        ([".*", {"pattern": "x"}], "optimizer.offload_states[1]: expected a regular expression or {pattern"),
        ([{"pattern": "x", "memory": "host", "more": 1}], "optimizer.offload_states[0]: expected"),
        (
            [rule(".*", "pinned")],
            "optimizer.offload_states[0].memory: got 'pinned', expected one of device, pinned_host, host; did you mean "
            "pinned_host?",
        ),
        ("exp_avg/(", "optimizer.offload_states.pattern: 'exp_avg/(' is not a regular expression: "),
        ([".*", rule("*", "host")], "optimizer.offload_states[1].pattern: '*' is not a regular expression: "),
        ([rule(3, "host")], "optimizer.offload_states[0].pattern: 3 is not a regular expression: "),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_rules_that_cannot_be_read_are_refused_in_one_line(rules: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Placement(rules)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


PATHS = [
    f"{state}/layers.{i}.{name}"
    for i in range(3)
    for name in ("attn.weight", "norm.scale")
    for state in ("exp_avg", "exp_avg_sq")
]


def test_a_pattern_that_matches_nothing_names_the_nearest_paths() -> None:
    Placement([".*", rule("exp_avg/layers.2.norm.scale", "device")]).check(PATHS)
    with pytest.raises(UserError) as error:
        Placement([".*", rule("exp_avg/layer.2.norm.scale", "device")]).check(PATHS)
    text = str(error.value)
    assert text.startswith("optimizer.offload_states: 'exp_avg/layer.2.norm.scale' matches no state")
    near = text.partition("such as ")[2].partition(";")[0].split(" or ")
    assert near[0] == "exp_avg/layers.2.norm.scale" and set(near) <= set(PATHS) and len(near) == 3
    assert "\n" not in text


@pytest.mark.parametrize("pattern", ["norm", "exp_avg", "layers.0", "exp_avg/layers.0", "EXP_AVG/.*"])
def test_a_partial_match_is_no_match(pattern: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(pattern))):
        Placement(pattern).check(PATHS)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize("pattern", ["exp_avgs/.*", "exp_avg/weight", "momentum_buffer/.*"])
def test_the_optimizer_refuses_it_before_the_first_step(simulated: Any, pattern: str) -> None:
    with pytest.raises(
        UserError, match=r"optimizer\.offload_states: .* matches no state.*such as \w+/\d\.(weight|bias)"
    ):
        OffloadOptimizer(model().named_parameters(), strategy="stream", offload_states=[".*", rule(pattern, "device")])


def test_on_the_cpu_it_is_refused_too() -> None:
    with pytest.raises(UserError, match="matches no state"):
        OffloadOptimizer(model().named_parameters(), strategy="stream", offload_states="nothing/.*")


@pytest.mark.parametrize("strategy", ["host", "resident"])
def test_other_strategies_refuse_rules(strategy: Any) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.offload_states: with strategy={strategy}.*strategy=stream"):
        OffloadOptimizer(model().parameters(), strategy=strategy, offload_states="exp_avg/.*")


def test_a_group_of_another_format_has_its_own_states(simulated: Any) -> None:
    """Only the second group has scales, which only the group itself says."""
    first, second = model().bfloat16(), model().bfloat16()
    groups = [
        {"params": [(f"first.{name}", param) for name, param in first.named_parameters()]},
        {"params": [(f"second.{name}", param) for name, param in second.named_parameters()], "state_dtype": "int8"},
    ]

    def build(pattern: str) -> OffloadOptimizer:
        kinds: dict[str, Any] = {"optimizer_class": "offload.optim.AdamW", "state_dtype": "bf16"}
        return OffloadOptimizer(groups, strategy="stream", offload_states=[".*", rule(pattern, "device")], **kinds)

    build("exp_avg_scale/second.0.weight")
    with pytest.raises(UserError, match="'exp_avg_scale/first.0.weight' matches no state"):
        build("exp_avg_scale/first.0.weight")
