"""The page of a comparison: whole in itself, and drawn by a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from offload.comparison import table
from offload.comparison.page import MAX_POINTS, render_page
from offload.comparison.runs import read_runs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_of(*folders: Path) -> str:
    runs = read_runs(folders)
    return render_page(runs, [*table.lines(runs), *table.differences(runs)], "a <b>")


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_it_holds_every_line_of_every_run(write) -> None:
    data = data_of(page_of(write("a", "A", [3, 2, 1]), write("b", "B", [3, 1])))
    first, second = (run["columns"] for run in data["runs"])
    assert (first["step"], first["loss"], first["evaluation/loss"]) == ([1, 2, 3], [3, 2, 1], [None, 2.1, None])
    assert (second["tokens_seen"], second["loss"]) == ([100, 200], [3, 1])
    assert first["training_seconds"] == pytest.approx([2, 3, 3 + 2 / 3], rel=1e-5)
    assert not {"time", "nonfinite"} & set(first)


def test_what_a_run_is_called_cannot_break_out(write) -> None:
    hostile = '</script><img src="https://example.org/x">{{TABLE}}'
    page = page_of(write("a", hostile, [1], config={"x": hostile}), write("b", "B", [1], config={"x": "<i>"}))
    assert data_of(page)["runs"][0]["label"] == hostile
    assert "<img" not in page and "<i>" not in page and "<title>a &lt;b&gt;</title>" in page
    assert "default-src 'none'" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)


def test_of_a_long_run_no_spike_and_no_evaluation_is_lost(write) -> None:
    losses = [1.0 + 1e-6 * (step % 7) for step in range(3 * MAX_POINTS)]
    losses[5_000], losses[7_001] = 50.0, -50.0
    folder = write("a", "A", losses)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] % 1000 != 0:
            row.pop("evaluation/loss", None)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = data_of(page_of(folder))["runs"][0]["columns"]
    assert len(columns["loss"]) <= MAX_POINTS + 2 + 12
    assert {50.0, -50.0} <= set(columns["loss"])
    assert sum(value is not None for value in columns["evaluation/loss"]) == 12
    assert columns["step"] == sorted(columns["step"]) and columns["step"][-1] == len(losses)


def browse(page: Path, folder: Path) -> tuple[str, str]:
    """The document as Chromium leaves it, and its log of the network."""
    log = folder / "net.json"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync",
               f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--net-log-capture-mode=Everything",
               "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return dom, log.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page with")
def test_a_browser_draws_a_curve_of_each_run_in_each_panel_and_asks_nobody(write, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(page_of(write("a", "A", [3, 2, 1]), write("b", "B", [3, 1])), encoding="utf-8")
    dom, network = browse(page, tmp_path)
    panels = re.findall(r'class="panel" data-metric="([^"]+)" data-curves="(\d)"', dom)
    assert panels == [("loss", "2"), ("evaluation/loss", "2"), ("tokens_per_second", "2"),
                      ("memory/host_rss_peak_gib", "2")]  # fmt: skip
    assert dom.count("<canvas") == len(panels)
    # The browser itself asks its maker for things, "not an origin"; a page from a file is the origin "null".
    assert '"initiator":"null"' not in network
    # The policy holds also for what would ask.
    text = page.read_text().replace(
        "</body>", '<script>fetch("https://example.org/leak").catch(() => 0)</script></body>'
    )
    page.write_text(text)
    assert "example.org" not in browse(page, tmp_path)[1].replace(page.as_uri(), "")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page with")
def test_long_values_leave_room_for_every_run(write, tmp_path: Path) -> None:
    """A path of 60 letters in each of two runs pushed the third out of sight."""
    paths = [f"/data/{'deep/' * 10}a.jsonl", f"/data/{'deep/' * 10}b.jsonl", "c.jsonl"]
    runs = [write(str(i), "A", [2, 1], config={"dataset": {"path": path}}) for i, path in enumerate(paths)]
    text = page_of(*runs)
    assert all(f"<td>{path}</td>" in text for path in paths)
    ask = 'const t = document.querySelector(".table"); document.title = `${t.scrollWidth <= t.clientWidth}`'
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", f"<script>{ask}</script></body>"), encoding="utf-8")
    assert "<title>true</title>" in browse(page, tmp_path)[0]
