"""What docs/runs.md says of EleutherAI's harness: it reads a run's checkpoints and adapters, without a network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.recipes.conftest import ROOT, Workspace  # type: ignore[import-not-found]
from tests.recipes.test_huggingface import LORA, here  # type: ignore[import-not-found]

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'lm_eval>=0.4.10'")

assert here  # the fixture
ROWS = 6


def task(folder: Path, data: Path) -> dict[str, Any]:
    """The task of the documentation, over our own file."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    text = page.partition("## Evaluate with lm_eval")[2].partition("```yaml\n")[2].partition("```")[0]
    text = text.replace("/data/heldout.jsonl", str(data))
    folder.mkdir()
    (folder / "mine.yaml").write_text(text)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def by_hand(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> tuple[float, float]:
    """Perplexity and accuracy as the documentation defines them."""
    likelihoods, hits = [], 0
    for row in rows:
        prompt = tokenizer(row["prompt"]).input_ids
        whole = tokenizer(f"{row['prompt']} {row['completion']}").input_ids
        assert whole[: len(prompt)] == prompt
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([whole])).logits[0, len(prompt) - 1 : -1]
        answer = torch.tensor(whole[len(prompt) :])
        likelihoods.append(float(logits.log_softmax(-1).gather(-1, answer[:, None]).sum()))
        hits += bool((logits.argmax(-1) == answer).all())
    return math.exp(-sum(likelihoods) / len(rows)), hits / len(rows)


@pytest.mark.parametrize("kind", ["transformers", "torchtune", "adapter"])
def test_a_checkpoint_is_evaluated_as_the_model_that_it_is(
    kind: str, workspace: Workspace, here: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = workspace.path / "base"
    if kind == "adapter":
        result = here.run(tmp_path / "out", "max_steps_per_epoch=3", "save_adapter_weights_only=True", recipe=LORA)
    else:
        result = (here if kind == "transformers" else workspace).run(tmp_path / "out", "max_steps_per_epoch=3")
    assert result.status == 0, result.err
    step = result.output_dir / "step_3"
    rows = [json.loads(line) for line in (workspace.path / "held_out.jsonl").read_text().splitlines()][:ROWS]
    rows = [{"prompt": row["input"], "completion": row["output"][:60].strip()} for row in rows]
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task(tmp_path / "tasks", data)

    arguments = f"pretrained={base},peft={step / 'adapter'}" if kind == "adapter" else f"pretrained={step}"
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"{arguments},dtype=float32",
        tasks=["mine"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
    )["results"]["mine"]
    model = AutoModelForCausalLM.from_pretrained(base if kind == "adapter" else step, dtype=torch.float32)
    if kind == "adapter":
        model = PeftModel.from_pretrained(model, str(step / "adapter"))
    tokenizer = AutoTokenizer.from_pretrained(base if kind == "adapter" else step)
    perplexity, accuracy = by_hand(model.eval(), tokenizer, rows)
    assert found["perplexity,none"] == pytest.approx(perplexity, rel=1e-3)
    assert found["acc,none"] == accuracy
