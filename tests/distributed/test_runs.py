"""Runs of several processes from their beginning to their end: evaluation, resume, signals, failures, other models."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.ranks import Ranks
from tests.distributed.test_recipes import differing, lines, run_distributed, run_on_rank, run_single, trained
from tests.recipes.conftest import Workspace
from tests.recipes.test_async_checkpoints import assert_equal, models_differ, state_of

HELD_OUT = ["evaluation.every_n_steps=2"]


def run_and_listen(method: str, config: str, overrides: list[str], rank: int = 0, planted: str = "") -> tuple[Any, ...]:
    """The same as ``run_on_rank``, with what the process printed; something planted on one rank."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if planted and torch.distributed.get_rank() == rank:
            PLANTED[planted](patch)
        status = run_on_rank(method, config, overrides)
    return status, out.getvalue(), err.getvalue()


def _signal_in_step_2(patch: pytest.MonkeyPatch) -> None:
    from offload.training.finetune import FinetuneRecipe

    begin = FinetuneRecipe.begin_step

    def begin_step(self: FinetuneRecipe) -> None:
        begin(self)
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(FinetuneRecipe, "begin_step", begin_step)


def _no_third_batch(patch: pytest.MonkeyPatch) -> None:
    from offload.data.batches import Batches
    from offload.errors import UserError

    load = Batches._load

    def failing(self: Batches, loader: Any) -> Any:
        for number, batch in enumerate(load(self, loader)):
            if number == 2:
                raise UserError("dataset: the disk is gone")
            yield batch

    patch.setattr(Batches, "_load", failing)


def _no_tokenizer(patch: pytest.MonkeyPatch) -> None:
    from offload.errors import UserError

    def fail(*_: Any) -> None:
        raise UserError("tokenizer.path: there is no such file on this host")

    patch.setattr("offload.training.finetune.build_tokenizer", fail)


