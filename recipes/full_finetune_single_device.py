"""Full fine-tuning of a dense transformer on one device, with an optimizer that may live off it.

Features, each behind the configuration key of that name:

- ``optimizer``: any optimizer class by its dotted path. ``offload.OffloadOptimizer`` keeps states, gradients
  and the update's work off the device; ``torch.optim.*``, ``bitsandbytes.optim.*``, ``torchao.optim.*`` and
  ``offload.TorchAOCPUOffloadOptimizer`` are its peers, for comparison on the same run.
- ``gradient_accumulation_steps`` and ``clip_grad_norm``: exact for every optimizer. The loss is divided by the
  labels of all micro-batches of a step before its first backward.
- ``enable_activation_checkpointing``, ``enable_activation_offloading``, ``compile``: memory and speed.
- ``loss``: fused head and cross-entropy, chunked, or plain.
- ``dataset``: one component or a list of them, packed or padded.
- ``evaluation``: loss on held-out data every N steps.
- ``save_every_n_steps``, ``keep_last_n``, ``resume_from_checkpoint``: whole checkpoints in Hugging Face's
  format; a resumed run goes on in the middle of an epoch as if it had not stopped.
- ``metric_logger``: wandb mirrors ``metrics.jsonl`` in ``output_dir``, which has one line per log.
- ``profiler``: torch.profiler traces.

Stops with status 2 and one line for what the user can mend: an unknown key, a missing file, a device that is
not there, memory that runs out, a loss that is not finite. SIGINT and SIGTERM finish the step, save, and end
with status 130 and 143.

    tune run full_finetune_single_device --config llama2_7b_offload optimizer.lr=1e-5
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from offload.errors import UserError
from offload.training import torchao_shim
from offload.training.checkpoint import CheckpointManager, Loaded
from offload.training.config import instantiate
from offload.training.data import Batches, build_batches
from offload.training.device import find_device, find_dtype, random_state, set_random_state
from offload.training.interrupt import Interrupt
from offload.training.launch import run_recipe
from offload.training.loss import SummedLoss
from offload.training.model import (
    build_model,
    compile_layers,
    load_weights,
    num_parameters,
    prepare_activations,
)
from offload.training.progress import say
from offload.training.reporting import Reporter
from offload.training.settings import TrainSettings
from offload.training.step import (
    build_profiler,
    build_scheduler,
    check_finite,
    check_training,
    clip_gradients,
    count_steps,
    evaluate,
    forward_backward,
    resume_notes,
    step_scheduler,
)

torchao_shim.install()

from torchtune.training import set_seed  # noqa: E402 - torchtune needs the shim


@dataclass(kw_only=True)
class Settings(TrainSettings):
    """Everything that this recipe reads from its configuration."""


class FullFinetuneRecipeSingleDevice:
    """Full fine-tuning on one device."""

    Settings = Settings

    def __init__(self, settings: Settings, cfg: DictConfig) -> None:
        self.settings, self.cfg = settings, cfg
        self.output_dir = Path(settings.output_dir)
        self.epoch = 0
        self.step_in_epoch = 0
        self.global_step = 0
        self.saved: Path | None = None
        self.reporter: Reporter | None = None
        self.is_profiling = False

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Everything that can fail before the first step; the cheap and the likely first."""
        settings = self.settings
        self.device, reason = find_device(settings.device)
        self.dtype = find_dtype(settings.dtype, self.device)
        say(reason)
        self.checkpoints = CheckpointManager(settings.checkpointer, self.output_dir, keep_last_n=settings.keep_last_n)
        resumed = self._find_checkpoint()
        state = resumed.recipe_state if resumed else {}
        self.seed = set_seed(
            seed=state.get("seed", settings.seed) if settings.seed is None else settings.seed,
            debug_mode=settings.cudnn_deterministic_mode,
        )
        self.epoch, self.step_in_epoch = state.get("epoch", 0), state.get("step_in_epoch", 0)
        self.global_step = state.get("global_step", 0)

        self._setup_data()
        self._setup_model(resumed)
        self._setup_optimizer(state)
        self.profiler = build_profiler(settings.profiler)
        self.reporter = Reporter(
            self.cfg,
            settings.metric_logger,
            output_dir=self.output_dir,
            device=self.device,
            model=self.model,
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            resume_step=self.global_step if resumed else None,
            tokens_seen=state.get("tokens_seen", 0),
        )
        if resumed:
            set_random_state(state["random"], self.device)
            for note in resume_notes(state["config"], self.cfg):
                say(f"note: {note}")

    def _find_checkpoint(self) -> Loaded | None:
        if not self.settings.resume_from_checkpoint:
            return None
        path = self.checkpoints.latest()
        if path is None:
            raise UserError(
                f"resume_from_checkpoint: there is no whole checkpoint in {self.output_dir}; give the output_dir of "
                "the run to go on with, or start anew with resume_from_checkpoint=False"
            )
        say(f"resuming from {path}")
        return self.checkpoints.load(path)

    def _setup_data(self) -> None:
        settings = self.settings
        self.tokenizer = instantiate(settings.tokenizer)
        self.loss_fn = instantiate(settings.loss)
        common = {
            "collate_fn": settings.collate_fn,
            "ignore_index": getattr(self.loss_fn, "ignore_index", -100),
            "seed": self.seed,
            "num_workers": settings.num_workers,
        }
        self.batches = build_batches(
            settings.dataset,
            self.tokenizer,
            key="dataset",
            batch_size=settings.batch_size,
            shuffle=settings.shuffle,
            **common,
        )
        self.held_out: Batches | None = None
        if settings.evaluation is not None:
            self.held_out = build_batches(
                settings.evaluation.dataset,
                self.tokenizer,
                key="evaluation.dataset",
                batch_size=settings.evaluation.batch_size or settings.batch_size,
                shuffle=False,
                drop_last=False,
                **common,
            )
        self.steps_per_epoch = count_steps(
            batches_per_epoch=len(self.batches),
            num_samples=self.batches.num_samples,
            batch_size=settings.batch_size,
            accumulation=settings.gradient_accumulation_steps,
            max_steps=settings.max_steps_per_epoch,
        )
        if self.step_in_epoch >= self.steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
        left = (settings.epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch
        if left <= 0:
            raise UserError(
                f"epochs: the checkpoint is at step {self.global_step}, the end of this run; nothing is left to train. "
                "Raise epochs or max_steps_per_epoch"
            )
        self.total_steps = self.global_step + left

    def _setup_model(self, resumed: Loaded | None) -> None:
        settings = self.settings
        self.model = build_model(settings.model, device=self.device, dtype=self.dtype)
        weights = resumed.model if resumed else self.checkpoints.load_base()
        if weights is None:
            raise UserError(
                "resume_from_checkpoint: the checkpoint holds an adapter to go on with; resume it with "
                "lora_finetune_single_device, or give this run an output_dir of its own"
            )
        load_weights(self.model, weights, source=str(settings.checkpointer.checkpoint_dir))
        del weights
        if settings.compile:
            compile_layers(self.model)
        self.activations = prepare_activations(
            self.model,
            checkpointing=settings.enable_activation_checkpointing,
            offloading=settings.enable_activation_offloading,
            device=self.device,
        )
        self.loss = SummedLoss(self.model, self.loss_fn, compile=settings.compile)
        self.model.train()
        count, _ = num_parameters(self.model)
        say(f"model: {count / 1e6:,.1f} M parameters in {settings.dtype} on {self.device}, all trained")

    def _setup_optimizer(self, state: dict[str, Any]) -> None:
        settings = self.settings
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = instantiate(settings.optimizer, self.params)
        check_training(
            self.optimizer,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            clip_grad_norm=settings.clip_grad_norm,
        )
        self.lr_scheduler = build_scheduler(settings.lr_scheduler, self.optimizer, self.total_steps)
        if state:
            self.optimizer.load_state_dict(state["optimizer"])
            if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    # -------------------------------------------------------------------------------------------- training

    def train(self) -> int:
        """The loop; returns the exit status."""
        settings, reporter = self.settings, self.reporter
        assert reporter is not None
        timer = reporter.timer
        accumulation = settings.gradient_accumulation_steps
        unlogged_loss, unlogged_steps = torch.zeros((), device=self.device), 0
        reporter.start()
        if self.profiler is not None:
            self.profiler.start()
            self.is_profiling = True
        with Interrupt() as interrupt:
            interrupted = False
            while self.epoch < settings.epochs and not interrupted:
                batches = self.batches.epoch(self.epoch, start=self.step_in_epoch * accumulation)
                while self.step_in_epoch < self.steps_per_epoch and not interrupted:
                    with timer("data"):
                        micro_batches = [next(batches).to(self.device) for _ in range(accumulation)]
                    reporter.count(micro_batches)

                    with timer("forward_backward"):
                        loss = forward_backward(self.loss, micro_batches, self.optimizer, self.activations)
                    self.global_step += 1
                    self.step_in_epoch += 1
                    unlogged_loss, unlogged_steps = unlogged_loss + loss, unlogged_steps + 1
                    should_evaluate = self._is_due(settings.evaluation and settings.evaluation.every_n_steps)
                    should_log = self._is_due(settings.log_every_n_steps) or should_evaluate

                    lr = float(self.optimizer.param_groups[0]["lr"])
                    with timer("optimizer"):
                        grad_norm = clip_gradients(
                            self.optimizer, self.params, settings.clip_grad_norm, measure=should_log
                        )
                        self.optimizer.step()
                        self.optimizer.zero_grad(set_to_none=True)
                        step_scheduler(self.lr_scheduler, loss)

                    interrupted = interrupt.signum is not None
                    is_last = self.global_step == self.total_steps
                    should_save = (
                        is_last
                        or interrupted
                        or self._is_due(settings.save_every_n_steps)
                        or (settings.save_every_n_steps is None and self.step_in_epoch == self.steps_per_epoch)
                    )
                    if should_log or should_save:
                        mean_loss = unlogged_loss.item() / unlogged_steps
                        first = self.global_step - unlogged_steps + 1
                        check_finite(mean_loss, first, self.global_step, lr)
                        values = {"loss": mean_loss, "lr": lr, "grad_norm": grad_norm}
                        if should_evaluate or (is_last and self.held_out is not None):
                            with timer("evaluation"):
                                values["evaluation/loss"] = self._evaluate()
                        reporter.log(self.global_step, values)
                        unlogged_loss, unlogged_steps = torch.zeros_like(unlogged_loss), 0
                    else:
                        reporter.advance(self.global_step)
                    if should_save:
                        with timer("checkpoint"):
                            self.saved = self.save_checkpoint()
                    if self.profiler is not None:
                        self.profiler.step()
                if not interrupted:
                    self.epoch, self.step_in_epoch = self.epoch + 1, 0
            return interrupt.exit_code if interrupted else 0

    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.global_step % every == 0

    def _evaluate(self) -> float:
        assert self.held_out is not None and self.settings.evaluation is not None
        batches = self.held_out.epoch(0)
        limit = self.settings.evaluation.max_batches
        if limit is not None:
            batches = (batch for _, batch in zip(range(limit), batches, strict=False))
        return evaluate(self.loss, self.model, batches, self.device)

    # ----------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> Path:
        """Save the model and all that a resume needs; returns the folder."""
        return self.checkpoints.save(self.global_step, model=self.model.state_dict(), recipe_state=self.recipe_state())

    def recipe_state(self) -> dict[str, Any]:
        """What a resume needs beside the model."""
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "global_step": self.global_step,
            "tokens_seen": self.reporter.tokens.tokens_seen if self.reporter else 0,
            "seed": self.seed,
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "random": random_state(self.device),
            "config": OmegaConf.to_container(self.cfg, resolve=True),
        }

    def cleanup(self, exit_code: int) -> None:
        """Close the logs, whatever happened."""
        if self.is_profiling:
            self.profiler.stop()
        if self.reporter is not None:
            self.reporter.close(exit_code, self.saved)


if __name__ == "__main__":
    sys.exit(run_recipe(FullFinetuneRecipeSingleDevice))
