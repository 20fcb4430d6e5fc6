"""What states take: as counted, and as the process grows by."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload.optim import cpu

MEASURE = """
import sys
import psutil, torch
from offload import OffloadOptimizer

state_dtype, master = sys.argv[1:]
shapes = [(4096, 4096), (4096, 4096), (4096, 1024), (4096,)]

def optimizer_over(shapes):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = OffloadOptimizer(
        params, "offload.optim.AdamW", strategy="stream", state_dtype=state_dtype, master=master
    )
    for param in params:
        param.grad = torch.ones_like(param)
    return params, optimizer

_, small = optimizer_over([(64,)])
small.step()  # whatever is loaded on first use
params, optimizer = optimizer_over(shapes)
before = psutil.Process().memory_info().rss
optimizer.step()
grown = psutil.Process().memory_info().rss - before
counted = sum(purposes["optimizer_state"] for purposes in optimizer.memory_report().values())
numel = sum(param.numel() for param in params)
print(counted / numel, grown / numel)
"""


@pytest.mark.skipif(cpu.load() is None, reason="without the kernel, intermediate results blur the measurement")
@pytest.mark.parametrize(
    ("state_dtype", "master", "expected"),
    [
        ("int8", "none", 2.03),
        ("int8", "split24", 3.03),
        ("int8", "split", 4.03),
        ("bf16", "split", 6.0),
        ("fp32", "split", 10.0),
    ],
)
def test_counted_bytes_are_what_the_process_grows_by(state_dtype: str, master: str, expected: float) -> None:
    command = [sys.executable, "-c", MEASURE, state_dtype, master]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted, grown = map(float, done.stdout.split())
    assert counted == pytest.approx(expected, abs=0.005)
    assert grown == pytest.approx(counted, rel=0.03)
