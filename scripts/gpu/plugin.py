"""pytest's side of :mod:`gpu.testing`: one line of JSON per test as it starts and ends, and only the tests that are
this process's. Loaded by ``-p gpu.plugin``; the environment variables are set there.

GPU_SUITE_LINES    file that gets the lines
GPU_SUITE_DONE     file with the ids of tests that are not to run again
GPU_SUITE_SHARD    ``i/n``: the i-th of n shares, from 0 on
GPU_SUITE_PATIENCE seconds for one test, after which the process ends with a traceback of all threads
"""

from __future__ import annotations

import faulthandler
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

POISONED = ("CUDA error", "cudaError", "device-side assert", "illegal memory access")
"""In an error, these mean that nothing on the device works any more in this process."""

POISONED_STATUS = 75

STDERR = os.dup(2)
"""The real one: this is imported before pytest captures output."""


def tell(**facts: Any) -> None:
    with open(os.environ["GPU_SUITE_LINES"], "a") as lines:
        lines.write(json.dumps(facts) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tell(files=sorted({str(item.path) for item in items}))
    done = set(Path(os.environ["GPU_SUITE_DONE"]).read_text().splitlines())
    index, count = map(int, os.environ["GPU_SUITE_SHARD"].split("/"))
    mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == index and item.nodeid not in done]
    items[:] = mine
    tell(collected=[item.nodeid for item in mine])


def pytest_runtest_logstart(nodeid: str) -> None:
    tell(started=nodeid)
    faulthandler.dump_traceback_later(float(os.environ["GPU_SUITE_PATIENCE"]), exit=True, file=STDERR)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" and report.passed:
        return
    if report.when == "setup" and report.passed:
        return
    faulthandler.cancel_dump_traceback_later()
    text = "" if report.passed else str(report.longrepr)
    error = {"error": text[-3000:]} if text else {}
    tell(ended=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), **error)
    if report.failed and any(word in text for word in POISONED):
        os._exit(POISONED_STATUS)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        tell(ended=report.nodeid or "collection", outcome="failed", seconds=0.0, error=str(report.longrepr)[-3000:])