def _gathers_are_told(patch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    from offload.training.finetune import FinetuneRecipe

    gather, end, gathers = DefaultAllGather.__call__, FinetuneRecipe.end_step, []

    def counted(*args: Any, **options: Any) -> Any:
        gathers.append(1)
        return gather(*args, **options)

    def end_step(self: FinetuneRecipe, *args: Any, **options: Any) -> bool:
        print(f"{len(gathers)} gathers")
        gathers.clear()
        return end(self, *args, **options)

    patch.setattr(DefaultAllGather, "__call__", counted)
    patch.setattr(FinetuneRecipe, "end_step", end_step)


def _a_full_disk_beside_training(patch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite

    def fail(*arguments: Any) -> int:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    patch.setattr(os, "pwrite", fail)


PLANTED = {
    "disk": _a_full_disk_beside_training,
    "gathers": _gathers_are_told,
    "signal": _signal_in_step_2,
    "data": _no_third_batch,
    "tokenizer": _no_tokenizer,
}


def listen(
    ranks: Ranks, workspace: Workspace, count: int, output_dir: Path, *overrides: str, planted: str = "", rank: int = 1
) -> list[tuple[int, str, str]]:
    config = str(workspace.config("full_finetune_single_device"))
    return ranks.run(count, run_and_listen, "full", config, [f"output_dir={output_dir}", *overrides], rank, planted)


# ---- the same as one process


@pytest.mark.parametrize(
    ("count", "each", "overrides"),
    [
        (3, 2, ["gradient_accumulation_steps=2", "max_steps_per_epoch=4"]),
        (
            4, 1,
            ["data_parallel_replicate_dim=2", "reshard_after_forward=False", "enable_activation_checkpointing=True",
             "gradient_accumulation_steps=2", "optimizer=torch.optim.AdamW"],
        ),
        (4, 1, ["reshard_after_forward=2", "dataset.packed=True", "lr_scheduler=null"]),
    ],
    ids=["uneven", "replicated", "packed"],
)  # fmt: skip
def test_evaluates_and_trains_as_one_process(
    count: int, each: int, overrides: list[str], ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    """20 held-out samples: in the last of their batches, of two samples, some processes have none."""
    section = f"evaluation={(workspace.path / 'evaluation.json').read_text()}"
    common = [f"+{section}", *HELD_OUT, "max_steps_per_epoch=4", *overrides]
    theirs = [word for word in common if not word.startswith(("data_parallel", "reshard"))]
    want = run_single(workspace, "full", tmp_path / "one", f"batch_size={count * each}", *theirs)
    got = run_distributed(ranks, workspace, count, "full", tmp_path / "many", f"batch_size={each}", *common)
    assert any("evaluation/loss" in line for line in lines(got))
    assert differing(got, want, step=4) == []


def _as_huggingface(workspace: Workspace, folder: Path, base: Path) -> Workspace:
    """The workspace's configs for a model of transformers."""
    folder.mkdir()
    for method in ("full", "lora"):
        recipe = f"{method}_finetune_single_device"
        config = yaml.safe_load(workspace.config(recipe).read_text())
        for key in ("checkpointer", "evaluation"):
            config.pop(key, None)
        config["model"] = {"_component_": "offload.models.huggingface.from_pretrained", "path": str(base)}
        if method == "lora":
            config["adapter"] = {"_component_": "peft.LoraConfig", "r": 4, "target_modules": "all-linear"}
        (folder / f"{recipe}.yaml").write_text(yaml.safe_dump(config))
    return Workspace(folder, workspace.recipes, workspace.capture)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_models_of_transformers_train_as_in_one_process(
    tied: bool, method: str, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    base = workspace.path / "base"
    if tied:
        import transformers

        config = transformers.AutoConfig.from_pretrained(base)
        config.tie_word_embeddings = True
        base = tmp_path / "base"
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    here = _as_huggingface(workspace, tmp_path / "hf", base)
    common = ["max_steps_per_epoch=3", "gradient_accumulation_steps=2"]
    want = run_single(here, method, tmp_path / "one", "batch_size=4", *common)
    got = run_distributed(ranks, here, 2, method, tmp_path / "many", "batch_size=2", *common)
    assert differing(got, want, method) == []
    if method == "lora":  # the merged model too
        assert differing(got, want) == []


@pytest.mark.parametrize(("reshards", "gathers"), [(True, 3 * (2 * 2 + 1) + 1), (False, 3 + 1)])
def test_weights_that_are_kept_are_gathered_once_a_step(
    reshards: bool, gathers: int, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    """An embedding and two layers, in forward and backward of three micro-batches, or once; what is in no block is kept
    either way."""
    results = listen(
        ranks, workspace, 2, tmp_path / "run", f"reshard_after_forward={reshards}", "gradient_accumulation_steps=3",
        "max_steps_per_epoch=2", planted="gathers",
    )  # fmt: skip
    assert results[1][1].splitlines()[:2] == [f"{gathers} gathers"] * 2


# ---- resume


@pytest.fixture(scope="session")
def unbroken(ranks: Ranks, _workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return run_distributed(
        ranks, _workspace, 2, "full", folder, "batch_size=4", "max_steps_per_epoch=5", "save_every_n_steps=2"
    )


@pytest.mark.parametrize("base", ["host", "plain"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_goes_on_with_another_number_of_processes(
    count: int, base: str, unbroken: Path, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copytree(unbroken / "step_2", folder / "step_2")
    overrides = [f"batch_size={8 // count}", "max_steps_per_epoch=5", "resume_from_checkpoint=auto"]
    if base == "plain":
        overrides.append("optimizer=torch.optim.AdamW")
    results = listen(ranks, workspace, count, folder, *overrides)
    assert [status for status, *_ in results] == [0] * count
    assert "resuming from" in results[0][1] and "batch_size" not in results[0][1]
    assert [line["step"] for line in lines(folder)] == [3, 4, 5]
    mine, theirs = trained(folder, 5), trained(unbroken, 5)
    worst = max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)
    assert worst == 0.0 if (count, base) == (2, "host") else worst < 2e-5
    assert lines(folder)[-1]["tokens_seen"] == lines(unbroken)[-1]["tokens_seen"]


def test_an_adapter_goes_on_with_another_number_of_processes(
    ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    common = ["max_steps_per_epoch=4", "save_every_n_steps=2", "evaluation=null"]
    whole = run_distributed(ranks, workspace, 2, "lora", tmp_path / "whole", "batch_size=4", *common)
    rest = tmp_path / "rest"
    rest.mkdir()
    shutil.copytree(whole / "step_2", rest / "step_2")
    run_distributed(ranks, workspace, 4, "lora", rest, "batch_size=2", "resume_from_checkpoint=True", *common)
    for method in ("lora", "full"):  # the adapter, and the merged model
        mine, theirs = trained(rest, 4, method), trained(whole, 4, method)
        assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5


def test_a_batch_of_another_size_is_told(unbroken: Path, ranks: Ranks, workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(unbroken / "step_2", tmp_path / "run/step_2")
    results = listen(ranks, workspace, 4, tmp_path / "run", "batch_size=4", "max_steps_per_epoch=3",
                     "resume_from_checkpoint=auto")  # fmt: skip
    assert "batch_size=4 is that of each of 4 processes now, of 2 in the checkpoint's run" in results[0][1]
    assert "batch_size=2 is as many samples in all" in results[0][1]


# ---- traces


@pytest.mark.parametrize(
    ("component", "written"),
    [
        ("offload.training.profiler.torch_profiler", "step_3/trace_rank?.json.gz"),
        ("torchtune.training.setup_torch_profiler", "iteration_3/*.json.gz"),
    ],
)
def test_each_process_is_profiled(
    component: str, written: str, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    schedule = "wait_steps: 1, warmup_steps: 1, active_steps: 1, num_cycles: 1, cuda: False, xpu: False"
    profiler = f"{{_component_: {component}, enabled: True, output_dir: '${{output_dir}}/profiles', {schedule}}}"
    run_distributed(ranks, workspace, 2, "full", tmp_path / "run", f"profiler={profiler}", "max_steps_per_epoch=4")
    assert len(list((tmp_path / "run" / "profiles").glob(written))) == 2


def profiled_by_one(folder: str) -> None:
    """The first process comes to the end of a trace, and the other does not."""
    from omegaconf import OmegaConf

    from offload.training.profiler import build_profiler

    done = Path(folder) / "done"
    if torch.distributed.get_rank() == 0:
        steps = {"wait_steps": 0, "warmup_steps": 0, "active_steps": 1, "num_cycles": 1, "cuda": False, "xpu": False}
        component = "torchtune.training.setup_torch_profiler"
        section = {"_component_": component, "enabled": True, "output_dir": folder, **steps}
        profiler = build_profiler(OmegaConf.create(section), 1)
        profiler.start()
        profiler.stop()
        done.touch()
    until = time.monotonic() + 20
    while not done.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert done.exists()


def test_no_process_waits_for_the_trace_of_another(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, profiled_by_one, str(tmp_path))
    assert list(tmp_path.glob("iteration_*/*.json.gz"))


# ---- signals and failures


def test_a_signal_to_one_process_saves_and_ends_all(ranks: Ranks, workspace: Workspace, tmp_path: Path) -> None:
    results = listen(ranks, workspace, 2, tmp_path / "run", planted="signal")
    assert [status for status, *_ in results] == [143, 143]
    assert [path.name for path in sorted((tmp_path / "run").glob("step_*"))] == ["step_2"]
    assert "goes on from here" in results[0][1] and results[1][1] == ""


@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpoints_written_beside_training_are_the_same(
    method: str, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    overrides = ["max_steps_per_epoch=3", "save_every_n_steps=1", "keep_last_n=2", "evaluation=null"]
    at_once = run_distributed(ranks, workspace, 2, method, tmp_path / "at_once", *overrides)
    beside = run_distributed(
        ranks, workspace, 2, method, tmp_path / "beside", *overrides, "enable_async_checkpointing=True"
    )
    assert [path.name for path in sorted(beside.glob("*step_*"))] == ["step_2", "step_3"]
    for step in (2, 3):
        assert_equal(trained(beside, step, method), trained(at_once, step, method))
        assert models_differ(at_once / f"step_{step}", beside / f"step_{step}") == []
        assert_equal(state_of(beside / f"step_{step}"), state_of(at_once / f"step_{step}"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_host_ends_all_between_steps(
    rank: int, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    overrides = ["save_every_n_steps=1", "evaluation=null", "enable_async_checkpointing=True"]
    results = listen(ranks, workspace, 2, tmp_path / "run", *overrides, planted="disk", rank=rank)
    assert [status for status, *_ in results] == [2, 2]
    (line,) = _told(results)
    assert "No space left on device" in line and "step_1" in line
    assert not list((tmp_path / "run").glob("*step_*"))


def _told(results: Sequence[tuple[int, str, str]]) -> list[str]:
    return [line for _, _, err in results for line in err.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_gets_no_data_stops_all_and_the_steps_before_are_saved(
    rank: int, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    results = listen(ranks, workspace, 2, tmp_path / "run", planted="data", rank=rank)
    assert [status for status, *_ in results] == [2, 2]
    assert _told(results) == ["error: dataset: the disk is gone"]
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_2"]


def test_weights_that_are_no_numbers_are_told_once_and_not_saved(
    ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    overrides = ["optimizer.lr=1e30", "lr_scheduler=null", "clip_grad_norm=null", "log_every_n_steps=50"]
    results = listen(ranks, workspace, 2, tmp_path / "run", *overrides, "max_steps_per_epoch=3")
    assert [status for status, *_ in results] == [2, 2]
    (line,) = _told(results)
    assert "nothing was saved" in line
    assert not list((tmp_path / "run").glob("step_*"))


@pytest.mark.parametrize("planted", ["", "tokenizer"])
def test_a_mistake_is_one_line_from_one_process(
    planted: str, ranks: Ranks, workspace: Workspace, tmp_path: Path
) -> None:
    overrides = [] if planted else ["data_parallel_replicate_dim=3"]
    results = listen(ranks, workspace, 2, tmp_path / "run", *overrides, planted=planted)
    assert [status for status, *_ in results] == [2, 2]
    (line,) = _told(results)
    assert ("this host" if planted else "a divisor of the 2 processes: 1, 2") in line
    assert not list((tmp_path / "run").glob("step_*"))
