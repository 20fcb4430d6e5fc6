"""scripts/gpu_suite.py on the CPU: every case that runs there, and what it records when something goes wrong."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_suite as suite
import pytest
import torch

EXACT = ("adamw", "resident", "stream", "host")
"""Cases that run torch's own AdamW in some way; the 8-bit ones round."""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "gpu_suite.json"


def run(output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    settings = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--steps", "2", "--output", str(output)]
    code = suite.main([*settings, *arguments])
    return code, json.loads(output.read_text())


def results_of(case: Any, tokens: list[int], steps: int = 3) -> list[dict[str, Any]]:
    return list(suite.run_case(case, suite.Job(case.name, device="cpu", model="tiny", tokens=tokens, steps=steps)))


def test_every_case_trains_the_same_model(threaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device, so that all schedules run; a case that loses updates has another loss."""
    monkeypatch.setattr(suite, "LR", 1e-2)
    losses, needing = {}, []
    with torch.compiler.set_stance("force_eager"):
        for case in suite.cases():
            (result,) = results_of(case, [16])
            if result["status"] == "needs a GPU":
                needing.append(case.name)
                continue
            assert result["status"] == "ok", (case.name, result)
            assert len(result["intervals"]) == 3 and result["tokens_per_second"] > 0
            losses[case.name] = result["last_loss"]
            if "stream" in case.name or "host" in case.name:
                assert min(result["link_bytes"].values()) > 0 and result["memory_report"]
            else:
                assert result["link_bytes"] == {"down": 0, "up": 0}
    assert losses["none"] == losses["none-again"] > losses["adamw"] + 0.1
    for name, loss in losses.items():
        if name.startswith("none"):
            continue
        if "8bit" in name or name.startswith("packed"):
            assert loss == pytest.approx(losses["adamw"], abs=0.1), name
        else:
            assert name.startswith(EXACT) and loss == losses["adamw"], name
    assert all(name.startswith(("torchao-offload", "bnb-paged")) for name in needing) and len(needing) == 4


def test_link_bytes_are_those_of_the_table_in_the_design(threaded: Any) -> None:
    by_name = {case.name: case for case in suite.cases()}
    with torch.device("meta"):
        count = sum(p.numel() for p in suite.Llama(suite.SHAPES["tiny"]).parameters())
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


def test_llama_2_7b_has_its_number_of_parameters() -> None:
    with torch.device("meta"):
        model = suite.Llama(suite.SHAPES["7b"])
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616


def test_the_loss_is_that_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LOSS_CHUNK", 5)
    model = suite.make_model(suite.SHAPES["tiny"], "cpu").float()
    ids, targets = suite.batch_of(16, 256, "cpu")
    hidden: list[torch.Tensor] = []
    handle = model.norm.register_forward_hook(lambda *args: hidden.append(args[-1]))
    loss = model(ids, targets)
    handle.remove()
    expected = torch.nn.functional.cross_entropy(model.output(hidden[0]).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected)


def test_a_token_sees_only_those_before_it() -> None:
    model = suite.make_model(suite.SHAPES["tiny"], "cpu").float()
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda *args: hidden.append(args[-1]))
    ids, targets = suite.batch_of(16, 256, "cpu")
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    model(ids, targets), model(changed, targets)
    assert torch.equal(hidden[0][0, :10], hidden[1][0, :10])
    assert not torch.equal(hidden[0][0, 11:], hidden[1][0, 11:])


@pytest.mark.slow
def test_records_each_case_and_goes_on_where_it_ended(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, content = run(output, "--only", "none|stream-in-backward[+]model", "--tokens", "32", "16")
    assert code == 0
    results = content["results"]
    cases = ["none", "stream-in-backward+model"]
    assert [(r["case"], r["tokens"]) for r in results] == [(case, tokens) for case in cases for tokens in (16, 32)]
    assert all(r["status"] == "ok" and r["exposed_seconds"] is not None and r["bound_seconds"] > 0 for r in results)
    (first,) = content["runs"]
    assert {"date", "command", "commit", "environment", "rates", "left_out"} <= set(first)
    assert first["environment"]["torch"] == torch.__version__

    code, content = run(output, "--only", "none|adamw", "--tokens", "16")
    assert code == 0 and content["results"][:4] == results and len(content["runs"]) == 2
    (added,) = content["results"][4:]
    assert (added["case"], added["tokens"], added["run"]) == ("adamw", 16, 1)
    capsys.readouterr()
    assert suite.main(["--table", "--output", str(output)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5


def test_a_trace_has_the_steps(output: Path) -> None:
    code, content = run(output, "--trace", "host+model", "--tokens", "16")
    path = Path(content["results"][0]["trace"])
    assert code == 0 and path.parent == output.parent and path.stat().st_size > 1000


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
        return [(r["tokens"], r["status"]) for r in results_of(suite.Case("a", build), [16, 32])]

    assert statuses(too_large) == [(16, "out of memory"), (32, "out of memory")]
    assert statuses(lambda model: Large(model.parameters())) == [(16, "out of memory"), (32, "out of memory")]
    assert statuses(missing) == [(16, "not installed"), (32, "not installed")]
    assert statuses(broken) == [(16, "error"), (32, "error")]


def test_a_loss_that_is_not_a_number_is_an_error() -> None:
    def build(model: Any) -> Any:
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
        return None

    (result,) = results_of(suite.Case("a", build), [16])
    assert result["status"] == "error" and "loss is nan" in result["error"]


def test_a_process_that_dies_or_overruns_is_recorded(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results from before its end are kept; after a death the next case runs, after the budget nothing does."""
    result = suite.MARK + json.dumps({"tokens": 16, "status": "needs a GPU"})
    rates = {"environment": {"cpu": "a"}, "rates": {"each_of_both": 1.0}}
    overrun = output.parent / "overrun"
    output.parent.mkdir()
    os.mkfifo(overrun)
    programs = {
        "rates": f"print({suite.MARK + json.dumps(rates)!r})",
        "none": f"print({result!r}, flush=True); import os; print('so it is', flush=True); os.abort()",
        "adamw": f"print({result!r}, flush=True); open({str(overrun)!r}, 'w'); import signal; signal.pause()",
    }
    late = [0.0]

    class Timer:
        """Of the case that overruns: the time is up when it says so."""

        def __init__(self, seconds: float, stop: Callable[[], None]) -> None:
            def wait() -> None:
                overrun.open().close()
                late[0] = 1000.0
                stop()

            self.thread = threading.Thread(target=wait, daemon=True)

        def start(self) -> None:
            if jobs[-1] == "adamw":
                self.thread.start()

        def cancel(self) -> None:
            return None

    jobs: list[str] = []

    def command(job: Any) -> list[str]:
        jobs.append(job.case)
        return [sys.executable, "-c", programs[job.case]]

    monkeypatch.setattr(suite, "child_command", command)
    monkeypatch.setattr(suite, "threading", SimpleNamespace(Timer=Timer, Event=threading.Event))
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0], strftime=time.strftime)
    monkeypatch.setattr(suite, "time", clock)
    arguments = ["--only", "none|adamw|stream", "--tokens", "16", "32", "--budget-seconds", "1000"]
    code, content = run(output, *arguments)
    assert code == 1
    died = content["results"][1]
    assert died["status"] == "ended with status -6" and "so it is" in died["error"]
    assert [(r["case"], r["tokens"]) for r in content["results"]] == [("none", 16), ("none", 32), ("adamw", 16)]
    left_out = [(entry["case"], entry["tokens"]) for entry in content["runs"][0]["left_out"]]
    assert left_out == [("adamw", 32), ("stream", 16), ("stream", 32)]

    # What ended badly is tried again, and its new result takes the place of the old one.
    programs["none"] = f"print({result.replace('16', '32')!r})"
    code, content = run(output, "--only", "none", "--tokens", "16", "32")
    assert code == 0 and [(r["case"], r["tokens"], r["status"]) for r in content["results"]] == [
        ("none", 16, "needs a GPU"),
        ("adamw", 16, "needs a GPU"),
        ("none", 32, "needs a GPU"),
    ]


def test_the_sanitizer_run_is_recorded(output: Path) -> None:
    """Without an accelerator every selected test is skipped; with one this is what --sanitize is for."""
    if torch.accelerator.is_available():
        pytest.skip("would run the accelerator tests within the tests")
    code, content = run(output, "--sanitize")
    (entry,) = content["sanitizer"]
    assert code == 0 and entry["status"] == 0
    assert "skipped" in entry["summary"] and "failed" not in entry["summary"]
    assert entry["command"].startswith("TORCH_CUDA_SANITIZER=1 python -m pytest")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing", "--device", "cpu"], "no case matches"),
        (["--tokens", "5000", "--device", "cpu"], "multiple"),
    ],
)
def test_says_what_is_wrong_with_its_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        suite.main(arguments)
    assert message in capsys.readouterr().err
