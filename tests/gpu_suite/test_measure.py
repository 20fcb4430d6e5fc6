"""Cases of the GPU suite on the CPU: every one that runs there, what it records, and what when something goes wrong."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from gpu import cases as cases_module
from gpu import measure
from gpu.cases import Case, DroppedGradients, cases
from gpu.copies import covered, summary
from gpu.measure import GIB, Job, Training, run_case
from gpu.model import SHAPES, Llama, batch_of, make_model


def results_of(case: Case, tokens: list[int], steps: int = 3, **job: Any) -> list[dict[str, Any]]:
    return list(run_case(case, Job(case.name, device="cpu", model="tiny", tokens=tokens, steps=steps, **job)))


def test_every_case_trains_the_same_model(threaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device, so that all schedules run; a case that loses updates has other losses."""
    monkeypatch.setattr(cases_module, "LR", 1e-2)
    found, needing = {}, []
    with torch.compiler.set_stance("force_eager"):
        for case in cases():
            (result,) = results_of(case, [16])
            if result["status"] == "needs a GPU":
                needing.append(case.name)
                continue
            assert result["status"] == "ok", (case.name, result)
            assert len(result["intervals"]) == 3 and result["tokens_per_second"] > 0
            assert len(result["losses"]) == measure.REPEATABLE_STEPS
            found[case.name] = result
            if "stream" in case.name or "host" in case.name:
                assert min(result["link_bytes"].values()) > 0 and result["memory_report"]
            else:
                assert result["link_bytes"] == {"down": 0, "up": 0}
            assert (result["update_bytes"] > 0) == (not case.name.startswith("none"))
    losses = {name: result["last_loss"] for name, result in found.items()}
    assert losses["none"] == losses["none-again"] > losses["adamw"] + 0.1
    assert found["none"]["gradients_repeat"] and len(set(found["none"]["losses"])) == 1
    for case in cases():
        if case.name.startswith("none") or case.name in needing:
            continue
        if case.equals is not None:
            assert found[case.name]["losses"] == found[case.equals]["losses"], case.name
            assert losses[case.name] == losses[case.equals], case.name
        elif case.name.startswith("host"):  # on the CPU, its kernel is that of the device
            assert losses[case.name] == losses["adamw"], case.name
        else:
            assert losses[case.name] == pytest.approx(losses["adamw"], abs=0.1), case.name
    assert all(name.startswith(("torchao-offload", "bnb-paged")) for name in needing) and len(needing) == 4


def test_link_bytes_are_those_of_the_table_in_the_readme(threaded: Any) -> None:
    by_name = {case.name: case for case in cases()}
    with torch.device("meta"):
        count = sum(p.numel() for p in Llama(SHAPES["tiny"]).parameters())
    packed = 4 + 8 / 256
    expected = {
        "stream": 4.0,
        "host": 2.0,
        "host-offload-gradients": 2.0,
        "stream-offload-gradients+model": 6.0,
        "packed-stream-in-backward+model": packed,
        "packed-stream-offload-gradients+model": packed + 2,
    }
    for name, per_parameter in expected.items():
        (result,) = results_of(by_name[name], [16], steps=1)
        # Scales are rounded up to whole ones for each tensor.
        exact = pytest.approx(per_parameter * count, rel=0.01 if "packed" in name else 0.0)
        assert result["link_bytes"] == {"down": exact, "up": exact}, name


def test_states_inside_subclasses_are_counted() -> None:
    case = next(case for case in cases() if case.name == "torchao-adamw8bit")
    with torch.compiler.set_stance("force_eager"):
        (result,) = results_of(case, [16], steps=1)
    with torch.device("meta"):
        count = sum(p.numel() for p in Llama(SHAPES["tiny"]).parameters())
    # Three times the parameter's two bytes, and twice two moments of a byte each; small tensors stay in bf16, and each
    # state has scales and a table.
    assert 6 * count + 4 * count <= result["update_bytes"] < 6 * count + 5 * count


def test_llama_2_7b_has_its_number_of_parameters() -> None:
    with torch.device("meta"):
        model = Llama(SHAPES["7b"])
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_the_loss_is_that_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.model.LOSS_CHUNK", 5)
    model = make_model(SHAPES["tiny"], "cpu").float()
    ids, targets = batch_of(16, 256, "cpu")
    hidden: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda *args: hidden.append(args[-1]))
    loss = model(ids, targets)
    handle.remove()
    expected = torch.nn.functional.cross_entropy(model.output(hidden[0]).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)


