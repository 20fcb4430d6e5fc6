"""Early stopping and the best checkpoint: by the evaluation loss, through a resume, in both recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.training.best_evaluation import BestEvaluation
from offload.training.finetune import FinetuneRecipe

# After steps 2, 4, 6, ...: the best is step 4.
LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: float("nan"), 10: 2.25, 12: 2.25, 14: 1.0}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FinetuneRecipe, "evaluate", lambda self: LOSSES.get(self.global_step, 2.75))


def evaluation(workspace: Any, **more: Any) -> str:
    section = json.loads((workspace.path / "evaluation.json").read_text())
    return f"evaluation={json.dumps({**section, 'every_n_steps': 2, **more})}"


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step_*")}


@pytest.mark.parametrize("recipe", ["full_finetune_single_device", "lora_finetune_single_device"])
def test_a_run_stops_when_the_loss_no_longer_falls_and_keeps_the_best(
    recipe: str, workspace: Any, tmp_path: Path, judged: None
) -> None:
    run = tmp_path / "run"

    def train(patience: int, *more: str) -> Any:
        section = evaluation(workspace, early_stopping_patience=patience, keep_best=True)
        return workspace.run(run, section, "keep_last_n=1", *more, recipe=recipe)

    stopped = train(2)
    assert stopped.status == 0, stopped.err
    assert [row["step"] for row in stopped.rows][-1] == 8 and saved(run) == {"step_4", "step_8"}
    assert (
        "stopping at step 8: the evaluation loss has not fallen below 2.0000, that of step 4, in 2 evaluations"
        in stopped.out
    )
    assert f"best             {run / 'step_4'}" in stopped.out
    record = json.loads((run / "run.json").read_text())
    assert record["status"] == "done" and record["summary"]["evaluation_loss_best_step"] == 4

    again = train(2, "resume_from_checkpoint=True")
    assert again.status == 0 and "nothing is left to train" in again.out + again.err
    assert saved(run) == {"step_4", "step_8"}

    further = train(4, "resume_from_checkpoint=True")
    assert further.status == 0, further.err
    assert [row["step"] for row in further.rows] == list(range(1, 13)), "two more evaluations, not four"
    assert saved(run) == {"step_4", "step_12"}


def test_without_these_settings_nothing_stops_and_the_last_is_kept(
    workspace: Any, tmp_path: Path, judged: None
) -> None:
    result = workspace.run(tmp_path / "run", evaluation(workspace), "keep_last_n=1")
    assert result.status == 0 and len(result.rows) == 20 and saved(tmp_path / "run") == {"step_20"}


def test_patience_counts_evaluations_in_a_row() -> None:
    best = BestEvaluation(2)
    assert [best.observe(step, loss) for step, loss in enumerate((3.0, 3.0, 2.0, float("nan")))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert not best.is_exhausted
    other = BestEvaluation(2)
    other.load_state_dict(best.state_dict())
    assert not other.observe(4, 2.5) and other.is_exhausted and (other.loss, other.step) == (2.0, 2)
    assert not BestEvaluation().is_exhausted
