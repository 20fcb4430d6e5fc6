"""Answers against transformers' own generate; what ends them, how tokens are chosen, text as it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from offload.checkpoints.reading import SavedRuns
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError
from offload.models.huggingface.answers import HuggingFaceAnswerer
from offload.models.huggingface.generation import Generator, TextStream
from offload.models.protocol import Sampling
from tests.data.conftest import byte_level  # type: ignore[import-not-found]  # noqa: F401 - a fixture
from tests.data.tokenizer_files import sentencepiece_model  # type: ignore[import-not-found]
from tests.models.huggingface import families  # type: ignore[import-not-found]

CPU = torch.device("cpu")
PROMPT = [5, 17, 40, 3, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    families.save("llama", path)
    return path


def configured(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def generator(folder: Path, sampling: Sampling, stop: tuple[int, ...] = ()) -> Generator:
    return Generator(folder, folder, device=CPU, dtype=torch.float32, sampling=sampling, stop=stop)


def answer(made_by: Generator, seed: int | None = None, cache: bool = True) -> tuple[list[int], list[int]]:
    """What it returns, and what it told on the way."""
    told: list[int] = []
    found = made_by.answer(PROMPT, max_new_tokens=24, seed=seed, use_cache=cache, on_token=told.append)
    return found, told


def reference(folder: Path, seed: int | None = None, **options: Any) -> list[int]:
    """All that transformers' own ``generate`` makes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([PROMPT])
    if seed is not None:
        torch.manual_seed(seed)
    made = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, **options)
    return [int(token) for token in made[0, len(PROMPT) :]]


@pytest.mark.parametrize("cache", [True, False])
def test_greedy_answers_are_those_of_generate(folder: Path, cache: bool) -> None:
    configured(folder, do_sample=True, temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, max_length=7)
    expected = reference(folder, do_sample=False)
    assert len(expected) == 24 and len(set(expected)) > 1
    found, told = answer(generator(folder, Sampling(temperature=0)), cache=cache)
    assert found == told == expected


@pytest.mark.parametrize("of", ["an id", "a list", "the template"])
def test_what_ends_an_answer(folder: Path, of: str) -> None:
    """The model's own generation_config and the chat template have a say each."""
    whole = reference(configured(folder), do_sample=False)
    end = next(token for number, token in enumerate(whole) if number > 2 and token not in whole[:number])
    expected = whole[: whole.index(end)]
    own = {"an id": end, "a list": [end, 95], "the template": 95}[of]
    made_by = generator(configured(folder, eos_token_id=own), Sampling(0), (end, 2) if of == "the template" else (2,))
    assert set(made_by.stop) >= {2, end}
    assert answer(made_by) == (expected, expected)


CHOICES = [
    (Sampling(), {}, "temperature 0.6, top_k 5, top_p 0.9"),
    (Sampling(top_k=0), {"top_k": 0}, "temperature 0.6, top_k 0, top_p 0.9"),
    (Sampling(1.5, 3, 0.5), {"temperature": 1.5, "top_k": 3, "top_p": 0.5}, "temperature 1.5, top_k 3, top_p 0.5"),
]


@pytest.mark.parametrize(("sampling", "options", "described"), CHOICES)
def test_tokens_are_chosen_as_the_models_settings_say(
    folder: Path, sampling: Sampling, options: dict[str, Any], described: str
) -> None:
    configured(folder, do_sample=True, temperature=0.6, top_k=5, top_p=0.9)
    made_by = generator(folder, sampling)
    assert made_by.described == described
    assert answer(made_by, seed=3)[0] == reference(folder, seed=3, **options) != reference(folder, seed=4, **options)


def test_a_model_that_does_not_sample_by_itself(folder: Path) -> None:
    configured(folder)
    assert generator(folder, Sampling()).described == "the likeliest token each time"
    assert generator(folder, Sampling(temperature=0.5)).described.startswith("temperature 0.5")


TEXT = "Wörter, 漢字 and 🤗🏳️‍🌈 emoji;\n\n  two  blanks,\ttabs\n"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_text_comes_as_it_is_made(
    byte_level: Path,  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    """Each part decodes a few tokens only, and all of them are the text."""
    path = byte_level
    if kind == "sentencepiece":
        path = tmp_path
        (path / "tokenizer.model").write_bytes(sentencepiece_model())
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = ChatTokenizer(path)
    tokens = tokenizer.encode(TEXT * 20, add_bos=False, add_eos=False)
    parts: list[str] = []
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return tokenizer.decode(ids)

    stream = TextStream(decode, parts.append)
    for token in tokens:
        stream.put(token)
        assert tokenizer.decode(tokens).startswith("".join(parts))
    stream.end()
    assert "".join(parts) == tokenizer.decode(tokens)
    assert len(parts) > len(tokens) / 4 and max(decoded) < 40
    assert all(not part.endswith("\ufffd") for part in parts)


def test_an_answer_comes_without_what_libraries_deprecate(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    import transformers
    from peft import LoraConfig

    from offload.models.huggingface import AdaptedModel, from_pretrained

    logger = transformers.logging.get_logger()
    logger.addHandler(caplog.handler)
    try:
        configured(folder, do_sample=False)
        base = from_pretrained(folder, device=CPU, dtype=torch.float32)
        base.checkpoint_activations()
        adapted = AdaptedModel(base, LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.module.save_pretrained(tmp_path / "adapter")
        made_by = Generator(folder, tmp_path, device=CPU, dtype=torch.float32, sampling=Sampling(0), stop=())
        answer(made_by)
    finally:
        logger.removeHandler(caplog.handler)
    said = caplog.text + "".join(str(warning.message) for warning in recwarn)
    assert "generation_config" not in said and "is_gradient_checkpointing" not in said


def test_a_folder_without_a_model_is_told_as_such(tmp_path: Path) -> None:
    model = OmegaConf.create({"_component_": "offload.models.huggingface.from_pretrained", "path": str(tmp_path)})

    def make_tokenizer(home: Path | None) -> Any:
        raise AssertionError("there is nothing to make it of")

    with pytest.raises(
        UserError, match=r"^model\.path: .* has no config\.json.* step_<n>.* save_every_n_steps"
    ) as error:
        HuggingFaceAnswerer(
            model,
            make_tokenizer,
            sampling=Sampling(),
            base=None,
            saved=SavedRuns(),
            device=CPU,
            dtype=torch.float32,
            tell=print,
        )
    assert "\n" not in str(error.value)