def test_a_token_sees_only_those_before_it() -> None:
    model = make_model(SHAPES["tiny"], "cpu").float()
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *args: hidden.append(args[-1]))
    ids, targets = batch_of(16, 256, "cpu")
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    model(ids, targets), model(changed, targets)
    assert torch.equal(hidden[0][0, :10], hidden[1][0, :10])
    assert not torch.equal(hidden[0][0, 11:], hidden[1][0, 11:])


def test_gradients_that_do_not_repeat_are_told() -> None:
    """A model whose second backward is another one."""

    class Drifting(DroppedGradients):
        def count(self) -> None:
            super().count()
            self.turns = getattr(self, "turns", 0) + 1

        def _drop(self, param: torch.Tensor) -> None:
            assert param.grad is not None
            if getattr(self, "turns", 0) > 1:
                param.grad.flatten()[0] += 1
            super()._drop(param)

    (result,) = results_of(Case("none", Drifting), [16])
    assert result["gradients_repeat"] is False


def test_only_the_first_size_has_comparable_losses() -> None:
    small, large = results_of(cases()[0], [16, 32])
    assert "losses" in small and "losses" not in large
    assert not torch.are_deterministic_algorithms_enabled()


def test_paged_optimizers_have_the_whole_card_or_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is the card filled to hold them to less, nor do they ask for more than it has free."""
    paged = [case for case in cases() if case.managed]
    assert {case.name for case in paged} == {"bnb-paged-adamw8bit", "bnb-paged-adamw32bit"}
    job = Job("bnb-paged-adamw8bit", device="cuda", model="tiny", tokens=[16, 32], memory_gib=16)
    assert [r["status"] for r in run_case(paged[0], job)] == ["whole card only"] * 2

    model = make_model(SHAPES["tiny"], "cpu")
    count = sum(p.numel() for p in model.parameters())
    for case, per_parameter in ((paged[0], 2), (paged[1], 8)):
        needed = (per_parameter + 2) * count
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda needed=needed: (needed, 141 * GIB))
        with pytest.raises(torch.OutOfMemoryError, match="managed memory"):
            measure.check_managed_memory(case, model)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda needed=needed: (2 * needed, 141 * GIB))
        measure.check_managed_memory(case, model)


class Card:
    """Of the functions that tell and limit a card's memory, what they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, taken: int, reserved: int) -> None:
        self.fractions: list[float] = []
        for name, answer in {
            "torch.accelerator.synchronize": None,
            "torch.accelerator.empty_cache": None,
            "torch.accelerator.memory_reserved": reserved,
            "torch.cuda.mem_get_info": (total - taken, total),
        }.items():
            monkeypatch.setattr(name, lambda *args, answer=answer: answer)
        monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", self.fractions.append)


