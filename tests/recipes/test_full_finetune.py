"""The full fine-tuning recipe end to end: results, parity of optimizers, metrics, resume, mistakes."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.metrics.log import read_metrics

KEYS = {
    "loss", "lr", "grad_norm", "tokens_per_second", "trained_tokens_per_second", "tokens_seen",
    "time/data", "time/forward_backward", "time/optimizer", "time/checkpoint",
    "memory/device_peak_active_gib", "memory/device_peak_allocated_gib", "memory/device_peak_reserved_gib",
    "memory/host_rss_peak_gib", "memory/host_pinned_gib",
}  # fmt: skip

CHECKPOINT_FILES = {
    "checkpoint.json", "config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    "recipe_state.pt", "tokenizer.model",
}  # fmt: skip

PLAIN = ("optimizer=torch.optim.AdamW",)
STRATEGIES = {
    "resident": ("optimizer.strategy=resident",),
    "host": ("optimizer.strategy=host",),
    "stream": ("optimizer.strategy=stream",),
    "host with gradients": ("optimizer.strategy=host", "optimizer.offload_gradients=True"),
}


IN_BACKWARD = "optimizer.update_in_backward=True"


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        difference = (actual[name].double() - expected[name].double()).abs().max().item()
        assert torch.equal(actual[name], expected[name]), f"{name}: largest difference {difference:.3e}"


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


def evaluation(workspace: Any) -> str:
    return f"evaluation={(workspace.path / 'evaluation.json').read_text()}"


def test_trains_and_leaves_metrics_and_a_checkpoint(workspace: Any, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", evaluation(workspace))
    assert result.status == 0, result.err
    assert len(result.rows) == 20 and all(row.keys() >= KEYS for row in result.rows)
    assert [row["step"] for row in result.rows] == list(range(1, 21))
    assert losses(result.rows)[-1] < losses(result.rows)[0] - 0.5
    assert [row["step"] for row in result.rows if "evaluation/loss" in row] == [10, 20]
    assert result.rows[0]["lr"] == 0.0 and result.rows[1]["lr"] == 5e-3 and result.rows[2]["lr"] == 1e-2
    assert all(row["memory/host_rss_peak_gib"] > 0.05 for row in result.rows)
    assert result.rows[-1]["tokens_seen"] > 20 * 2 * 8
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl", "run.json", "step_20"}
    assert {path.name for path in (tmp_path / "run" / "step_20").iterdir()} == CHECKPOINT_FILES
    assert "loss" in result.out and "step_20" in result.out


def test_transformers_loads_the_result(workspace: Any, tmp_path: Path) -> None:
    import transformers
    from torchtune.models.llama2 import llama2

    from offload.checkpoints.manager import CheckpointManager
    from offload.models.torchtune.checkpoint import TorchtuneFormat

    result = workspace.run(tmp_path / "run")
    assert result.status == 0, result.err
    tokens = torch.randint(512, (2, 17), generator=torch.Generator().manual_seed(0))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "step_20").eval()
    section = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(workspace.path / "base"),
        "model_type": "LLAMA2",
    }
    loaded = CheckpointManager(TorchtuneFormat(section), tmp_path / "run").load(tmp_path / "run" / "step_20")
    from tests.recipes.conftest import MODEL  # type: ignore[import-not-found]

    ours = llama2(**MODEL).eval()
    ours.load_state_dict(loaded.model)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("clip", ["null", "0.5"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_strategy_equals_plain_adamw_bit_for_bit(
    workspace: Any, tmp_path: Path, accumulation: int, clip: str
) -> None:
    common = (f"gradient_accumulation_steps={accumulation}", f"clip_grad_norm={clip}")
    plain = workspace.run(tmp_path / "plain", *PLAIN, *common)
    assert plain.status == 0, plain.err
    strategies = dict(STRATEGIES)
    if clip == "null":
        strategies |= {f"{name} in backward": (*how, IN_BACKWARD) for name, how in STRATEGIES.items()}
    for name, overrides in strategies.items():
        result = workspace.run(tmp_path / name.replace(" ", "_"), *overrides, *common)
        assert result.status == 0, result.err
        assert_same(result.weights(20), plain.weights(20))
        assert losses(result.rows) == losses(plain.rows)
        norms = [row["grad_norm"] for row in result.rows]
        assert norms == pytest.approx([row["grad_norm"] for row in plain.rows], rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sgd_with_two_clip_values_gives_two_trajectories(workspace: Any, tmp_path: Path, strategy: str) -> None:
    runs = [
        workspace.run(
            tmp_path / f"clip_{clip}", *STRATEGIES[strategy], "optimizer.optimizer_class=torch.optim.SGD",
            "optimizer.lr=0.1", f"clip_grad_norm={clip}",
        )
        for clip in ("0.1", "0.2")
    ]  # fmt: skip
    assert [run.status for run in runs] == [0, 0], runs[0].err
    assert losses(runs[0].rows)[5:] != losses(runs[1].rows)[5:]
    first, second = (run.weights(20) for run in runs)
    assert all(not torch.equal(first[name], second[name]) for name in first)


def reference_losses(workspace: Any, steps: int, accumulation: int, batch_size: int) -> list[float]:
    """A bare PyTorch loop over the same model, samples and order, written without the project's parts."""
    from datasets import load_dataset
    from safetensors.torch import load_file
    from torchtune.data import Message
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama2 import llama2, llama2_tokenizer

    from tests.recipes.conftest import MODEL

    tokenizer = llama2_tokenizer(str(workspace.path / "base" / "tokenizer.model"), max_seq_len=48)
    data = load_dataset("json", data_files=str(workspace.path / "train.jsonl"), split="train")
    model = llama2(**MODEL)
    weights = load_file(workspace.path / "base" / "model.safetensors")
    model.load_state_dict(hf_to_tune(weights, num_heads=4, num_kv_heads=2, dim=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    per_step = batch_size * accumulation
    result = []
    for step in range(steps):
        total, count = 0.0, 0
        for index in order[step * per_step : (step + 1) * per_step]:
            messages = [
                Message(role="user", content=data[index]["input"], masked=True),
                Message(role="assistant", content=data[index]["output"]),
            ]
            tokens, mask = tokenizer.tokenize_messages(messages)
            logits = model(torch.tensor([tokens]))[0, :-1]
            targets = torch.tensor([-100 if m else t for t, m in zip(tokens, mask, strict=True)])[1:]
            total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            count += int((targets != -100).sum())
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.append(loss.item())
    return result


@pytest.mark.parametrize(("accumulation", "batch_size"), [(1, 4), (2, 2), (4, 1)])
def test_the_loss_is_that_of_a_bare_loop_however_a_step_is_cut(
    workspace: Any, tmp_path: Path, accumulation: int, batch_size: int
) -> None:
    """Micro-batches have different numbers of labels; each label must weigh the same."""
    result = workspace.run(
        tmp_path / "run", "lr_scheduler=null", "max_steps_per_epoch=6", "optimizer.offload_gradients=True",
        f"gradient_accumulation_steps={accumulation}", f"batch_size={batch_size}",
    )  # fmt: skip
    assert result.status == 0, result.err
    expected = reference_losses(workspace, 6, accumulation, batch_size)
    assert losses(result.rows) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    "loss",
    [
        "offload.training.loss.LinearCrossEntropyLoss",
        "torchtune.modules.loss.CEWithChunkedOutputLoss",
        "torch.nn.CrossEntropyLoss",
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_losses_agree(workspace: Any, tmp_path: Path, loss: str, packed: bool) -> None:
    common = (f"dataset.packed={packed}", "max_steps_per_epoch=5")
    expected = workspace.run(tmp_path / "expected", "loss=torch.nn.CrossEntropyLoss", *common)
    actual = workspace.run(tmp_path / "actual", f"loss={loss}", *common)
    assert (expected.status, actual.status) == (0, 0), expected.err + actual.err
    assert losses(actual.rows) == pytest.approx(losses(expected.rows), rel=1e-4)


def test_memory_options_leave_the_result_alone(workspace: Any, tmp_path: Path) -> None:
    plain = workspace.run(tmp_path / "plain", "max_steps_per_epoch=5")
    saving = workspace.run(tmp_path / "saving", "max_steps_per_epoch=5", "enable_activation_checkpointing=True")
    assert saving.status == 0, saving.err
    assert_same(saving.weights(5), plain.weights(5))


def test_concatenated_data_sets_and_workers(workspace: Any, tmp_path: Path) -> None:
    section = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": str(workspace.path / "held_out.jsonl"),
        "split": "train",
    }
    both = f"dataset={json.dumps([section, section])}"
    runs = [workspace.run(tmp_path / n, both, f"num_workers={n}", "max_steps_per_epoch=null") for n in ("0", "2")]
    assert [run.status for run in runs] == [0, 0], runs[1].err
    assert len(runs[0].rows) == 20  # 2 x 20 samples in batches of 2
    assert losses(runs[0].rows) == losses(runs[1].rows)


def test_micro_batches_left_over_stay_out_of_the_next_epoch(workspace: Any, tmp_path: Path) -> None:
    """320 samples in steps of 2 x 30: five whole steps an epoch, the rest is dropped."""
    result = workspace.run(tmp_path / "run", "gradient_accumulation_steps=30", "max_steps_per_epoch=null", "epochs=2")
    assert result.status == 0, result.err
    assert len(result.rows) == 10
    assert {p.name for p in result.output_dir.glob("step_*")} == {"step_5", "step_10"}


def test_an_offline_wandb_run_holds_the_same_values(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.metrics.wandb_file import read_run  # type: ignore[import-not-found]

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    result = workspace.run(
        tmp_path / "run",
        "+metric_logger={_component_: offload.metrics.wandb_logger.WandBLogger, project: tests, mode: offline}",
        "+dataset.token=hf_of-the-user",
    )
    assert result.status == 0, result.err
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"recipe_state.pt", "run.json"} <= {path.name for path in kept}
    assert [path for path in kept if b"hf_of-the-user" in path.read_bytes()] == []
    run = read_run(tmp_path)
    assert run.config["dataset"]["token"] == "***"
    rows = {row["_step"]: row for row in run.history}
    for row in result.rows:
        for key in KEYS:
            assert rows[row["step"]][key] == row[key], (row["step"], key)
    assert run.config["batch_size"] == 2 and run.exit_code == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run.config["label"] == record["label"] == "torch.optim.AdamW fp32, host"
    assert record["config"]["batch_size"] == 2 and record["status"] == "done"
    summary = record["summary"]
    assert {name.removeprefix("summary/"): run.summary[name] for name in run.summary if "summary/" in name} == summary
    assert summary["loss_final"] == result.rows[-1]["loss"] and summary["loss_best"] == min(losses(result.rows))
    assert summary["tokens"] == result.rows[-1]["tokens_seen"] and summary["seconds_checkpoint"] > 0


def test_logging_every_n_steps_logs_the_mean(workspace: Any, tmp_path: Path) -> None:
    each = workspace.run(tmp_path / "each")
    fifth = workspace.run(tmp_path / "fifth", "log_every_n_steps=5")
    assert [row["step"] for row in fifth.rows] == [5, 10, 15, 20]
    means = [sum(losses(each.rows)[i : i + 5]) / 5 for i in range(0, 20, 5)]
    assert losses(fifth.rows) == pytest.approx(means, rel=1e-5)
    assert fifth.rows[-1]["tokens_seen"] == each.rows[-1]["tokens_seen"]


# ------------------------------------------------------------------------------------------------- resume


def wait_for_step(process: subprocess.Popen[str], output_dir: Path, step: int) -> None:
    """Until the run has logged ``step``."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        path = output_dir / "metrics.jsonl"
        if path.exists() and any(row["step"] >= step for row in read_metrics(path)):
            return
        time.sleep(0.002)
    process.kill()
    raise AssertionError("did not reach the step in time")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_killed_run_resumes_bit_for_bit(workspace: Any, tmp_path: Path, kill: signal.Signals, strategy: str) -> None:
    options = (
        *STRATEGIES[strategy], "max_steps_per_epoch=20", "epochs=2", "gradient_accumulation_steps=2",
        "keep_last_n=3",
    )  # fmt: skip
    if kill == signal.SIGKILL:
        options += ("save_every_n_steps=7",)
    expected = workspace.run(tmp_path / "whole", *options)
    assert expected.status == 0, expected.err

    process = workspace.spawn(workspace.command(tmp_path / "killed", *options))
    wait_for_step(process, tmp_path / "killed", 17)
    process.send_signal(kill)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (143 if kill == signal.SIGTERM else -9), err
    resumed = workspace.run(tmp_path / "killed", *options, "resume_from_checkpoint=True")
    assert resumed.status == 0, resumed.err
    assert_same(resumed.weights(40), expected.weights(40))
    assert losses(resumed.rows) == losses(expected.rows)
    assert [row["step"] for row in resumed.rows] == list(range(1, 41))
    for key in ("lr", "grad_norm", "tokens_seen"):
        assert [row[key] for row in resumed.rows] == [row[key] for row in expected.rows]
    states = [
        torch.load(run.output_dir / "step_40" / "recipe_state.pt", weights_only=True)["recipe_state"]["optimizer"]
        for run in (resumed, expected)
    ]
    for index, state in states[1]["state"].items():
        assert all(torch.equal(states[0]["state"][index][name], state[name]) for name in state)


@pytest.mark.parametrize("target", [("optimizer.strategy=resident",), PLAIN], ids=["resident", "plain AdamW"])
def test_a_run_saved_under_host_resumes_elsewhere(workspace: Any, tmp_path: Path, target: tuple[str, ...]) -> None:
    options = ("max_steps_per_epoch=40",)
    expected = workspace.run(tmp_path / "whole", *options, *STRATEGIES["host with gradients"])
    half = workspace.run(tmp_path / "half", *options, *STRATEGIES["host with gradients"], "save_every_n_steps=20")
    assert (expected.status, half.status) == (0, 0), half.err
    shutil.rmtree(tmp_path / "half" / "step_40")
    resumed = workspace.run(tmp_path / "half", *options, *target, "resume_from_checkpoint=True")
    assert resumed.status == 0, resumed.err
    assert_same(resumed.weights(40), expected.weights(40))


def test_interrupt_from_the_keyboard_saves_and_ends_with_130(workspace: Any, tmp_path: Path) -> None:
    process = workspace.spawn(workspace.command(tmp_path / "run", "max_steps_per_epoch=null", "epochs=50"))
    wait_for_step(process, tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "run").glob("step_*")
    assert read_metrics(tmp_path / "run")[-1]["step"] == int(folder.name.removeprefix("step_"))
    assert "resume_from_checkpoint=True" in out


def test_resume_says_what_changes_the_run(workspace: Any, tmp_path: Path) -> None:
    assert workspace.run(tmp_path / "run", "max_steps_per_epoch=5").status == 0
    again = ("max_steps_per_epoch=10", "resume_from_checkpoint=True")
    result = workspace.run(tmp_path / "run", *again, "batch_size=4", "optimizer.lr=0.5")
    assert result.status == 0, result.err
    told = result.out + result.err
    assert "batch_size is 4 now and was 2" in told and "optimizer.lr=0.5 is not used" in told
    done = workspace.run(tmp_path / "run", *again)
    assert done.status == 0 and "nothing is left to train" in done.out


def test_resume_refuses_another_order_of_the_data_and_tells_of_another_schedule(workspace: Any, tmp_path: Path) -> None:
    options = ("max_steps_per_epoch=5", "lr_scheduler.num_warmup_steps=5", "dataset.packed=True")
    first = workspace.run(tmp_path / "run", *options)
    assert first.status == 0, first.err
    assert "lr_scheduler.num_warmup_steps is 5 and the run has 5 steps" in first.out + first.err
    again = ("max_steps_per_epoch=10", "resume_from_checkpoint=True", "dataset.packed=True")
    refused = workspace.run(tmp_path / "run", *again, "tokenizer.max_seq_len=40")
    assert refused.status == 2
    (error,) = refused.errors()
    assert "tokenizer.max_seq_len: it is 40 now and was 48" in error and "set tokenizer.max_seq_len=48" in error
    assert [row["step"] for row in first.rows] == list(range(1, 6))  # nothing was written
    told = workspace.run(tmp_path / "run", *again, "lr_scheduler.num_warmup_steps=2")
    assert told.status == 0, told.err
    assert "lr_scheduler.num_warmup_steps is 2 now and was 5" in told.out + told.err
    assert "the run has 10 steps now and had 5" in told.out + told.err


def test_resume_without_a_checkpoint_is_an_error(workspace: Any, tmp_path: Path) -> None:
    result = workspace.run(tmp_path / "run", "resume_from_checkpoint=True")
    assert result.status == 2 and "no whole checkpoint" in result.errors()[0]


# ----------------------------------------------------------------------------------------------- mistakes


def test_a_loss_that_is_not_finite_stops_and_saves_nothing(workspace: Any, tmp_path: Path) -> None:
    options = ("optimizer.optimizer_class=torch.optim.SGD", "clip_grad_norm=null", "lr_scheduler=null")
    result = workspace.run(tmp_path / "run", *options, "optimizer.lr=1e8", "save_every_n_steps=1")
    assert result.status == 2
    (error,) = result.errors()
    last = max(int(p.name.removeprefix("step_")) for p in (tmp_path / "run").glob("step_*"))
    assert f"step {last + 1}" in error and "lr=1e+08" in error
    assert all(math.isfinite(loss) for loss in losses(result.rows))
    assert all(t.isfinite().all() for t in result.weights(1).values())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_sise=8", ("batch_sise", "batch_size")),
        ("optimizer.lrr=1", ("optimizer.lrr", "optimizer.lr")),
        ("optimizer._component_=torch.optim.AdamWW", ("optimizer._component_", "'AdamWW'", "torch.optim.AdamW?")),
        ("optimizer.optimizer_class=torch.optim.Adamm", ("optimizer.optimizer_class", "'Adamm'", "torch.optim.Adam?")),
        ("device=cuda", ("device", "cuda", "cpu")),
        ("max_steps_per_epoch=0", ("max_steps_per_epoch", "at least 1")),
        ("batch_size=400", ("320 samples", "batch_size=400")),
        ("checkpointer.checkpoint_dir=/nowhere/at/all", ("/nowhere/at/all",)),
        ("enable_activation_offloading=True", ("enable_activation_offloading", "False")),
        ("optimizer=offload.TorchAOCPUOffloadOptimizer", ("CUDA or XPU", "offload.OffloadOptimizer")),
        ("model.num_layers=3", ("model.num_layers", "num_hidden_layers is 2", "set model.num_layers=2")),
        ("model.num_heads=8", ("model.num_heads", "num_attention_heads is 4", "set model.num_heads=4")),
        ("model.norm_eps=1e-2", ("model.norm_eps", "rms_norm_eps is 1e-05", "set model.norm_eps=1e-05")),
        ("+model.rope_base=500000", ("model.rope_base", "rope_theta is 10000", "set model.rope_base=10000")),
        ("output_dir=/proc/nowhere", ("/proc/nowhere",)),
    ],
)
def test_mistakes_give_one_line_and_status_2(
    workspace: Any, tmp_path: Path, override: str, expected: tuple[str, ...]
) -> None:
    if override == "device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA, so device=cuda is no mistake")
    result = workspace.run(tmp_path / "run", override)
    assert result.status == 2
    (error,) = result.errors()
    assert all(part in error for part in expected), error
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_the_model_is_taken_from_config_json_where_the_config_leaves_it_out(workspace: Any, tmp_path: Path) -> None:
    steps = "max_steps_per_epoch=3"
    explicit = workspace.run(tmp_path / "explicit", steps)
    filled = workspace.run(tmp_path / "filled", steps, "model={_component_: torchtune.models.llama2.llama2}")
    assert filled.status == 0, filled.err
    assert "num_kv_heads=2" in filled.out and "from" in filled.out
    assert_same(filled.weights(3), explicit.weights(3))
    state = torch.load(filled.output_dir / "step_3" / "recipe_state.pt", weights_only=True)["recipe_state"]
    assert state["config"]["model"]["num_kv_heads"] == 2  # the config that is kept is the model that was built


def test_a_tokenizer_larger_than_the_embedding(workspace: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = broken_copy(workspace, tmp_path)
    weights = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:300].contiguous()
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    result = workspace.run(tmp_path / "run", f"checkpointer.checkpoint_dir={base}", "model.vocab_size=300")
    assert result.status == 2
    (error,) = result.errors()
    assert "tokenizer: it has" in error and "embedding has 300 rows" in error


def broken_copy(workspace: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workspace.path / "base", tmp_path / "base"))


def test_a_missing_and_a_truncated_checkpoint_file(workspace: Any, tmp_path: Path) -> None:
    base = broken_copy(workspace, tmp_path)
    weights = base / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    result = workspace.run(tmp_path / "run", f"checkpointer.checkpoint_dir={base}")
    assert result.status == 2
    (error,) = result.errors()
    assert "model.safetensors" in error
    weights.unlink()
    result = workspace.run(tmp_path / "run", f"checkpointer.checkpoint_dir={base}")
    assert result.status == 2 and len(result.errors()) == 1


def test_a_data_file_with_a_broken_line(workspace: Any, tmp_path: Path) -> None:
    lines = (workspace.path / "train.jsonl").read_text().splitlines()
    lines[7] = lines[7][:-5]
    (tmp_path / "broken.jsonl").write_text("\n".join(lines))
    result = workspace.run(tmp_path / "run", f"dataset.data_files={tmp_path / 'broken.jsonl'}")
    assert result.status == 2
    (error,) = result.errors()
    assert "broken.jsonl" in error and "dataset" in error and "line 8" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        if not foreseen:  # as if the disk had filled up since
            monkeypatch.setattr("offload.checkpoints.disk_space.free_bytes", lambda folder: None)
        result = workspace.run(small / "run", "max_steps_per_epoch=3")
        assert result.status == 2
        (error,) = result.errors()
        assert "small/run" in error and "free" in error
        assert not list((small / "run").glob("*step_*"))
        if foreseen:  # nothing is trained that could not be saved, and nothing is left
            assert not list((small / "run").iterdir())
        else:
            assert len(read_metrics(small / "run")) == 3
    finally:
        subprocess.run(["umount", str(small)], check=True)
