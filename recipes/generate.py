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

import inspect
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from omegaconf import DictConfig
from torch import Tensor

from offload import torchao_shim
from offload.checkpoints import state as recipe_state
from offload.checkpoints.manager import STATE_NAME, CheckpointManager, whole_checkpoints
from offload.component import resolve
from offload.config.loading import Above, AtLeast, AtMost, Component
from offload.data.tokenizers import build_tokenizer
from offload.device import find_device, find_dtype, is_here
from offload.errors import UserError
from offload.metrics.lines import say
from offload.models.huggingface import from_pretrained
from offload.models.huggingface.generation import Generator, Sampling, TextStream, home_of
from offload.models.torchtune.base_checkpoint import BaseCheckpoint
from offload.models.torchtune.building import build_as_the_base, load_weights
from offload.models.torchtune.checkpoint import TorchtuneFormat
from offload.paths import expanded
from offload.training.launch import run_recipe
from offload.training.preflight import check_model
from offload.training.settings import Checkpointer, Model

torchao_shim.install()

from torchtune.data import Message  # noqa: E402 - torchtune needs the shim
from torchtune.generation import generate  # noqa: E402


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
        self.questions = self._questions()
        if resolve(str(settings.model["_component_"]), key="model._component_") is from_pretrained:
            self._setup_huggingface()
            return
        self.tokenizer = build_tokenizer(settings.tokenizer)
        if settings.top_p is not None:
            raise UserError("top_p: torchtune's generation does not know it; leave it out, or set top_k")
        if settings.checkpointer is None:
            raise UserError("checkpointer is missing: a torchtune model is read from checkpointer.checkpoint_dir")
        self.generator = None
        # What loads checkpoints also wants a place to save them.
        with tempfile.TemporaryDirectory() as scratch:
            weights, source, base = load_checkpoint(settings.checkpointer, settings.base_checkpoint_dir, Path(scratch))
            self.model = build_as_the_base(
                settings.model, base, self.tokenizer, device=self.device, dtype=self.dtype, tell=_tell
            )
            load_weights(self.model, weights, source=str(source))
        self.model.eval()
        self.context = self.model.max_seq_len

    def _setup_huggingface(self) -> None:
        settings = self.settings
        options = {key: value for key, value in settings.model.items() if key not in ("_component_", "path")}
        folder = expanded(str(settings.model.path), "model.path").absolute()
        newest = newest_checkpoint(folder) if folder.is_dir() else None
        if newest is not None:
            _tell(f"newest checkpoint in {folder}: {newest.name}")
            folder = newest
        base = (
            None
            if settings.base_checkpoint_dir is None
            else expanded(settings.base_checkpoint_dir, "base_checkpoint_dir")
        )
        home = home_of(folder, base)
        if home != folder:
            _tell(f"{folder.name} is an adapter of {home}")
        tokenizer = settings.tokenizer
        if tokenizer.get("path") == settings.model.path:  # of a run it is the checkpoint's, of an adapter its base's
            tokenizer = tokenizer.copy()
            tokenizer.path = str(home)
        self.tokenizer = build_tokenizer(tokenizer)
        self.generator = Generator(
            home,
            folder,
            device=self.device,
            dtype=self.dtype,
            sampling=Sampling(settings.temperature, settings.top_k, settings.top_p),
            stop=self.tokenizer.stop_tokens,
            **options,
        )
        _tell(f"sampling: {self.generator.described}")
        self.context = self.generator.max_seq_len

    def _questions(self) -> list[str]:
        """What to answer, one after the other."""
        prompt = self.settings.prompt
        if (prompt.user is None) == (prompt.file is None):
            raise UserError("prompt: give either prompt.user='a question' or prompt.file=FILE, with one in each line")
        if prompt.file is None and prompt.user != "-":
            return [str(prompt.user)]
        key, name = ("prompt.user", "-") if prompt.file is None else ("prompt.file", prompt.file)
        try:
            text = sys.stdin.read() if name == "-" else expanded(name, key).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{key}: cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
        questions = [line for line in (text.splitlines() if prompt.file else [text.strip()]) if line.strip()]
        if not questions:
            raise UserError(f"{key}: {'standard input' if name == '-' else name} has no question")
        return questions

    def _tokens_of_prompt(self, question: str) -> Tensor:
        """The prompt's token ids, int64, shape [tokens], in the template that training used."""
        messages = [Message(role="user", content=question)]
        if self.settings.prompt.system is not None:
            messages.insert(0, Message(role="system", content=self.settings.prompt.system))
        # An empty answer makes the template open the assistant's turn.
        messages.append(Message(role="assistant", content=""))
        tokens = self.tokenizer({"messages": messages}, inference=True)["tokens"]
        return torch.tensor(tokens, device=self.device)

    def train(self) -> int:
        """Generates and prints the answers; returns the exit status."""
        if self.generator is None and self.settings.enable_kv_cache:
            longest = max(self._tokens_of_prompt(question).numel() for question in self.questions)
            with self.device:
                self.model.setup_caches(
                    batch_size=1,
                    dtype=self.dtype,
                    decoder_max_seq_len=min(longest + self.settings.max_new_tokens, self.context),
                )
        for question in self.questions:
            if len(self.questions) > 1:
                print(f"> {question}", flush=True)
            if self.generator is None:
                self._answer(question)
            else:
                self._stream(question)
        return 0

    def _stream(self, question: str) -> None:
        """The answer of a transformers model, printed as it is made."""
        settings = self.settings
        assert self.generator is not None
        messages = [{"role": "user", "content": question}]
        if settings.prompt.system is not None:
            messages.insert(0, {"role": "system", "content": settings.prompt.system})
        if self.tokenizer.has_template:
            prompt = self.tokenizer.encode_prompt(messages)
        else:
            text = "\n\n".join(message["content"] for message in messages)
            prompt = self.tokenizer.encode_completion(text, "")[0]
            prompt = prompt[:-1] if prompt and prompt[-1] == self.tokenizer.eos_id else prompt
        budget = self._max_new_tokens(len(prompt))
        stream = TextStream(self.tokenizer.decode, lambda text: print(text, end="", flush=True))
        started = time.perf_counter()
        answer = self.generator.answer(
            prompt,
            max_new_tokens=budget,
            seed=settings.seed,
            use_cache=settings.enable_kv_cache,
            on_token=stream.put,
        )
        stream.end()
        print(flush=True)
        seconds = time.perf_counter() - started
        ending = "" if len(answer) < budget else f" (cut at max_new_tokens={budget})"
        _tell(f"{len(answer)} tokens in {seconds:.1f} s, {len(answer) / seconds:.1f} tokens/s{ending}")

    def _answer(self, question: str) -> None:
        """The answer of a torchtune model."""
        settings = self.settings
        prompt = self._tokens_of_prompt(question)
        budget = self._max_new_tokens(prompt.numel())
        # torch.multinomial's stand-in in torchtune divides by the temperature: 0 means the likeliest token.
        temperature = settings.temperature or 0.0
        greedy = temperature == 0
        rng = None
        if settings.seed is not None:
            rng = torch.Generator(self.device).manual_seed(settings.seed)
        started = time.perf_counter()
        with torch.inference_mode():
            if settings.enable_kv_cache:
                self.model.reset_caches()
            tokens, _ = generate(
                self.model,
                prompt,
                max_generated_tokens=budget,
                pad_id=self.tokenizer.pad_id,
                temperature=1.0 if greedy else temperature,
                top_k=1 if greedy else settings.top_k or None,
                stop_tokens=self.tokenizer.stop_tokens,
                rng=rng,
            )
        answer = tokens[0, prompt.numel() :].tolist()
        seconds = time.perf_counter() - started
        stop = next((i for i, token in enumerate(answer) if token in self.tokenizer.stop_tokens), len(answer))
        print(self.tokenizer.decode(answer[:stop]), flush=True)
        ending = "" if stop < len(answer) else f" (cut at max_new_tokens={budget})"
        _tell(f"{len(answer)} tokens in {seconds:.1f} s, {len(answer) / seconds:.1f} tokens/s{ending}")

    def _max_new_tokens(self, length: int) -> int:
        """How many tokens fit behind a prompt of so many, at most as many as wanted."""
        context, wanted = self.context, self.settings.max_new_tokens
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