@pytest.mark.parametrize(("nominal", "visible"), [(16, 15.70), (24, 23.51), (48, 47.04)])
def test_held_to_what_a_card_of_that_size_leaves(monkeypatch: pytest.MonkeyPatch, nominal: int, visible: float) -> None:
    """What the allocator has itself already is part of what it may have."""
    card = Card(monkeypatch, total=140 * GIB, taken=GIB, reserved=GIB // 4)
    facts = measure.prepare_device(Job("none", device="cpu", model="tiny", memory_gib=nominal))
    assert facts == {"context_bytes": 3 * GIB // 4, "visible_bytes": int(visible * GIB)}
    assert card.fractions == [pytest.approx((visible - 0.75) / 140)]


def test_a_card_that_is_smaller_or_in_use_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, total=12 * GIB, taken=GIB, reserved=0)
    assert "visible_bytes" not in measure.prepare_device(Job("none", device="cpu", model="tiny", memory_gib=16))
    card = Card(monkeypatch, total=140 * GIB, taken=50 * GIB, reserved=0)
    with pytest.raises(RuntimeError, match="another process"):
        measure.prepare_device(Job("none", device="cpu", model="tiny", memory_gib=16))
    assert card.fractions == []


def test_a_case_that_does_not_fit_is_a_result() -> None:
    def too_large(model: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    class Large(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("CUDA error: out of memory")

    def missing(model: Any) -> Any:
        raise ModuleNotFoundError("No module named 'elsewhere'")

    def broken(model: Any) -> Any:
        raise ValueError("no")

    def statuses(build: Any) -> list[tuple[int, str]]:
        return [(r["tokens"], r["status"]) for r in results_of(Case("a", build), [16, 32])]

    assert statuses(too_large) == [(16, "out of memory"), (32, "out of memory")]
    assert statuses(lambda model: Large(model.parameters())) == [(16, "out of memory"), (32, "out of memory")]
    assert statuses(missing) == [(16, "not installed"), (32, "not installed")]
    assert statuses(broken) == [(16, "error"), (32, "error")]


def test_a_loss_that_is_not_a_number_is_an_error() -> None:
    def build(model: Any) -> Any:
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
        return None

    (result,) = results_of(Case("a", build), [16])
    assert result["status"] == "error" and "loss is nan" in result["error"]


def test_what_the_optimizer_warns_of_is_recorded_and_a_fallback_is_an_error() -> None:
    def warning(text: str) -> Any:
        def build(model: Any) -> Any:
            warnings.warn_explicit(text, UserWarning, "offload/engine/memory.py", 1)
            return None

        return build

    shown = warnings.showwarning
    try:
        with warnings.catch_warnings():
            (result,) = results_of(Case("a", warning("page-locking 1.00 GiB of host memory failed")), [16], steps=1)
            assert result["warnings"] == ["page-locking 1.00 GiB of host memory failed"]
            (result,) = results_of(Case("a", warning("the GPU kernel of offload.optim cannot be used (x)")), [16])
            assert result["status"] == "error" and "cannot be used" in result["error"]
    finally:
        warnings.showwarning = shown


def test_kernels_that_triton_compiles_are_counted() -> None:
    knobs = pytest.importorskip("triton.knobs", reason="triton has no build for this platform")
    before = knobs.compilation.listener
    try:
        compiling = measure.Compiling()
        times = knobs.CompileTimes(ir_initialization=500_000, lowering_stages=[("ttir", 250_000)], store_results=0)
        for is_hit in (False, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=is_hit)
        assert (compiling.seconds, compiling.count) == (0.75, 1)
    finally:
        knobs.compilation.listener = before


def test_without_triton_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert measure.Compiling().count == 0


def test_intervals_are_between_the_ends_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a device whose steps end at 10, 13, 14 and 18 s, and which then needs until 20 s."""
    training = Training(make_model(SHAPES["tiny"], "cpu"), None, 16, "cpu")
    marks = iter([10.0, 13.0, 14.0, 18.0])
    monkeypatch.setattr(training, "step", lambda: None)
    monkeypatch.setattr(training, "mark", lambda: next(marks))
    clock = iter([10.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    found = measure.time_steps(training, 3)
    assert found == {
        "step_seconds": 3.0,
        "mean_step_seconds": pytest.approx(10 / 3),
        "drain_seconds": 2.0,
        "intervals": [3.0, 1.0, 4.0],
    }


# Copies


def event(name: str, start: float, length: float, category: str = "gpu_memcpy", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": args}


def test_copies_are_counted_by_direction_and_overlapping_ones_once() -> None:
    large = 1 << 20
    found = summary(
        [
            {"ph": "M", "name": "process_name"},
            event("Memcpy HtoD (Pinned -> Device)", 0, 10, bytes=1000),
            event("Memcpy HtoD (Pinned -> Device)", 5, 10, bytes=2000),
            event("Memcpy HtoD (Pinned -> Device)", 100, 5, bytes=1000),
            event("Memcpy DtoH (Device -> Pageable)", 0, 4, bytes=large),
            event("Memcpy DtoH (Device -> Pageable)", 4, 4, bytes=8),
            event("Memcpy DtoD (Device -> Device)", 0, 50, bytes=7),
            event("_update", 0, 30, "kernel"),
            event("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", 40, 20, "kernel"),
            event("ampere_bf16_gemm_update", 0, 500, "kernel"),
        ]
    )
    assert found["up"] == {"bytes": 4000, "seconds": 20e-6, "copies": 3, "bytes_per_second": pytest.approx(2e8)}
    assert found["down"]["bytes"] == large + 8 and found["down"]["seconds"] == 8e-6
    assert found["pageable_bytes"] == large
    assert found["update"] == {"seconds": 50e-6, "launches": 2}


def test_without_copies_there_is_no_rate() -> None:
    found = summary([])
    assert found["up"] == {"bytes": 0, "seconds": 0.0, "copies": 0} and found["update"]["launches"] == 0


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0), ([(0, 2), (1, 5), (2, 3)], 5), ([(4, 5), (0, 1)], 2), ([(0, 9), (1, 2), (8, 10)], 10)],
)
def test_covered(spans: list[tuple[float, float]], length: float) -> None:
    assert covered(spans) == length
