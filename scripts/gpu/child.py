"""What a process of the suite does: ``python -m gpu.child JOB`` prints one marked line of JSON per result."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gpu.cases import case_of
from gpu.machine import Unfit, check_kernels, describe_machine
from gpu.measure import Job, run_case
from gpu.processes import MARK
from gpu.rates import measure_locking, measure_rates


def describe(job: Job) -> Iterator[dict[str, Any]]:
    """What the machine is, and that its kernels are those that are meant."""
    try:
        yield {"environment": {**describe_machine(job.device), **check_kernels(job.device)}}
    except Unfit as error:
        yield {"unfit": str(error)}


def diagnose(job: Job) -> Iterator[dict[str, Any]]:
    """What `tune doctor` tells and keeps; on a CPU, where it trains small models for a while, without measuring."""
    from offload.cli.main import main as tune

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = tune(["doctor", "--json", "--device", job.device, *(["--quick"] if job.device == "cpu" else [])])
    yield {"status": status, **json.loads(said.getvalue())}


OTHERS: dict[str, Callable[[Job], Iterator[dict[str, Any]]]] = {
    "machine": describe,
    "rates": lambda job: iter([measure_rates(job.device)]),
    "doctor": diagnose,
    "page-locking": lambda job: iter([measure_locking(job.device)]),
}


def main(job: Job) -> None:
    """Do it."""
    results = OTHERS[job.case](job) if job.case in OTHERS else run_case(case_of(job.case), job)
    for result in results:
        print(MARK + json.dumps(result), flush=True)
    # Everything is said, and unpinning tens of GiB takes seconds; the system does it faster.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