def load_checkpoint(
    section: DictConfig, base_checkpoint_dir: str | None, scratch: Path
) -> tuple[dict[str, Tensor], Path, BaseCheckpoint]:
    """The weights that ``checkpointer`` names, under torchtune's names, adapters merged.

    Args:
        section: the config's ``checkpointer``.
        base_checkpoint_dir: base of a checkpoint that is an adapter alone; None: where its training had it.
        scratch: an empty folder that may be written to.

    Returns:
        (weights on the CPU, the folder that they come from, the checkpoint whose config.json describes them)

    Raises:
        UserError: no checkpoint there, a damaged one, or an adapter whose base cannot be found.
    """
    folder = expanded(str(section.checkpoint_dir), "checkpointer.checkpoint_dir").absolute()
    if not folder.is_dir():
        raise UserError(
            f"checkpointer.checkpoint_dir: there is no folder {folder}: give a training run's output_dir, "
            "one of its step_<n> folders, or a downloaded checkpoint"
        )
    newest = newest_checkpoint(folder)
    if newest is not None:
        _tell(f"newest checkpoint in {folder}: {newest.name}")
        folder = newest
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if has_weights or not (folder / STATE_NAME).is_file():
        section = _with_folder(section, folder)
        format = TorchtuneFormat(section)
        format.prepare(scratch / "run")
        return format.load_base(), folder, format.base

    content = recipe_state.read(folder / STATE_NAME)
    training = content["recipe_state"]["config"]
    base = base_checkpoint_dir or training["checkpointer"]["checkpoint_dir"]
    base = expanded(base, "base_checkpoint_dir").absolute()
    if not base.is_dir():
        raise UserError(
            f"base_checkpoint_dir: {folder} holds an adapter alone, and its base model is no longer "
            f"in {base}: give the folder where it is now"
        )
    _tell(f"{folder.name} is an adapter: merging it into {base}")
    format = TorchtuneFormat(_with_folder(section, base))
    adapter = CheckpointManager(format, scratch / "run").load(folder).adapter
    assert adapter is not None
    return merge(format.load_base(), adapter, training["model"]), folder, format.base


