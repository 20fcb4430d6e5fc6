"""The GPU suite's commands on the CPU: what they run, what they keep, and what becomes of time, deaths and gaps."""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_suite as entry
import pytest
import torch
from gpu import machine, parts
from gpu import suite as suite_module
from gpu.measure import Job
from gpu.parts import HEADLINE, CaseItem, MachineItem
from gpu.processes import ALLOCATOR, MARK, environment, run_child
from gpu.recipes import RecipeRun
from gpu.testing import Selection

ROOT = Path(__file__).parents[2]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "gpu_suite.json"


def run(output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    settings = ["--device", "cpu", "--model", "tiny", "--layers", "1", "--steps", "1", "--output", str(output)]
    code = entry.main([*settings, *arguments])
    return code, json.loads(output.read_text())


def program(*results: dict[str, Any], then: str = "") -> str:
    """A child's program that prints results."""
    lines = [f"print({MARK + json.dumps(result)!r}, flush=True)" for result in results]
    return "\n".join([*lines, then])


FACTS = {"environment": {"cpu": "a", "torch": "b", "device": "cpu", "card": "NVIDIA H200"}}
DOCTOR = {"status": 1, "problems": ["it is slow"], "rates": {"matmul": 1.0}}
RATES = {"up": 4.0, "down": 4.0, "each_of_both": 2.0, "device_copy": 8.0}


class Children:
    """Stands in for the programs of children; ``programs`` has those that matter, by case."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Job] = []
        self.programs: dict[str, str] = {}
        monkeypatch.setattr(suite_module, "child_command", self.command)

    def command(self, job: Job) -> list[str]:
        self.jobs.append(job)
        return [sys.executable, "-S", "-c", self.programs.get(job.case) or self.usual(job)]

    def usual(self, job: Job) -> str:
        if job.case == "machine":
            return program(FACTS)
        if job.case == "rates":
            return program(RATES)
        if job.case == "doctor":
            return program(DOCTOR)
        if job.case == "page-locking":
            return program({"seconds_per_gib": 0.5})
        return program(*(self.result(tokens) for tokens in job.tokens))

    def result(self, tokens: int, **more: Any) -> dict[str, Any]:
        facts = {"tokens": tokens, "status": "ok", "step_seconds": 1.0, "tokens_per_second": float(tokens)}
        facts |= {"link_bytes": {"down": 0, "up": 0}, "construction_seconds": 0.0, "first_step_seconds": 0.0}
        return {**facts, **more}

    @property
    def cases(self) -> list[tuple[str, float | None, list[int]]]:
        """Of the cases that ran: name, size of the card, tokens."""
        names = ("machine", "rates", "page-locking", "doctor")
        return [(job.case, job.memory_gib, job.tokens) for job in self.jobs if job.case not in names]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


@pytest.fixture
def no_recipes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recipes that end at once; their names."""
    names: list[str] = []

    def run_recipe(recipe: RecipeRun, *_: Any) -> dict[str, Any]:
        names.append(recipe.name)
        return {"status": "ok", "steps": recipe.steps, "tokens_per_second": 1.0}

    monkeypatch.setattr(suite_module, "run_recipe", run_recipe)
    return names


# The parts


def test_part_b_compares_every_way_on_the_whole_card(children: Children, output: Path) -> None:
    code, content = run(output, "--part", "b")
    assert code == 0
    ran = [name for name, _, _ in children.cases]
    assert ran[0] == "none" and ran[-1] == "none-again" and ran[1] == HEADLINE
    assert set(ran[2:-1]) == {
        "packed",
        "adamw",
        "packed-stream-in-backward-8-gib-in-flight+model",
        "packed-host-in-backward+model",
        "packed-stream-offload-gradients+model",
        "torchao-offload-gradients",
    }
    assert all(limit is None and tokens == [16, 32] for _, limit, tokens in children.cases)
    (first,) = content["runs"]
    assert first["rates"] == RATES and first["part"] == "b" and first["left_out"] == []
    assert {"date", "command", "commit", "environment", "not_installed", "drift"} <= set(first)
    assert [found["allocator"] for found in first["page_locking"].values()] == list(parts.LOCKING.values())
    assert all("exposed_seconds" in result for result in content["results"])


def test_part_c_holds_the_headline_to_smaller_cards_first(
    children: Children, no_recipes: list[str], output: Path
) -> None:
    code, content = run(output, "--part", "c")
    assert code == 0
    small = "packed-stream-in-backward-128-mib-in-flight+model"
    assert children.cases[:3] == [(HEADLINE, 16, [16, 32]), (HEADLINE, 24, [16, 32]), ("none", None, [16, 32])]
    assert children.cases[3] == (small, 16, [16, 32])
    assert no_recipes == ["full-7b-16gb", "full-7b-24gb", "full-7b-24gb-auto", "full-7b", "lora-7b"]
    assert [r["name"] for r in content["recipes"]] == no_recipes
    assert content["runs"][0]["doctor"] == DOCTOR
    allocators = {job.allocator for job in children.jobs if job.case == HEADLINE}
    assert allocators == {"", "expandable_segments:True"}
    assert children.cases[-1][0] == "none-again"


def test_part_a_tests_first_and_sanitizes_last(
    children: Children, no_recipes: list[str], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Selection] = []

    def run_tests(selection: Selection, known: dict[str, Any], *_: Any) -> dict[str, Any]:
        ran.append(selection)
        known["a test"] = {"outcome": "failed", "seconds": 0.0, "error": "why"}
        return {"command": "", "outcomes": {"failed": 1}, "left_out": 2}

    monkeypatch.setattr(suite_module, "run_tests", run_tests)
    code, content = run(output, "--part", "a", "--only", "kernels|sanitizer|full-tiny")
    assert code == 1
    assert [selection.name for selection in ran] == ["kernels", "sanitizer"] and no_recipes == ["full-tiny"]
    assert content["tests"]["NVIDIA H200"]["kernels"]["outcomes"] == {"failed": 1}
    assert content["runs"][0]["left_out"] == ["2 tests of kernels", "2 tests of sanitizer"]


def test_tests_of_what_is_not_installed_are_left_out(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite_module, "missing_packages", lambda: ["torchtune"])
    monkeypatch.setattr(suite_module, "run_tests", lambda *_: pytest.fail("it ran"))
    code, content = run(output, "--part", "a", "--only", "recipes")
    assert code == 0 and content["tests"] == {}
    assert "tests, recipes: not installed: torchtune" in capsys.readouterr().out


def test_on_a_gpu_the_parts_have_the_sizes_that_they_claim() -> None:
    size = parts.size_of("cuda", "7b", None)
    tests = [item for item in parts.part_a(size) if isinstance(item, Selection)]
    assert [(item.name, item.marker, item.sanitize) for item in tests] == [
        ("kernels", "gpu", False),
        ("engine", "gpu", False),
        ("recipes", "gpu", False),
        ("optimizers", "gpu", False),
        ("sanitizer", "gpu", True),
    ]
    for item in (*parts.part_a(size), *parts.part_c(size)):
        for file in getattr(item, "files", ()):
            assert (ROOT / file).exists()
    whole = [item for item in parts.part_b(size) if isinstance(item, CaseItem)]
    assert all(item.tokens == (1024, 8192) and item.memory_gib is None for item in whole)
    held = [item for item in parts.part_c(size) if isinstance(item, CaseItem)]
    assert all(item.tokens == (1024, 4096) for item in held)
    assert {(item.shape, item.memory_gib) for item in parts.large_recipes(size)} == {
        ("7b", 16),
        ("7b", 24),
        ("7b", None),
    }
    for part in parts.PARTS.values():
        assert sum(map(parts.seconds_expected, part(size))) < 700


def test_part_a_has_every_test_that_needs_a_gpu() -> None:
    """But for the programs in the tests of the suite itself."""
    tests = [item for item in parts.part_a(parts.SIZE_ON_A_GPU) if isinstance(item, Selection)]
    here = {ROOT / file for item in tests for file in item.files}
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    # accelerated.py has the mark for the files that take its places.
    places = {path for path, text in texts.items() if "tests.engine.accelerated" in text and "Place" in text}
    marked = {path for path, text in texts.items() if "pytest.mark.gpu" in text} | places
    others = {path.relative_to(ROOT / "tests").as_posix() for path in marked - here}
    assert others == {"engine/accelerated.py", *(f"gpu_suite/{name}.py" for name in ("test_suite", "test_testing"))}


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(parts.PARTS))
def test_a_part_can_be_rehearsed(part: str, output: Path) -> None:
    """The command itself, with its real children."""
    command = [sys.executable, "scripts/gpu_suite.py", "--part", part, "--device", "cpu", "--steps", "1"]
    command += ["--output", str(output), "--mirror", str(output.parent / "mirror")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(output.read_text())
    assert content == json.loads((output.parent / "mirror" / output.name).read_text())
    assert content["runs"][0]["left_out"] == [] and "errors" not in content["runs"][0]
    statuses = {result["status"] for result in content["results"]}
    assert statuses <= {"ok", "needs a GPU"}
    assert all(entry["status"] == "ok" and entry["wandb_files"] for entry in content["recipes"])
    assert {"a": 0, "b": 18, "c": 12}[part] == len(content["results"])
    for result in content["results"]:
        assert result.get("same_losses", {"equal": True})["equal"], result["case"]
    if part == "a":
        tests = content["tests"]["cpu"]
        passed = {name: found["outcomes"].get("passed", 0) for name, found in tests.items()}
        assert set(passed) == {"kernels", "engine", "recipes", "sanitizer"} and all(passed.values())
        assert all("failed" not in found["outcomes"] and "problems" not in found for found in tests.values())


# What was measured is kept


def test_the_same_command_goes_on_where_it_ended(
    children: Children, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(output, "--part", "b", "--only", "adamw")
    assert [name for name, _, _ in children.cases] == ["none", "adamw", "none-again"]
    children.jobs.clear()
    _, content = run(output, "--part", "b", "--only", "adamw")
    assert children.cases == [] and len(content["runs"]) == 1
    assert "measured already" in capsys.readouterr().out

    # What is compared with others comes again with new ones, and belongs to its own run.
    _, content = run(output, "--part", "b", "--only", "adamw|packed")
    assert [name for name, _, _ in children.cases] == ["none", "packed", "none-again"]
    assert [(r["case"], r["run"]) for r in content["results"] if r["tokens"] == 16] == [
        ("none", 0),
        ("adamw", 0),
        ("none-again", 0),
        ("none", 1),
        ("packed", 1),
        ("none-again", 1),
    ]
    children.jobs.clear()
    _, content = run(output, "--part", "b", "--only", "adamw", "--fresh")
    assert len(content["runs"]) == 1 and children.cases[1][0] == "adamw"


def test_page_locking_is_a_finding_of_its_own(children: Children, output: Path) -> None:
    run(output, "--part", "b", "--only", "page-locking")
    assert [job.case for job in children.jobs].count("page-locking") == 2
    children.jobs.clear()
    run(output, "--part", "b", "--only", "page-locking")
    assert [job.case for job in children.jobs] == ["machine"]


def timers(
    children: Children, overrun: Path, late: Callable[[], object] = lambda: None
) -> tuple[type[Any], list[float]]:
    """A stand-in for ``threading.Timer`` whose time is up when the case "adamw" opens ``overrun``, and the seconds that
    each was made for."""
    limits: list[float] = []

    class Timer:
        def __init__(self, seconds: float, stop: Callable[[], None]) -> None:
            def wait() -> None:
                overrun.open().close()
                late()
                stop()

            limits.append(seconds)
            self.thread = threading.Thread(target=wait, daemon=True)
            self.daemon = True

        def start(self) -> None:
            if children.jobs[-1].case == "adamw":
                self.thread.start()

        def cancel(self) -> None:
            return None

    return Timer, limits


def test_a_process_that_dies_or_overruns_is_recorded(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results from before its end are kept; after a death the next case runs, after the budget nothing does."""
    found = {"tokens": 16, "status": "needs a GPU"}
    overrun = output.parent / "overrun"
    output.parent.mkdir()
    os.mkfifo(overrun)
    children.programs = {
        "none": program(found, then="import os; print('so it is', flush=True); os.abort()"),
        "adamw": program(found, then=f"open({str(overrun)!r}, 'w'); import signal; signal.pause()"),
    }
    late = [0.0]

    timer, _ = timers(children, overrun, lambda: late.insert(0, 1000.0))
    monkeypatch.setattr("gpu.processes.threading", SimpleNamespace(Timer=timer, Event=threading.Event))
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0], strftime=time.strftime)
    monkeypatch.setattr(suite_module, "time", clock)
    code, content = run(output, "--only", "none|adamw|stream", "--tokens", "16", "32", "--budget-seconds", "1000")
    assert code == 1
    died = content["results"][1]
    assert died["status"] == "ended with status -6" and "so it is" in died["error"]
    assert [(r["case"], r["tokens"]) for r in content["results"]] == [("none", 16), ("none", 32), ("adamw", 16)]
    assert content["runs"][0]["left_out"] == ["adamw at 32 tokens", "stream"]

    # What ended badly is tried again, and its new result takes the place of the old one.
    children.programs["adamw"] = program({**found, "tokens": 32})
    code, content = run(output, "--only", "adamw", "--tokens", "16", "32")
    assert code == 0
    assert [(r["case"], r["tokens"], r["status"]) for r in content["results"] if r["case"] == "adamw"] == [
        ("adamw", 16, "needs a GPU"),
        ("adamw", 32, "needs a GPU"),
    ]


def test_what_hangs_leaves_time_for_the_rest_and_tells_where_it_is(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_module, "LEAST_PATIENCE", 300.0)
    monkeypatch.setattr(suite_module, "PATIENCE", 0.0)
    output.parent.mkdir()
    overrun = output.parent / "overrun"
    os.mkfifo(overrun)
    hangs = f"import threading\ndef hangs():\n    open({str(overrun)!r}, 'w')\n    threading.Event().wait()\nhangs()"
    children.programs["adamw"] = program(children.result(16), then=hangs)
    timer, limits = timers(children, overrun)
    monkeypatch.setattr("gpu.processes.threading", SimpleNamespace(Timer=timer, Event=threading.Event))
    code, content = run(output, "--only", "none|adamw|stream", "--tokens", "16", "32", "--budget-seconds", "1000")
    assert code == 1 and limits[-1] == 300.0
    (hung,) = [r for r in content["results"] if r["case"] == "adamw" and r["tokens"] == 32]
    assert hung["status"] == "did not end within 300 s" and "in hangs" in hung["error"]
    statuses = {(r["case"], r["tokens"]): r["status"] for r in content["results"] if r is not hung}
    assert statuses == dict.fromkeys((("none", 16), ("none", 32), ("adamw", 16), ("stream", 16), ("stream", 32)), "ok")
    assert content["runs"][0]["left_out"] == []


def test_time_is_kept_for_what_everything_is_compared_with(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case takes 100 s of 460: the last of the ways gives way to the closing measurement."""
    now = [0.0]
    usual = children.usual

    def slow(job: Job) -> str:
        now[0] += 100.0 * (job.case not in ("machine", "rates", "page-locking"))
        return usual(job)

    monkeypatch.setattr(children, "usual", slow)
    clock = SimpleNamespace(perf_counter=lambda: now[0], strftime=time.strftime)
    monkeypatch.setattr(suite_module, "time", clock)
    code, content = run(output, "--part", "b", "--budget-seconds", "460")
    ran = [name for name, _, _ in children.cases]
    assert code == 0 and ran == ["none", HEADLINE, "packed", "none-again"]
    left_out = content["runs"][0]["left_out"]
    assert "adamw" in left_out and "torchao-offload-gradients" in left_out and "none-again" not in left_out
    assert content["runs"][0]["seconds"] == 400.0


def test_losses_that_differ_fail_the_command(children: Children, output: Path) -> None:
    children.programs["packed"] = program(children.result(16, losses=[1.0, 2.0]))
    children.programs["packed-stream+model"] = program(children.result(16, losses=[1.0, 2.5]))
    code, content = run(output, "--only", "packed|packed-stream.model", "--tokens", "16")
    (differing,) = [r for r in content["results"] if "same_losses" in r]
    assert code == 1 and differing["same_losses"]["first_unequal_step"] == 2


# What must not be measured, and what may be missing


def test_a_kernel_with_other_bits_is_told_and_what_can_find_out_runs(
    children: Children, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"environment": {**FACTS["environment"], "same_bits": False}}
    children.programs["machine"] = program(facts)
    code, content = run(output, "--part", "b", "--only", "packed")
    assert code == 1 and "OTHER BITS" in capsys.readouterr().out
    assert content["runs"][0]["environment"]["same_bits"] is False and len(content["results"]) == 6


def test_nothing_is_measured_where_a_fallback_would_be(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--part", "b", "--device", "cpu", "--output", str(output)]
    children.programs["machine"] = program({"unfit": "Triton is missing, and so on"})
    assert entry.main(arguments) == 1
    assert "Triton is missing" in capsys.readouterr().err and not output.exists() and children.cases == []

    import hatch_build

    def refuse() -> str:
        raise hatch_build.NoCompiler("no C compiler (cc, gcc or clang; or name one in CC)")

    children.programs.clear()
    with monkeypatch.context() as patch:
        patch.setattr(hatch_build, "build", refuse)
        assert entry.main(arguments) == 1
    said = capsys.readouterr().err
    assert "cannot be compiled" in said and "no C compiler" in said and not output.exists()

    with monkeypatch.context() as patch:
        patch.setattr(machine, "ROOT", ROOT)
        patch.setattr("offload.optim.cpu.load", lambda: None)
        patch.setattr(machine, "build_kernel", lambda: "")
        with pytest.raises(machine.Unfit, match="CPU kernel of offload.optim is missing"):
            machine.check_kernels("cpu")


def test_the_kernels_are_checked_where_they_would_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device: the same bits pass, others do not, and without Triton nothing does."""

    from offload import optim

    facts = machine.check_kernels("cpu")
    assert facts["cpu_kernel"] in optim.cpu.instruction_sets() and "same_bits" not in facts

    class Changed(optim.AdamW):
        """On the device, that is for the second optimizer that is built, a step does something more."""

        built = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            type(self).built += 1
            self.is_changed = type(self).built == 2

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step()
            if self.is_changed:
                self.more(self.param_groups[0]["params"][0])

        def more(self, param: torch.Tensor) -> None:
            return None

    def check(more: Any) -> dict[str, Any]:
        # Not called "cpu", so that it is taken for a device of its own.
        monkeypatch.setattr(optim, "AdamW", type("AdamW", (Changed,), {"more": more}))
        return machine.check_kernels("cpu:0")

    def falls_back(self: Any, param: torch.Tensor) -> None:
        warnings.warn("the GPU kernel of offload.optim cannot be used (No module named 'triton')", stacklevel=1)

    assert check(lambda self, param: None)["same_bits"]
    assert not check(lambda self, param: param.view(-1)[0].add_(1))["same_bits"]
    with pytest.raises(machine.Unfit, match="No module named 'triton'"):
        check(falls_back)


class Blocked(importlib.machinery.PathFinder):
    """Does not find some packages, and neither does anybody after it."""

    names: tuple[str, ...] = ()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] in cls.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def test_missing_packages_are_found_and_told(
    children: Children, output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Blocked, "names", ("torchtune", "wandb"))
    monkeypatch.setattr(sys, "meta_path", [Blocked, *sys.meta_path])
    for name in [n for n in sys.modules if n.split(".")[0] in Blocked.names]:
        monkeypatch.delitem(sys.modules, name)
    assert machine.missing_packages() == ["torchtune", "wandb"]
    code, content = run(output, "--part", "a", "--only", "full-tiny")
    said = capsys.readouterr().out
    assert code == 0 and "torchtune (left out: the recipes)" in said and "recipes need torchtune" in said
    assert content["runs"][0]["not_installed"] == ["torchtune", "wandb"]
    assert content["recipes"][0]["status"] == "not installed"


SITECUSTOMIZE = """
import sys
class Blocked:
    @staticmethod
    def find_spec(fullname, path=None, target=None):
        if fullname.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{fullname!r}}", name=fullname)
sys.meta_path.insert(0, Blocked)
"""


@pytest.mark.slow
def test_runs_without_the_packages_of_others(output: Path, tmp_path: Path) -> None:
    """In the whole command and its children there is no torchtune, torchao, bitsandbytes, omegaconf or wandb."""
    names = tuple(machine.OPTIONAL)
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(names=names))
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "scripts/gpu_suite.py", "--device", "cpu", "--output", str(output), "--steps", "1"]
    choice = ["--only", "none|packed|torchao-adamw8bit|bnb-adamw8bit", "--tokens", "16"]
    for arguments in (choice, ["--part", "a"]):
        done = subprocess.run([*command, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(output.read_text())
    assert {r["case"]: r["status"] for r in content["results"]} == {
        "none": "ok",
        "packed": "ok",
        "bnb-adamw8bit": "not installed",
        "torchao-adamw8bit": "not installed",
    }
    assert content["runs"][0]["not_installed"] == list(names)
    assert {r["status"] for r in content["recipes"]} == {"not installed"}
    tests = content["tests"]["cpu"]
    assert all("problems" not in found and "failed" not in found["outcomes"] for found in tests.values())
    assert all(tests[name]["outcomes"]["passed"] > 0 for name in ("kernels", "engine", "sanitizer"))


# Processes


def test_every_child_has_the_same_allocator_and_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", ALLOCATOR):
        monkeypatch.setenv(name, "max_split_size_mb:1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("site", "/somewhere")))
    plain, chosen = environment(), environment("expandable_segments:True", OTHER="1")
    packages = [str(ROOT), str(ROOT / "scripts"), os.path.abspath("site"), "/somewhere"]
    assert plain["PYTHONPATH"].split(os.pathsep) == packages
    assert not any(key.endswith("ALLOC_CONF") for key in plain)
    assert chosen[ALLOCATOR] == "expandable_segments:True" and chosen["OTHER"] == "1"
    assert plain["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and plain["PYTHONUNBUFFERED"] == "1"


def test_processes_end_with_the_session_of_whoever_started_the_suite() -> None:
    """Where a machine's time is up, a process in a session of its own would go on with the GPU."""
    _, why, said = run_child(
        [sys.executable, "-S", "-c", "import os; print(os.getsid(0), os.getpgrp())"], None, environment()
    )
    session, group = map(int, said.split())
    assert why is None and session == os.getsid(0) and group != os.getpgrp()


def test_a_killed_process_takes_its_own_children_along(tmp_path: Path) -> None:
    """Otherwise they would hold the card."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = f"import time; keep = open({str(fifo)!r}, 'w'); time.sleep(1000)"
    parent = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); import time; time.sleep(999)"
    )
    _, why, _ = run_child([sys.executable, "-c", parent], 3.0, environment())
    assert why == "out of time"
    # The end of the file, which comes when nobody has it open for writing any more.
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(descriptor, 1) == b""
    os.close(descriptor)


# Arguments and the plan


def test_without_arguments_the_plan_is_printed(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--output", str(output)]) == 0
    said = capsys.readouterr().out
    for part in parts.PARTS:
        assert f"python scripts/gpu_suite.py --part {part} --output {output}" in said
    lines = [line for line in said.splitlines() if line.startswith("        ") and "about" not in line]
    assert sum(line.endswith("not measured") for line in lines) == len(lines) - len(parts.PARTS)
    assert not output.exists()


def test_the_plan_tells_what_is_measured(children: Children, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(output, "--part", "b", "--only", "adamw", "--tokens", "1024")
    capsys.readouterr()
    entry.main(["--output", str(output)])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("adamw,")]
    assert line.endswith("1024: ok")


def test_a_trace_has_the_steps(output: Path) -> None:
    arguments = ["--device", "cpu", "--layers", "1", "--tokens", "16", "--output", str(output)]
    assert entry.main([*arguments, "--trace", "host+model"]) == 0
    (path,) = output.parent.glob("trace-host+model-*.json.gz")
    assert path.stat().st_size > 1000 and not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "no case matches"),
        (["--part", "b", "--only", "nothing"], "nothing in part b matches"),
        (["--part", "b", "--tokens", "5000"], "multiple"),
        (["--trace", "nothing"], "no case is called"),
    ],
)
def test_says_what_is_wrong_with_its_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        entry.main([*arguments, "--device", "cpu"])
    assert message in capsys.readouterr().err


def test_machine_items_have_programs() -> None:
    from gpu.child import OTHERS

    size = parts.size_of("cuda", "7b", None)
    items = [item for part in parts.PARTS.values() for item in part(size) if isinstance(item, MachineItem)]
    assert {item.name for item in items} <= set(OTHERS)


def test_recipes_are_not_started_deaf_to_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    """A shell starts a command in the background with SIGINT ignored, and a recipe leaves it so, as under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert entry.main(["--list"]) == 0
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
