"""README's table of the GPU suite, from a made-up record and from none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_suite as suite
import pytest
from gpu import planned, report
from gpu.measure import GIB
from gpu.parts import HEADLINE, LOCKING


def empty() -> dict[str, Any]:
    return {"runs": [], "results": [], "tests": {}, "recipes": []}


def filled() -> dict[str, Any]:
    environment = {"card": "NVIDIA H200", "cpu": "Xeon", "cpu_count": 16, "torch": "2.11.0", "driver": "580.1"}
    rates = {"up": 50e9, "down": 40e9, "each_of_both": 25e9, "device_copy": 4000e9, "updates": {"torch fused": 3600e9}}
    locking = dict(zip(LOCKING, ({"seconds_per_gib": 0.5}, {"seconds_per_gib": 0.25}), strict=True))
    run = {
        "date": "2026-12-01 10:00:00",
        "commit": "abcdef0123456789",
        "environment": environment,
        "rates": rates,
        "page_locking": locking,
    }
    common = {
        "device": "cuda",
        "model": "7b",
        "layers": None,
        "memory_gib": None,
        "allocator": "",
        "run": 0,
        "status": "ok",
        "tokens": 1024,
        "step_seconds": 0.5,
        "tokens_per_second": 2048.0,
        "device_peak_reserved_bytes": 14 * GIB,
        "first_step_device_peak_reserved_bytes": 15 * GIB,
        "host_pinned_bytes": 26 * GIB,
    }
    headline = {
        **common,
        "case": HEADLINE,
        "exposed_seconds": 0.45,
        "simulated_exposed_seconds": 0.4386,
        "same_losses": {"to": "packed", "steps": 4, "equal": True, "first_unequal_step": None},
        "copies": {"up": {"bytes_per_second": 24e9}, "down": {"bytes_per_second": 23e9}},
    }
    return {
        "runs": [run],
        "results": [
            {**common, "case": "none", "gradients_repeat": True},
            headline,
            {**headline, "memory_gib": 16, "beyond_limit_bytes": GIB // 2},
            {**headline, "memory_gib": 24, "tokens": 4096, "status": "out of memory"},
            {**headline, "memory_gib": 24, "allocator": "expandable_segments:True", "tokens_per_second": 9e9},
            {**common, "case": "packed", "layers": 2, "tokens_per_second": 9e9},
            {**common, "case": "adamw", "device": "cpu", "tokens_per_second": 9e9},
            {**common, "case": "bnb-paged-adamw8bit", "managed_memory": True},
        ],
        "tests": {
            "NVIDIA H200": {"kernels": {"outcomes": {"passed": 90, "failed": 1}, "left_out": 3}},
            "cpu": {"engine": {"outcomes": {"passed": 7}, "left_out": 0}},
        },
        "recipes": [{"name": "full-7b", "run": 0, "status": "ok", "steps": 8, "tokens_per_second": 7000.0}],
    }


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]


def row_of(text: str, *start: str) -> list[str]:
    (found,) = [row for row in cells(text) if row[: len(start)] == list(start)]
    return found


def test_without_a_record_every_cell_and_line_says_so() -> None:
    text = report.report(empty())
    rows = cells(text)
    assert len(rows) == 2 + 2 * len(report.ROWS) and {len(row) for row in rows} == {len(report.HEADS)}
    assert len(report.HEADS) <= 7
    for row in rows[2:]:
        assert row[3:] == [report.NOTHING] * 4
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(lines) == 7 and all(report.NOTHING in line for line in lines)


def test_a_record_fills_its_cells_and_no_others() -> None:
    text = report.report(filled())
    title = "**packed, streamed in backward**"
    assert row_of(text, title, "whole", "1,024")[3:] == ["2,048", "450 (439)", "14.0 (15.0)", "26.0"]
    assert row_of(text, title, "whole", "8,192")[3:] == [report.NOTHING] * 4
    assert row_of(text, title, "16 GB", "1,024")[5] == "14.0 (15.0), 0.50 beyond the card"
    assert row_of(text, title, "24 GB", "4,096")[3:] == ["out of memory", *[report.NOTHING] * 3]
    assert row_of(text, "no optimizer", "whole", "1,024")[4] == "step 500 ms"
    # Fewer layers, another device and another allocator are not what the table is about.
    assert row_of(text, "packed, resident", "whole", "1,024")[3:] == [report.NOTHING] * 4
    assert row_of(text, "`torch.optim.AdamW`, resident", "whole", "1,024")[3] == report.NOTHING
    assert row_of(text, title, "24 GB", "1,024")[3] == report.NOTHING
    # What the driver pages says so.
    assert "managed memory" in row_of(text, "bitsandbytes `PagedAdamW8bit`, managed memory")[0]


def test_the_lines_below_the_table() -> None:
    lines = {line.partition(":")[0]: line for line in report.report(filled()).splitlines() if line.startswith("- ")}
    assert "NVIDIA H200" in lines["- Machine"] and "2026-12-01 (abcdef012345)" in lines["- Machine"]
    tests = lines["- Tests on the card"]
    assert "1 failed, 90 passed, 3 not run" in tests and "engine: not measured" in tests and "7 passed" not in tests
    (losses,) = [line for head, line in lines.items() if head.startswith("- Losses")]
    assert "over 4 steps: 3 of 3 equal" in losses and "repeat to the bit" in losses
    assert "50.0 up, 40.0 down, 25.0 each way" in lines["- Link, GB/s"] and "24.0 up, 23.0" in lines["- Link, GB/s"]
    (update,) = [line for head, line in lines.items() if head.startswith("- Update kernel")]
    assert "torch fused 0.90" in update
    assert "0.50 s" in lines["- Page-locking a GiB"] and "8 threads 0.25 s" in lines["- Page-locking a GiB"]
    recipes = lines["- Recipes"]
    assert "full-7b: ok, 8 steps, 7,000 tokens/s" in recipes and "lora-7b: not measured" in recipes


def test_losses_that_differ_are_named() -> None:
    content = filled()
    content["results"][2]["same_losses"] = {"to": "packed", "steps": 4, "equal": False, "first_unequal_step": 3}
    content["results"][0]["gradients_repeat"] = False
    text = report.report(content)
    assert "2 of 3 equal" in text and "differs from packed in step 3" in text and "DO NOT repeat" in text


def test_writes_between_the_markers_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, record = tmp_path / "README.md", tmp_path / "gpu_suite.json"
    monkeypatch.setattr(report, "README", readme)
    page = tmp_path / "planning.md"
    page.write_text(f"before\n{planned.BEGIN}old\n{planned.END}after\n")
    monkeypatch.setattr(planned, "PLANNING", page)
    record.write_text(json.dumps(filled()))
    other = "<!-- another script's table -->\n| a |\n<!-- end of the table -->\n"
    readme.write_text(f"{other}before\n{report.BEGIN}old\n{report.END}\nafter\n{other}")
    assert suite.main(["--report", "--output", str(record)]) == 0
    assert readme.read_text() == f"{other}before\n{report.BEGIN}{report.report(filled())}{report.END}\nafter\n{other}"
    assert "2,048" in capsys.readouterr().out
    assert page.read_text() == f"before\n{planned.BEGIN}{planned.table([])}{planned.END}after\n"

    # Without a record too.
    assert suite.main(["--report", "--output", str(tmp_path / "none.json")]) == 0
    assert report.report(empty()) in readme.read_text() and not (tmp_path / "none.json").exists()

    readme.write_text("no markers\n")
    assert suite.main(["--report", "--output", str(record)]) == 1
    assert "has no place for the table" in capsys.readouterr().err and readme.read_text() == "no markers\n"
