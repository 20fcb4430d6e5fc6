"""Answers a prompt with a model: a finished run's, a downloaded one, or an adapter on top of its base.

Features, each behind the configuration key of that name:

- ``checkpointer.checkpoint_dir``: a training run's ``output_dir`` (its newest checkpoint is taken), one of
  its ``step_<n>`` folders, or any checkpoint in Hugging Face's format. A checkpoint that holds an adapter
  alone is merged, in memory, into the base model that it was trained on.
- ``prompt.user`` or ``prompt.file``, ``prompt.system``: brought into the tokenizer's prompt template, as in training.
- ``temperature``, ``top_k``, ``top_p``, ``max_new_tokens``, ``seed``: how tokens are chosen, and how many; null leaves
  it to the ``generation_config.json`` of a model of transformers, which also has a say in what ends an answer.
- ``enable_kv_cache``: time against memory.

The answer goes to stdout, everything else to stderr. Stops with status 2 and one line for what the user can
mend: an unknown key, a folder without a checkpoint, a prompt that is longer than the model's context.

    tune run generate --config tiny_llama_generate prompt.user="What does shutil.copytree do?"
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig

from offload.checkpoints.reading import SavedRuns
from offload.config.loading import Above, AtLeast, AtMost, Component
from offload.data.tokenizers import build_tokenizer
from offload.device import find_device, find_dtype, is_here
from offload.errors import UserError
from offload.metrics.lines import say
from offload.models.protocol import Sampling
from offload.models.source import find_answerer
from offload.paths import expanded
from offload.training.launch import run_recipe
from offload.training.preflight import check_model
from offload.training.settings import Checkpointer, Model


@dataclass(kw_only=True)
class Prompt:
    """Section ``prompt``."""

    user: str | None = None
    """what to answer; - reads it from standard input, which may have several lines"""
    file: str | None = None
    """a file with a question in each line, in place of user; - for standard input"""
    system: str | None = None
    """instructions that precede it"""


@dataclass(kw_only=True)
class Settings:
    """Everything that this recipe reads from its configuration."""

    model: Model
    """without adapters: those of a checkpoint are merged"""
    tokenizer: Component
    """the one that the model was trained with"""
    checkpointer: Checkpointer | None = None
    """of a torchtune model: the folder of a run, of a checkpoint or of a downloaded model"""
    base_checkpoint_dir: str | None = None
    """base of a checkpoint that is an adapter alone; null: where its training found it"""
    device: str = "auto"
    """auto (the accelerator if there is one), cpu, cuda, xpu, or one of several as cuda:1"""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """of the parameters and of what is computed with them"""
    seed: Annotated[int, AtLeast(0), AtMost(2**63 - 1)] | None = None
    """of the choice of tokens; null: another answer each time, where temperature is not 0"""

    prompt: Prompt
    """the question"""
    max_new_tokens: Annotated[int, AtLeast(1)] = 200
    """length of the answer at most"""
    temperature: Annotated[float, AtLeast(0)] | None = 0.0
    """0 takes the likeliest token; the more, the more surprising; null: as generation_config.json of the model says"""
    top_k: Annotated[int, AtLeast(0)] | None = None
    """choose among so many likeliest tokens, 0 for all; null: as generation_config.json says, or among all"""
    top_p: Annotated[float, Above(0), AtMost(1)] | None = None
    """choose among the likeliest tokens that have this probability together; null: as generation_config.json says"""
    enable_kv_cache: bool = True
    """keep what was computed for earlier tokens: faster, for some memory"""


class GenerateRecipe:
    """Text generation with one model on one device."""

    Settings = Settings

    def __init__(self, settings: Settings, cfg: DictConfig) -> None:
        self.settings, self.cfg = settings, cfg

    @staticmethod
    def check(settings: Settings, *, notes: list[str] | None = None) -> tuple[torch.device, torch.dtype, str]:
        """Refuses what can be refused before anything is read; returns device, dtype and why this device.

        Args:
            settings: that the schema accepts.
            notes: where given, it will run on another machine: a device that is not here is noted.
        """
        device, reason = find_device(settings.device, elsewhere=notes is not None)
        if notes is not None and not is_here(device):
            notes.append(reason)
        dtype = find_dtype(settings.dtype, device)
        check_model(settings.model, dtype)
        return device, dtype, reason

    def setup(self) -> None:
        """Loads tokenizer and model; the cheap and the likely to fail first."""
        settings = self.settings
        self.device, self.dtype, reason = self.check(settings)
        _tell(reason)
        self.questions, system = self._questions(), settings.prompt.system
        self.instructions = None if system is None else _as_utf8(system, "prompt.system")
        base = settings.base_checkpoint_dir
        self.answerer = find_answerer(
            settings.model,
            settings.checkpointer,
            self._tokenizer,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
            base=None if base is None else expanded(base, "base_checkpoint_dir"),
            saved=SavedRuns(),
            device=self.device,
            dtype=self.dtype,
            tell=_tell,
        )

    def _tokenizer(self, home: Path | None) -> Any:
        """The tokenizer; where it is the model's own, that of the folder where the model's own files are."""
        section = self.settings.tokenizer
        if home is not None and section.get("path") == self.settings.model.get("path"):
            section = section.copy()
            section.path = str(home)
        return build_tokenizer(section)

    def _questions(self) -> list[str]:
        """What to answer, one after the other."""
        prompt = self.settings.prompt
        if (prompt.user is None) == (prompt.file is None):
            raise UserError("prompt: give either prompt.user='a question' or prompt.file=FILE, with one in each line")
        if prompt.file is None and prompt.user != "-":
            return [_as_utf8(str(prompt.user), "prompt.user")]
        key, name = ("prompt.user", "-") if prompt.file is None else ("prompt.file", prompt.file)
        try:
            text = sys.stdin.read() if name == "-" else expanded(name, key).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{key}: cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
        text = _as_utf8(text, key)
        questions = [line for line in (text.splitlines() if prompt.file else [text.strip()]) if line.strip()]
        if not questions:
            raise UserError(f"{key}: {'standard input' if name == '-' else name} has no question")
        return questions

    def _prompt(self, question: str) -> list[int]:
        """The prompt's token ids."""
        messages = [{"role": "user", "content": question}]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return self.answerer.encode(messages)

    def train(self) -> int:
        """Generates and prints the answers; returns the exit status."""
        prompts = [self._prompt(question) for question in self.questions]
        self.answerer.reserve(max(map(len, prompts)) + self.settings.max_new_tokens)
        for question, prompt in zip(self.questions, prompts, strict=True):
            if len(self.questions) > 1:
                print(f"> {question}", flush=True)
            self._answer(prompt)
        return 0

    def _answer(self, prompt: list[int]) -> None:
        settings = self.settings
        budget = self._max_new_tokens(len(prompt))
        started = time.perf_counter()
        answer = self.answerer.answer(
            prompt,
            lambda text: print(text, end="", flush=True),
            max_new_tokens=budget,
            seed=settings.seed,
            use_cache=settings.enable_kv_cache,
        )
        print(flush=True)
        seconds = time.perf_counter() - started
        ending = "" if len(answer) < budget else f" (cut at max_new_tokens={budget})"
        _tell(f"{len(answer)} tokens in {seconds:.1f} s, {len(answer) / seconds:.1f} tokens/s{ending}")

    def _max_new_tokens(self, length: int) -> int:
        """How many tokens fit behind a prompt of so many, at most as many as wanted."""
        context, wanted = self.answerer.context, self.settings.max_new_tokens
        if context is None:
            return wanted
        if length >= context:
            raise UserError(
                f"prompt.user: the prompt has {length} tokens and the model's context {context}: shorten it"
            )
        if length + wanted > context:
            _tell(f"max_new_tokens={wanted} does not fit behind the prompt's {length}: using {context - length}")
        return min(wanted, context - length)

    def cleanup(self, exit_code: int) -> None:
        """Nothing was opened."""


def _as_utf8(text: str, key: str) -> str:
    """A text of the command line or standard input, of which Python decodes ASCII alone in an ASCII locale.

    Raises:
        UserError: its bytes are not UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise UserError(f"{key}: {ascii(text)[:100]} is not UTF-8: write it in UTF-8") from error


def _tell(line: str) -> None:
    """To stderr: stdout carries the answer alone."""
    say(line, stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_recipe(GenerateRecipe))