def newest_checkpoint(folder: Path) -> Path | None:
    """The ``step_<n>`` folder in ``folder`` that was saved last; None when there is none."""
    checkpoints = whole_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def merge(base: dict[str, Tensor], adapter: Mapping[str, Tensor], model: Mapping[str, Any]) -> dict[str, Tensor]:
    """``base`` with a LoRA or DoRA adapter added into its weights: fp32 arithmetic, the base's dtype.

    Args:
        base: torchtune's names, e.g. ``layers.0.attn.q_proj.weight`` [out, in].
        adapter: torchtune's names, e.g. ``layers.0.attn.q_proj.lora_a.weight`` [rank, in].
        model: the model component that was trained, for its ``lora_alpha``.
    """
    from torchtune.modules.peft import get_merged_lora_ckpt

    alpha = model.get("lora_alpha")
    if alpha is None:
        builder = resolve(str(model["_component_"]), key="model._component_")
        alpha = inspect.signature(builder).parameters["lora_alpha"].default
    merged = dict(base)
    for name, lora_a in adapter.items():
        if not name.endswith(".lora_a.weight"):
            continue
        module = name.removesuffix(".lora_a.weight")
        # One module at a time: a whole model in fp32 would not fit where it fits in bf16.
        parts = {f"{module}.weight": base[f"{module}.weight"].float()}
        parts |= {part: tensor.float() for part, tensor in adapter.items() if part.startswith(f"{module}.")}
        weight = get_merged_lora_ckpt(parts, rank=lora_a.shape[0], alpha=alpha)[f"{module}.weight"]
        merged[f"{module}.weight"] = weight.to(base[f"{module}.weight"].dtype)
    return merged


def _with_folder(section: DictConfig, folder: Path) -> DictConfig:
    """``section`` pointed at ``folder``; files that were listed for another folder are found anew."""
    import copy

    changed = copy.deepcopy(section)
    if folder != Path(str(section.checkpoint_dir)).expanduser().absolute():
        changed.pop("checkpoint_files", None)
    changed.checkpoint_dir = str(folder)
    return changed


def _tell(line: str) -> None:
    """To stderr: stdout carries the answer alone."""
    say(line, stream=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_recipe(GenerateRecipe))
