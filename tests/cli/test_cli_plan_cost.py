"""What makes ``tune plan`` quick: what it does not import, and how often it does what takes long. No clock is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import bench_cli

from offload.cli import plan

PROGRAM = """
import collections, gc, json, sys
from unittest import mock

done = collections.Counter()

def counted(owner, name, what=None):
    real = getattr(owner, name)
    def call(*args, **kwargs):
        done[what or name] += 1
        return real(*args, **kwargs)
    return mock.patch.object(owner, name, call)

from offload.cli.main import main
from offload.models import source
from offload.plan import prediction, without_memory
from offload.training import budgeting, predicting, tracing
from torch.nn import init

gc.callbacks.append(lambda phase, info: done.update([f"collection {phase}"]))
with (
    counted(budgeting, "describe"), counted(budgeting, "_states"), counted(tracing, "footprint"),
    counted(predicting, "count"), counted(without_memory, "_with_fake_tensors"), counted(prediction, "replay"),
    counted(init, "kaiming_uniform_"),
):
    status = main(sys.argv[1:])
gc.callbacks.clear()
print(json.dumps({"status": status, "done": done, "modules": sorted(sys.modules)}))
"""


def cost(*words: str) -> tuple[dict[str, int], set[str], str]:
    """How often each was done, the modules, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "plan", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *told, last = done.stdout.splitlines()
    found = json.loads(last)
    return found["done"], set(found["modules"]), "\n".join(told)


def test_a_plan_of_a_transformers_model() -> None:
    done, modules, told = cost("--config", "qwen3_0_6b_offload", "--gpu", "RTX 3060", "--ram", "32GiB")
    assert "what fits" in told
    # What reads data, logs, and quantises is for runs.
    heavy = modules & {"datasets", "pandas", "pyarrow", "wandb", "torchtune", "bitsandbytes"}
    assert not heavy
    assert done["describe"] == 1 and "kaiming_uniform_" not in done and "_with_fake_tensors" not in done
    # States of four kinds, of which each is asked for once; the rest follows from these.
    assert done["_states"] <= 4
    # The run, and as many settings as may be shown. An estimate can be too high, so that only its replay tells whether
    # a setting adds something to the others: of this model's four one is shown. None is replayed beyond these.
    assert done["replay"] <= 1 + plan.SHOWN
    # Two depths of each batch that is traced; forward and backward counted with and without recomputation.
    assert done["footprint"] <= 2 * 8 and done["count"] <= 2
    assert done["collection start"] < 20  # of garbage, of 1,600


def test_what_cannot_fit_is_not_searched_for() -> None:
    done, _, told = cost("--config", "qwen3_8b_offload", "--vram", "8GiB", "--ram", "32GiB")
    assert "DOES NOT FIT" in told
    # Weights of 15 GiB: no batch size or optimizer is tried, and the adapter's config with the same weights is passed
    # over.
    assert done["_states"] == 2 and done["describe"] == 2 and done["footprint"] == 4 and "replay" not in done


def test_the_page_says_how_long_the_recorded_plans_took() -> None:
    record = json.loads((bench_cli.ROOT / "scripts" / "results" / "cli.json").read_text())
    said = bench_cli.sentence(record["plans"]["configs"]) if "plans" in record else "no run of it is recorded yet"
    _, _, rest = bench_cli.PLANNING.read_text().partition(bench_cli.BEGIN)
    assert said in rest.partition(bench_cli.END)[0]


def test_the_sentence_is_the_slowest_the_fastest_and_the_middle() -> None:
    said = bench_cli.sentence({name: {"seconds": seconds} for name, seconds in (("a", 2.0), ("b", 7.04), ("c", 3.0))})
    assert "takes 2.0 to 7.0 s" in said and "3 configs at most 3.0 s" in said and "longest for `b`" in said
