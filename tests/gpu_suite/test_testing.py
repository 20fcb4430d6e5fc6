"""Tests of the GPU suite's test runner: real pytest processes that fail, crash, hang and break their device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu import testing
from gpu.testing import Selection, read_lines, run_tests, without_tests

FILE = """
import os, time, pytest

@pytest.mark.gpu
def test_passes(): pass

@pytest.mark.gpu
def test_fails(): assert "one" == "other"

@pytest.mark.gpu
def test_crashes(): os.abort()

@pytest.mark.gpu
def test_hangs(): time.sleep(1000)

@pytest.mark.gpu
def test_skips(): pytest.skip("why not")

@pytest.mark.gpu
def test_breaks_the_device(): raise RuntimeError("CUDA error: an illegal memory access was encountered")

@pytest.fixture
def broken():
    yield
    raise ValueError("in teardown")

@pytest.mark.gpu
def test_leaves_a_mess(broken): pass

@pytest.mark.gpu
def test_in_a_clean_process(): assert not os.environ.get("BROKEN")

@pytest.mark.gpu
def test_sees_the_sanitizer(): assert "TORCH_CUDA_SANITIZER" in os.environ

def test_of_the_cpu(): assert False
"""


def outcomes(known: dict[str, Any]) -> dict[str, str]:
    return {test.partition("::test_")[2]: facts["outcome"] for test, facts in known.items()}


def test_every_test_has_an_outcome_whatever_becomes_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "PATIENCE", 2.0)
    file = tmp_path / "test_some.py"
    file.write_text(FILE)
    known: dict[str, Any] = {}
    saved: list[int] = []
    selection = Selection("some", (str(file),), processes=2, keyword="not sees")
    result = run_tests(selection, known, 120.0, lambda: saved.append(len(known)))
    expected = {
        "passes": "passed",
        "fails": "failed",
        "crashes": "failed",
        "hangs": "failed",
        "skips": "skipped",
        "breaks_the_device": "failed",
        "leaves_a_mess": "failed",
        "in_a_clean_process": "passed",
    }
    assert outcomes(known) == expected
    assert result["outcomes"] == {"passed": 2, "failed": 5, "skipped": 1} and result["left_out"] == 0
    assert "problems" not in result and saved[-1] == len(expected)
    errors = {test.partition("::test_")[2]: facts.get("error", "") for test, facts in known.items()}
    assert "'one' == 'other'" in errors["fails"] and "in teardown" in errors["leaves_a_mess"]
    assert "Abort" in errors["crashes"] and "time.sleep" not in errors["crashes"]
    assert "Timeout" in errors["hangs"] and "test_hangs" in errors["hangs"]

    # Again: what passed or was skipped is not run, the rest is.
    file.write_text(
        FILE.replace("os.abort()", "pass").replace("time.sleep(1000)", "pass").replace("def test_passes", "def test_x")
    )
    again = run_tests(selection, known, 120.0)
    assert outcomes(known) == {**expected, "crashes": "passed", "hangs": "passed", "x": "passed"}
    assert again["outcomes"] == {"passed": 5, "failed": 3, "skipped": 1}


def test_the_sanitizer_is_on_where_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(FILE)
    for sanitize, expected in ((True, "passed"), (False, "failed")):
        known: dict[str, Any] = {}
        result = run_tests(Selection("some", (str(file),), keyword="sees", sanitize=sanitize), known, 60.0)
        assert outcomes(known) == {"sees_the_sanitizer": expected}
        assert result["command"].startswith("TORCH_CUDA_SANITIZER=1 python -m pytest") == sanitize


def test_what_time_does_not_suffice_for_is_counted(tmp_path: Path) -> None:
    """The process is killed in its second test, whose outcome is not known then."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest, time\n"
        "@pytest.mark.gpu\ndef test_one(): pass\n"
        "@pytest.mark.gpu\ndef test_two(): time.sleep(1000)\n"
        "@pytest.mark.gpu\ndef test_three(): pass\n"
    )
    known: dict[str, Any] = {}
    result = run_tests(Selection("some", (str(file),)), known, 6.0)
    assert outcomes(known) == {"one": "passed"} and result["left_out"] == 2
    assert run_tests(Selection("some", (str(file),)), known, 0.0)["left_out"] == 0  # nothing was collected


def test_tests_that_cannot_be_collected_are_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text("import nothing_of_that_name\n")
    known: dict[str, Any] = {}
    result = run_tests(Selection("some", (str(file),)), known, 60.0)
    assert result["outcomes"] == {"failed": 1}
    assert "nothing_of_that_name" in next(iter(known.values()))["error"]
    result = run_tests(Selection("none", (str(tmp_path / "absent.py"),)), {}, 60.0)
    assert "absent.py" in result["problems"][0]


def test_a_file_without_tests_to_run_is_a_problem(tmp_path: Path) -> None:
    """Skipped as a whole, it would look as if all had passed."""
    some, skipped = tmp_path / "test_some.py", tmp_path / "test_skipped.py"
    some.write_text("import pytest\n@pytest.mark.gpu\ndef test_one(): pass\n")
    skipped.write_text("import pytest\npytest.importorskip('nothing_of_that_name', reason='it takes this')\n")
    files = (str(some), str(skipped))
    known: dict[str, Any] = {}
    result = run_tests(Selection("some", files, processes=2), known, 60.0)
    assert outcomes(known) == {"one": "passed"}
    (problem,) = result["problems"]
    assert problem.startswith(f"no test in {skipped}\n") and "it takes this" in problem
    # What passed already is a test too.
    assert "problems" not in run_tests(Selection("some", files[:1]), known, 60.0)
    # A keyword may choose those of one file, and a name that has changed none.
    assert not without_tests(Selection("some", files, keyword="one"), [files[0]])
    assert without_tests(Selection("some", files, keyword="one"), []) == list(files)


def test_a_line_that_was_cut_off_is_left_out() -> None:
    lines = ['{"collected": ["a", "b"]}', '{"started": "a"}', '{"ended": "a", "outcome": "passed"}', '{"started": "b"}']
    expected = {"a", "b"}, {"a": {"outcome": "passed"}}, "b", ["/c"]
    assert read_lines(['{"files": ["/c"]}', *lines, '{"ended": "b", "outc']) == expected
