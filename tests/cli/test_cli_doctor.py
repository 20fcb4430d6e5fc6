"""``tune doctor``: what is told, what counts as a problem, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from offload.cli import doctor, installation
from offload.cli.main import main
from offload.host_memory import HostMemory
from offload.metrics import this_machine
from offload.plan import rates
from offload.plan.profile import Profile, profile_path, read_profile

RATES = {"host_copy": 40e9, "cpu_adamw": {"torch fused": 1e9}, "matmul": 2e11}
MEASURE = doctor._measure
CARD = dict(zip(this_machine.SMI, ("RTX 4090", "580.1", "4", "4", "16", "16", "450.00"), strict=True))


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_measure", lambda device, lock_gib: dict(RATES))
    monkeypatch.setattr(this_machine, "cards", list)
    monkeypatch.setattr(installation, "mismatches", list)


def test_it_tells_and_keeps_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--device", "cpu"])
    out = capsys.readouterr().out
    told = {line[:30].strip(): line[30:].strip() for line in out.splitlines()}
    assert told["host memory, all threads"] == "40.0 GB/s" and told["torch"] == torch.__version__
    assert told["matrix products"] == "0.20 TFLOPS"
    assert any(line.split()[-4:] == ["fused", "1,000", "M", "parameters/s"] for line in out.splitlines())
    assert str(profile_path()) in out
    profile = read_profile(this_machine.machine_of(torch.device("cpu"), []))
    assert profile is not None and profile.rates == RATES
    assert status == ("problem: " in out)


def test_costs_of_training_that_were_not_told_apart_are_left_out(monkeypatch, capsys) -> None:
    costs = {"products": 2e-11, "attention": 0.0, "moved": 0.0, "launches": 0.0}
    training = {"fp32": costs, "bf16": {**costs, "moved": 5e-10}}
    monkeypatch.setattr(doctor, "_measure", lambda device, lock_gib: {**RATES, "training": training})
    main(["doctor", "--device", "cpu"])
    out = capsys.readouterr().out
    told = [line.partition("CPU, ")[2].split(maxsplit=1) for line in out.splitlines() if "training on the CPU" in line]
    assert told == [["fp32", "products 50 GFLOPS"], ["bf16", "products 50 GFLOPS, others 2.0 GB/s"]]


@pytest.mark.parametrize(("had", "share"), [(0.55, "45%"), (0.89, "11%"), (0.9, None), (1.0, None), (None, None)])
def test_what_a_busy_machine_measured_is_to_be_measured_again(
    had: float | None, share: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so itself, and so does what predicts from it, a profile of before excepted."""
    measured = {**RATES, "training": {}} | ({} if had is None else {"cores_had": had})
    monkeypatch.setattr(doctor, "_measure", lambda device, lock_gib: measured)
    main(["doctor", "--device", "cpu"])
    told = [line for line in capsys.readouterr().out.splitlines() if "was busy" in line]
    costs = this_machine.costs_here()
    assert costs is not None
    if share is None:
        assert not told and costs[1].endswith("measured on " + profile_of_cpu().date[:10])
        return
    note = f"other programs, or a limit, had {share} of the cores then: predicted steps are too long; measure again"
    assert len(told) == 1 and note in told[0] and note in costs[1]


def profile_of_cpu() -> Profile:
    profile = this_machine.profile_here(torch.device("cpu"))
    assert profile is not None
    return profile


def test_the_worst_share_of_the_cores_while_measuring_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((1.0, 0.4, 0.8))
    nothing = dataclasses.make_dataclass("Nothing", [])()
    monkeypatch.setattr(rates, "cores_had", lambda: next(found))
    for name in ("host_memory_rates", "cpu_adamw_rates"):
        monkeypatch.setattr(rates, name, dict)
    monkeypatch.setattr(rates, "matmul_rate", lambda device, size: 1e11)
    monkeypatch.setattr("offload.plan.calibration.training_costs", lambda dtype: nothing)
    assert MEASURE(torch.device("cpu"), 1)["cores_had"] == 0.4
    assert next(found, None) is None


def test_json_has_the_same_and_quick_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json", "--quick", "--device", "cpu"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"software", "device", "memory", "disk", "wandb", "problems"}
    assert report["memory"]["total_gib"] >= report["memory"]["usable_gib"] > 0
    assert not profile_path().exists()


@pytest.mark.parametrize(("limit", "told"), [(None, None), (64, None), (65, None), (16, 16.0)])
def test_a_limit_that_is_none_is_not_told(limit: int | None, told: float | None, monkeypatch) -> None:
    """A control group may have as much as the machine, or more."""
    limited = None if limit is None else limit * doctor.GIB
    memory = HostMemory(64 * doctor.GIB, 60 * doctor.GIB, limited, 2 * doctor.GIB, doctor.GIB // 16, False)
    monkeypatch.setattr("offload.host_memory.host_memory", lambda: memory)
    section = doctor._memory()
    assert section.get("limit_of_control_group_gib") == told and section["ulimit_locked_gib"] == 0.0625
    assert section["total_gib"] == 64.0 and section["usable_gib"] == (14.0 if told else 60.0)


def test_a_cache_that_cannot_be_written_costs_a_warning(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    main(["doctor", "--device", "cpu"])
    captured = capsys.readouterr()
    assert "warning: what was measured cannot be kept" in captured.err and "host memory" in captured.out


def test_without_a_home_folder_nothing_is_kept(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A container's user without an entry."""

    def missing(key: object) -> None:
        raise KeyError(key)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", missing)
    main(["doctor", "--device", "cpu"])
    captured = capsys.readouterr()
    assert "warning: what was measured cannot be kept: there is no home folder: set XDG_CACHE_HOME" in captured.err
    assert "host memory" in captured.out and this_machine.profile_here(torch.device("cpu")) is None


def test_a_card_that_torch_cannot_use_is_a_problem(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(this_machine, "cards", lambda: [CARD])
    assert main(["doctor", "--quick", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "card 0" in out and "RTX 4090, driver 580.1, PCIe 4.0 x16 of x16, 450.00 W" in out
    assert "problem: RTX 4090 is here, and torch cannot use it" in out


def test_half_the_lanes_are_a_problem() -> None:
    told = list(installation.problems(torch.device("cpu"), [{**CARD, "pcie_lanes": "8"}]))
    assert any(each.startswith("RTX 4090 uses 8 of its 16 PCIe lanes") for each in told)


def test_no_kernel_and_wsl_are_problems(monkeypatch) -> None:
    monkeypatch.setattr("offload.optim.cpu.instruction_sets", list)
    (told,) = installation.problems(torch.device("cpu"), [])
    assert told.startswith("the CPU kernel of offload.optim is missing")
    (told,) = doctor._memory_problems({"wsl": True})
    assert "WSL" in told and ".wslconfig" in told


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--lock-gib", "0"]) == 2
    assert main(["doctor", "--device", "tpu"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def distribution(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_versions_that_do_not_fit_are_told_at_any_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    distribution(tmp_path, "top_a", "1.0", "middle-b>=2", "nowhere-c>=1", 'extra-d>=1 ; extra == "x"')
    distribution(tmp_path, "middle_b", "2.5", "low-e<3", "top-a")
    distribution(tmp_path, "low_e", "3.1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert installation.mismatches("top-a") == [
        'middle-b needs low-e<3, 3.1 is installed: pip install "low-e<3"',
        'top-a needs nowhere-c>=1, which is not installed: pip install "nowhere-c>=1"',
    ]
