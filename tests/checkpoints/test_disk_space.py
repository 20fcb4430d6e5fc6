"""The disk that checkpoints take is known before the first step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.checkpoints import disk_space
from offload.checkpoints.disk_space import num_saves, peak_bytes, plan, state_bytes
from offload.checkpoints.manager import CheckpointManager
from offload.errors import UserError
from offload.models.torchtune.checkpoint import TorchtuneFormat

GIB = 2**30


def test_the_number_of_checkpoints_is_that_of_the_loop() -> None:
    """Counted as the recipes decide it, step by step."""
    rng = random.Random(0)
    for _ in range(300):
        epochs, per_epoch = rng.randint(1, 4), rng.randint(1, 12)
        every = rng.choice([None, 1, 2, 3, 5, 50])
        total = epochs * per_epoch
        done = rng.randrange(total)
        saves = [
            step
            for step in range(done + 1, total + 1)
            if step == total or (step % every == 0 if every else step % per_epoch == 0)
        ]
        count = num_saves(every=every, total_steps=total, done_steps=done, epochs_left=epochs - done // per_epoch)
        assert count == len(saves), (epochs, per_epoch, every, done)


def test_the_peak_is_that_of_saving_and_deleting_one_by_one() -> None:
    rng = random.Random(1)
    for _ in range(500):
        keep, count = rng.choice([None, 1, 2, 3, 7]), rng.randint(1, 9)
        present = [rng.randint(1, 9) for _ in range(rng.randint(0, 4))]
        kept, peak = list(present), 0
        for _ in range(count):
            kept.append(5)
            peak = max(peak, sum(kept) - sum(present))
            kept = kept if keep is None else kept[-keep:]
        assert peak_bytes(5, count, keep, present) == peak, (keep, count, present)


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs"),
    [
        ("torch.optim.AdamW", {}),
        ("torch.optim.SGD", {}),
        ("torch.optim.SGD", {"momentum": 0.9}),
        ("torchao.optim.AdamW8bit", {}),
        ("offload.optim.AdamW", {"state_dtype": "int8", "master": "split"}),
        ("offload.optim.AdamW", {"state_dtype": "fp32"}),
    ],
)
def test_states_are_foreseen(optimizer_class: str, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.Linear(128, 64)).to(torch.bfloat16)

    def build(named: Any) -> torch.optim.Optimizer:
        return offload.OffloadOptimizer(named, optimizer_class, strategy="host", lr=1e-3, **kwargs)

    optimizer = build(list(model.named_parameters()))
    before = torch.get_rng_state()
    foreseen = state_bytes(optimizer, build)
    assert torch.equal(torch.get_rng_state(), before)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    actual = state_bytes(optimizer, build)
    assert foreseen == pytest.approx(actual, rel=0.02, abs=4096)  # torchao keeps a table of 2 KiB per state
    assert actual is not None and (actual > 0 or "SGD" in optimizer_class)


def test_an_optimizer_that_does_not_run_here_says_nothing() -> None:
    def build(named: Any) -> torch.optim.Optimizer:
        raise RuntimeError("needs a GPU")

    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    assert state_bytes(optimizer, build) is None


def told(free: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: free)
    values = {"weights": 10 * GIB, "states": 20 * GIB, "count": 5, "keep": None, "present": [], **options}
    return plan(Path("/out"), **values)


def test_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = told(151 * GIB, monkeypatch)
    assert line == "checkpoints: 5 of about 30.00 GiB each, about 150.00 GiB of disk at most, 151.00 GiB are free"
    _, warning = told(100 * GIB, monkeypatch)
    assert "full after 3 of 5 checkpoints" in warning and "set keep_last_n=1" in warning
    (line,) = told(100 * GIB, monkeypatch, keep=2)
    assert "(2 are kept), about 90.00 GiB of disk at most" in line
    _, warning = told(80 * GIB, monkeypatch, keep=2)
    assert "full after 2 of 5" in warning and "lower keep_last_n" in warning
    _, warning = told(50 * GIB, monkeypatch, keep=1)
    assert "full after 1 of 5" in warning and "free space for two" in warning and warning.count("free space") == 1
    (line,) = told(100 * GIB, monkeypatch, count=1, states=None)
    assert "1 of at least 10.00 GiB" in line
    with pytest.raises(UserError, match=r"^output_dir: a checkpoint of this run takes about 30.00 GiB and 29.00 GiB"):
        told(29 * GIB, monkeypatch)


def test_where_free_space_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: (_ for _ in ()).throw(OSError()))
    (line,) = plan(Path("/out"), weights=GIB, states=GIB, count=1, keep=None, present=[])
    assert "free" not in line


def test_one_checkpoint_takes_about_what_was_foreseen(tmp_path: Path) -> None:
    from tests.checkpoints.test_manager import section, write_base  # type: ignore[import-not-found]

    write_base(tmp_path / "base", "LLAMA2")
    manager = CheckpointManager(TorchtuneFormat(section(tmp_path / "base")), tmp_path / "out")
    weights = manager.format.load_base()
    params = [nn.Parameter(tensor.repeat_interleave(8, 0).repeat_interleave(8, 0)) for tensor in weights.values()]
    optimizer = torch.optim.AdamW(params)
    foreseen = state_bytes(optimizer, lambda named: torch.optim.AdamW(named))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    path = manager.save(1, model=weights, recipe_state={"optimizer": optimizer.state_dict()})
    assert (path / "recipe_state.pt").stat().st_size == pytest.approx(foreseen, rel=0.05)
