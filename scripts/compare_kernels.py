"""Speed of two builds of the CPU kernel of offload.optim in 8 bits, in turns on one core.

    python scripts/compare_kernels.py BEFORE.so AFTER.so                     # prints
    python scripts/compare_kernels.py BEFORE.so AFTER.so --name NAME --record

A build is a copy of ``offload/optim/kernels/_adamw.so`` of some version. Both are called on the same tensors of
``--params`` elements, in one process, one after the other, and the order changes from turn to turn. What counts is the
thread's own CPU time, so that it hardly matters who else uses the machine; a ratio is the median over the turns. The
record, ``scripts/results/adamw_codes_speed.json``, has an entry for each name.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from study import RESULTS, save

from offload.optim import codes
from offload.optim.formats import BLOCK, MASTERS, PARAM_KINDS, STATE_BLOCK, STATE_DTYPES, Constants, state_spec

RECORD = RESULTS / "adamw_codes_speed.json"

CONSTANTS = {1: 11, 2: 11, 3: 12, 4: 13, 5: 13}
"""Of an update, by the number of the library's interface."""

STATES = {1: 4, 2: 4, 3: 4, 4: 4, 5: 3}
"""How moments may be stored, by the same number; int8 is the third."""

STEP = 100

CASES = [
    (param, betas) for betas in ((0.9, 0.999), (0.9, 0.0)) for param in ("split", "split24", "stochastic", "nearest")
]


class Build:
    """A library, and how it is called."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path.resolve()))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.library.offload_adamw.argtypes = [pointer, int64, pointer, int64, int32, int32]
        self.library.offload_adamw.restype = int64
        self.interface = self.library.offload_abi()

    def update(self, param: str, arguments: Sequence[int], constants: Constants) -> int:
        """Nanoseconds of this thread.

        Args:
            param: how the parameter is stored.
            arguments: what a row of the table has before its kind.
        """
        kind = (PARAM_KINDS.index(param) * STATES[self.interface] + STATE_DTYPES.index("int8")) * 2
        table = array("q", [*arguments, kind, 0])
        numbers = array("f", constants[: CONSTANTS[self.interface]])
        began = time.thread_time_ns()
        failed = self.library.offload_adamw(table.buffer_info()[0], 1, numbers.buffer_info()[0], 1, 1, 0)
        took = time.thread_time_ns() - began
        assert not failed
        return took


def constants_of(betas: tuple[float, float]) -> Constants:
    (beta1, beta2), lr, eps = betas, 1e-5, 1e-8
    correction = (1 - beta2**STEP) ** 0.5
    has_ratios = codes.best_for(beta2) == codes.RATIOS
    return Constants(
        gscale=1.0,
        l2=0.0,
        decay=1.0,
        beta1=beta1,
        w1=1 - beta1,
        beta2=beta2,
        w2=1 - beta2,
        eps=eps * correction,
        step_size=lr * correction,
        bc2_sqrt=correction,
        eps_before=eps * correction,
        has_ratios=float(has_ratios),
        ahead=lr * correction * codes.ahead(beta1) if has_ratios else 0.0,
    )


def compare(builds: list[Build], case: tuple[str, tuple[float, float]], params: int, turns: int) -> dict[str, Any]:
    """Mparam/s of each build, and the median ratio of the second one's speed to the first one's."""
    param, betas = case
    spec = state_spec(torch.bfloat16, params, "int8", param if param in MASTERS else "none")
    sizes = {key: -(-params // BLOCK) if key in STATE_BLOCK else params for key in spec}
    states = {key: torch.zeros(sizes[key], dtype=dtype) for key, dtype in spec.items()}
    weights = torch.randn(params).mul_(0.02).bfloat16()
    gradient = torch.randn(params).mul_(1e-3).bfloat16()
    tensors = [weights, gradient]
    tensors += [states[key] for key in ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")]
    remainder = states.get("remainder")
    addresses = [tensor.data_ptr() for tensor in tensors] + [0 if remainder is None else remainder.data_ptr()]
    times: list[list[int]] = [[] for _ in builds]
    for turn in range(-2, turns):
        key = turn * codes.GOLDEN_RATIO & 0xFFFFFFFF
        for i in (0, 1) if turn % 2 else (1, 0):
            took = builds[i].update(param, [*addresses, params, 0, 1, key], constants_of(betas))
            if turn >= 0:
                times[i].append(took)
    before, after = (round(1e3 * params / statistics.median(of_one)) for of_one in times)
    ratio = statistics.median(first / second for first, second in zip(*times, strict=True))
    name = f"{'none' if param == 'nearest' else param} int8"
    return {"name": name, "beta2": betas[1], "before": before, "after": after, "ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", type=Path, nargs=2)
    parser.add_argument("--params", type=float, default=2e6)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--name", default="", help="of the comparison, in words")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    builds = [Build(path) for path in arguments.builds]
    results = []
    for case in CASES:
        results.append(compare(builds, case, int(arguments.params), arguments.turns))
        print(results[-1], flush=True)
    if not arguments.record:
        return
    known = json.loads(RECORD.read_text())["comparisons"] if RECORD.exists() else []
    record = {
        "study": "speed of two builds of the CPU kernel with 8-bit moments, in turns on one core",
        "command": "python scripts/compare_kernels.py BEFORE.so AFTER.so --name NAME --record",
        "unit": "million bf16 parameters per second of CPU time",
        "comparisons": [
            *(one for one in known if one["comparison"] != arguments.name),
            {
                "comparison": arguments.name,
                "date": time.strftime("%Y-%m-%d"),
                "params": int(arguments.params),
                "turns": arguments.turns,
                "results": results,
            },
        ],
    }
    save(record, RECORD, "name")


if __name__ == "__main__":
    main()
