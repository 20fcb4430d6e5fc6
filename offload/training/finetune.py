"""What the fine-tuning recipes share around their loops: data, optimizer, resume, evaluation, reports.

A recipe derives from :class:`FinetuneRecipe` and has what is its own in plain sight: its settings, how it builds
its model, the loop, and what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from offload.checkpoints.beside import Beside
from offload.checkpoints.manager import CheckpointManager, Loaded, output_folder
from offload.checkpoints.output_lock import OutputLock
from offload.config.loading import instantiate
from offload.config.secrets import resolved_and_masked
from offload.data.batches import Batch
from offload.data.labels import IGNORE_INDEX
from offload.data.tokenizers import build_tokenizer
from offload.device import find_device, find_dtype, is_here, random_state, set_random_state
from offload.distributed.sharding import reshard
from offload.distributed.world import current
from offload.engine.units import clean_name
from offload.errors import NotFiniteError, UserError
from offload.host_memory import oom_kills, use_of_this_process
from offload.metrics.lines import say
from offload.metrics.run_record import read_run, remove_leftover
from offload.models.protocol import CausalLM
from offload.models.size import num_elements
from offload.models.source import find_source
from offload.plan.budget import Sharding
from offload.training import hindsight
from offload.training.activations import prepare_activations
from offload.training.advice import of_host_memory
from offload.training.best_evaluation import BestEvaluation
from offload.training.data_sets import build_data_sets, check_length
from offload.training.launch import NothingToDo
from offload.training.loss import SummedLoss
from offload.training.optimizer import check_resumed, evaluation_weights, set_mode
from offload.training.out_of_memory import record_for_snapshot, tell_of_a_kill
from offload.training.page_locking import PageLocking
from offload.training.placement import measured_speeds
from offload.training.preflight import check_run
from offload.training.profiler import build_profiler
from offload.training.reporting import Reporter
from offload.training.restart import Restart, find_restart, note_report
from offload.training.resume import choose_checkpoint, put_back, put_back_random
from offload.training.resume_changes import check_changes, resume_notes, warm_up_note
from offload.training.saving import Saving
from offload.training.seed import draw_apart, draw_seed, set_seed
from offload.training.settings import AUTO, TrainSettings
from offload.training.step import (
    build_scheduler,
    check_training,
    check_weights,
    count_steps,
    evaluate,
    next_micro_batches,
)


class FinetuneRecipe:
    """State of a run and the parts of its set-up that do not depend on what is trained.

    Attributes:
        epoch: epochs done.
        step_in_epoch: optimizer steps done in the current epoch.
        global_step: optimizer steps done in the run.
        total_steps: optimizer steps of the whole run, those before a resume included.
        saving: the checkpoints that it saves.
        is_between_steps: the model, the optimizer and the counts above agree: they can be saved.
        resumed_from: the checkpoint that this process began with.
        resumed_config: the configuration of the run that saved it.
        restart: what was left by processes that torchrun started before these.
        world: the processes that train this model together.
        memory_before: bytes of the host that this process held before there was a model.
    """

    parts: CausalLM
    model: nn.Module
    loss: SummedLoss
    activations: contextlib.AbstractContextManager[Any]
    optimizer: torch.optim.Optimizer
    saving: Saving

    def __init__(self, settings: TrainSettings, cfg: DictConfig) -> None:
        self.settings, self.cfg = settings, cfg
        self.world = current()
        self.output_dir = output_folder(settings.output_dir)
        self.epoch = 0
        self.step_in_epoch = 0
        self.global_step = 0
        self.is_between_steps = True
        self.resumed_from: Path | None = None
        self.resumed_config: dict[str, Any] | None = None
        self.restart: Restart | None = None
        self.lock: OutputLock | None = None
        self.reporter: Reporter | None = None
        self.is_profiling = False
        self._fails_everywhere = False
        self.memory_before = use_of_this_process().resident
        self.page_locking = PageLocking(self)

    adapts: ClassVar[bool] = False
    """An adapter trains, and not the whole model."""

    @classmethod
    def check(cls, settings: TrainSettings, *, notes: list[str] | None = None) -> tuple[torch.device, torch.dtype, str]:
        """Refuse what can be refused before anything is read; ``tune validate`` does this much.

        Args:
            settings: that the schema accepts.
            notes: where given, the run will be on another machine, which may have other devices and files: it gets a
                line about each that is not here.

        Returns:
            (the device, the parameters' dtype, why this device)

        Raises:
            UserError: names the key, and the way out.
        """
        device, reason = find_device(settings.device, elsewhere=notes is not None)
        if notes is not None and not is_here(device):
            notes.append(reason)
        dtype = find_dtype(settings.dtype, device)
        check_run(settings, device, dtype, adapts=cls.adapts, notes=notes)
        return device, dtype, reason

    def setup_run(self) -> Loaded | None:
        """Device, precision, tokenizer, checkpoints, seed; returns the checkpoint to go on from, if there is one."""
        settings = self.settings
        with self.world.together():
            device, self.dtype, reason = self.check(settings)
            self.device = self.world.device(device)
            self.memory_before = use_of_this_process().resident
            say(reason + (f", {self.world.size} processes" if self.world.size > 1 else ""))
            self.tokenizer = build_tokenizer(settings.tokenizer)
            self.source = find_source(
                settings.model,
                settings.checkpointer,
                getattr(settings, "adapter", None),
                self.tokenizer,
                self.loading_device,
                self.dtype,
                say,
            )
            checkpoints = CheckpointManager(self.source.format, self.output_dir, keep_last_n=settings.keep_last_n)
            self.saving = Saving(checkpoints, settings, self.world, adapts=self.adapts)
        if settings.memory_snapshot and not record_for_snapshot(self.device):
            say(f"note: memory_snapshot: {self.device.type} has none, only CUDA's allocator records")
        self.world.from_main(self._take_folder)
        resumed = self._find_checkpoint(checkpoints)
        state = resumed.recipe_state if resumed else {}
        seed = state.get("seed") if settings.seed is None else settings.seed
        seed = self.world.from_main(lambda: draw_seed() if seed is None else seed)
        self.seed = set_seed(seed, settings.cudnn_deterministic_mode)
        say(f"seed: {self.seed}" + (", drawn for this run" if settings.seed is None and not resumed else ""))
        self.epoch, self.step_in_epoch = state.get("epoch", 0), state.get("step_in_epoch", 0)
        self.global_step = self.saving.newest_step = state.get("global_step", 0)
        self.best = BestEvaluation(settings.evaluation.early_stopping_patience if settings.evaluation else None)
        if state.get("best_evaluation") is not None:
            self.best.load_state_dict(state["best_evaluation"])
        self.saving.keep_best(self.best.step)
        if self.best.is_exhausted:
            raise NothingToDo(
                f"nothing is left to train: {self.best}. To go on from {self.resumed_from}, raise "
                "evaluation.early_stopping_patience"
            )
        return resumed

    @property
    def loading_device(self) -> torch.device:
        """Where a model is put that is whole."""
        return self.device

    def _take_folder(self) -> None:
        self.lock = OutputLock(self.output_dir)
        remove_leftover(self.output_dir)
        if (line := tell_of_a_kill(read_run(self.output_dir), oom_kills())) is not None:
            say(f"warning: {line}")
            for each in of_host_memory(self):
                say(each)

    def _find_checkpoint(self, checkpoints: CheckpointManager) -> Loaded | None:
        """The checkpoint to go on from."""
        self.restart = find_restart(self.world, self.output_dir)
        found = choose_checkpoint(checkpoints, self.settings, self.restart)
        if self.restart is not None:
            say(self.restart.line(None if found is None else found[0]))
            self.cfg.resume_from_checkpoint = AUTO if self.restart.has_reported else False
        if found is None:
            if self.settings.resume_from_checkpoint == AUTO and not self.restart:
                self.cfg.resume_from_checkpoint = False  # what is recorded, and whether wandb continues a run
            return None
        self.resumed_from, loaded = found
        self.resumed_config = loaded.recipe_state["config"]
        if self.restart is None:
            say(f"resuming from {self.resumed_from}")
        return loaded

    def setup_data(self) -> None:
        """Loss, data sets, and how many steps they make."""
        with self.world.together():
            self._setup_data()

    def _setup_data(self) -> None:
        settings = self.settings
        self.loss_fn = instantiate(settings.loss)
        self.batches, self.held_out = build_data_sets(
            settings,
            self.tokenizer,
            ignore_index=getattr(self.loss_fn, "ignore_index", IGNORE_INDEX),
            seed=self.seed,
            device=self.device,
            masks=self.source.masks_documents,
            world=self.world,
            epoch=self.epoch,
            step_in_epoch=self.step_in_epoch,
        )
        self.memory_before = use_of_this_process().resident
        self.steps_per_epoch = count_steps(
            batches_per_epoch=len(self.batches),
            num_samples=self.batches.num_samples,
            batch_size=settings.batch_size,
            accumulation=settings.gradient_accumulation_steps,
            max_steps=settings.max_steps_per_epoch,
            processes=self.world.size,
        )
        if self.step_in_epoch >= self.steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0
        left = (settings.epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch
        if left == 0:
            raise NothingToDo(
                f"nothing is left to train: the run ended with step {self.global_step}, and {self.resumed_from} holds "
                "its result. To go on, raise epochs or max_steps_per_epoch"
            )
        if left < 0:
            raise UserError(
                f"epochs: the checkpoint is at step {self.global_step}, beyond the end of this run; nothing is left to "
                "train. Raise epochs or max_steps_per_epoch"
            )
        self.total_steps = self.global_step + left
        if self.resumed_config is not None:
            assert self.resumed_from is not None
            check_changes(self.resumed_config, self.cfg, checkpoint=self.resumed_from, step_in_epoch=self.step_in_epoch)

    def prepare_model(self, parts: CausalLM) -> None:
        """What happens to every model that has its weights: compilation, activations, the loss."""
        settings = self.settings
        self.parts, self.model = parts, parts.module
        check_length(self.batches, self.held_out, parts.max_seq_len)
        is_packed = any(batches.is_packed for batches in (self.batches, self.held_out) if batches is not None)
        has_weights = not next(self.model.parameters()).is_meta  # else it gets them when it is divided
        if is_packed and has_weights:
            parts.check_packs()
        if settings.compile:
            parts.compile_layers()
        self.activations = prepare_activations(
            parts,
            checkpointing=settings.enable_activation_checkpointing,
            offloading=settings.enable_activation_offloading,
            device=self.device,
            divide=self.divide,
        )
        if is_packed and not has_weights:
            parts.check_packs()
            reshard(self.model)
        self.loss = SummedLoss(parts, self.loss_fn, compile=settings.compile)
        self.model.train()
        sizes = [(num_elements(p), p.requires_grad) for p in self.model.parameters()]
        numbers = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        count, trained = (f"{n / 1e6:,.1f} M" if n >= 1e5 else f"{n:,}" for n in numbers)
        share = "all trained" if count == trained else f"{trained} trained"
        say(f"model: {count} parameters in {settings.dtype} on {self.device}, {share}")

    def divide(self) -> None:
        """Leave each process its part of the model's parameters; one process has all of them."""

    def setup_optimizer(self, resumed: Loaded | None) -> None:
        """Optimizer and schedule over what is trained, with the state of the checkpoint."""
        settings = self.settings
        named = [(clean_name(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.params = [param for _, param in named]
        speeds = measured_speeds(settings.optimizer, self.device, self.dtype)
        with self.page_locking.watched():
            self.optimizer = instantiate(settings.optimizer, named, **speeds)
        # An optimizer that works on while the next step begins lets each layer's forward wait for its own update.
        if hasattr(self.optimizer, "attach"):
            self.optimizer.attach(self.model)
        check_training(
            self.optimizer,
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
            clip_grad_norm=settings.clip_grad_norm,
        )
        self.lr_scheduler = build_scheduler(settings.lr_scheduler, self.optimizer, self.total_steps)
        if (warning := warm_up_note(settings.lr_scheduler, self.total_steps)) is not None:
            say(f"warning: {warning}")
        with self.page_locking.watched():
            if resumed:
                state = resumed.recipe_state
                check_resumed(state["config"], self.cfg, self.optimizer)
                assert self.resumed_from is not None
                put_back(state, self.optimizer, self.lr_scheduler, self.resumed_from)
            set_mode(self.optimizer, "train")
            self.saving.prepare(self.optimizer)

    def setup_reporting(self, resumed: Loaded | None) -> None:
        """Profiler, metrics and progress; last, the random state of the checkpoint."""
        settings = self.settings
        state = resumed.recipe_state if resumed else {}
        self.world.from_main(
            lambda: self.saving.plan_disk(
                self.model,
                self.optimizer,
                self.dtype,
                done_steps=self.global_step,
                total_steps=self.total_steps,
                epochs_left=settings.epochs - self.epoch,
            )
        )
        self.profiler: Any = build_profiler(settings.profiler, self.total_steps - self.global_step)
        self.reporter = Reporter(
            self.cfg,
            settings.metric_logger,
            output_dir=self.output_dir,
            device=self.device,
            size=self.parts.size(),
            optimizer=self.optimizer,
            total_steps=self.total_steps,
            resume_step=self.global_step if resumed or (self.restart and self.restart.has_reported) else None,
            tokens_seen=state.get("tokens_seen", 0),
            data=self.batches.facts,
            last_checkpoint=lambda: self.saving.newest or self.resumed_from,
            world=self.world,
        )
        note_report(self.world)
        if resumed:
            assert self.resumed_from is not None
            put_back_random(state, self.device, self.resumed_from, self.world)
            for note in resume_notes(
                state["config"],
                self.cfg,
                state,
                total_steps=self.total_steps,
                has_adapter=resumed.adapter is not None,
                processes=self.world.size,
            ):
                say(f"note: {note}")
            if state.get("num_rows", self.batches.num_rows) != self.batches.num_rows:
                say(
                    f"note: dataset: {state['num_rows']} rows or packs in the checkpoint's run, "
                    f"{self.batches.num_rows} now: the order of what follows is another, some of it was seen"
                )
        else:
            draw_apart(self.seed, self.world.rank)

    def check_weights(self) -> None:
        """UserError where a trained weight is NaN or infinite: before it would be saved over good ones."""
        check_weights(self.model, self.global_step, self.saving.newest or self.resumed_from, self.world)

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps happens after this one; never for None."""
        return every is not None and self.global_step % every == 0

    def evaluate(self) -> float:
        """Mean loss per label on the held-out data."""
        assert self.held_out is not None and self.settings.evaluation is not None
        batches = self.held_out.epoch(0)
        limit = self.settings.evaluation.max_batches
        if limit is not None:
            batches = (batch for _, batch in zip(range(limit), batches, strict=False))
        with evaluation_weights(self.optimizer):
            return evaluate(self.loss, self.model, batches, self.device, self.world)

    def judge(self, loss: float) -> bool:
        """Hold an evaluation against the best; whether a checkpoint is due, because it is kept or the run stops."""
        is_best = self.best.observe(self.global_step, loss)
        self.saving.keep_best(self.best.step)
        if self.best.is_exhausted and self.global_step < self.total_steps:
            say(f"stopping at step {self.global_step}: {self.best}")
        return self.best.is_exhausted or (is_best and self.saving.keeps_best)

    def synchronize_optimizer(self) -> None:
        """Wait for updates that are still under way, before parameters are read outside of the model's forward."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()

    def recipe_state(self) -> dict[str, Any]:
        """What a resume needs beside the model."""
        random = random_state(self.device)
        return {
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "global_step": self.global_step,
            "total_steps": self.total_steps,
            "tokens_seen": self.reporter.tokens.tokens_seen() if self.reporter else 0,
            "seed": self.seed,
            "num_rows": self.batches.num_rows,
            "processes": self.world.size,
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "random": random,
            **({} if self.world.size == 1 else {"random_of_ranks": self.world.gathered(random)}),
            "best_evaluation": self.best.state_dict(),
            "config": resolved_and_masked(self.cfg),
        }

    def save_checkpoint(self) -> Path | Beside:
        """Save the model and all that a resume needs, with :meth:`write_checkpoint`; returns what that returns."""
        raise NotImplementedError

    def write_checkpoint(
        self,
        model: Mapping[str, Tensor] | None,
        *,
        adapter: Mapping[str, Tensor] | None = None,
        adapter_config: Mapping[str, Any] | None = None,
    ) -> Path | Beside:
        """Write a checkpoint, or begin to.

        Args:
            model: its weights under its names; None for an adapter alone.
            adapter: its tensors.
            adapter_config: fields of peft's configuration.

        Returns:
            The folder, or with ``enable_async_checkpointing`` what writes it.
        """
        return self.saving.write(
            self.global_step,
            self.optimizer,
            model=model,
            adapter=adapter,
            adapter_config=adapter_config,
            recipe_state=self.recipe_state(),
        )

    def save(self) -> None:
        """Save a checkpoint of the steps done, or begin to when the one before is whole."""
        self.saving.finish()
        self.is_between_steps = False
        self.saving.note(self.save_checkpoint(), self.global_step)
        self.is_between_steps = True

    def start(self) -> None:
        """Training begins: set-up time does not count."""
        assert self.reporter is not None
        self.reporter.start()
        if self.profiler is not None:
            self.profiler.start()
            self.is_profiling = True

    def next_micro_batches(self, batches: Iterator[Batch]) -> tuple[list[Batch], int]:
        """A step's micro-batches, and the labels that count in those of all processes."""
        try:
            return next_micro_batches(batches, self.settings.gradient_accumulation_steps, self.device, self.world)
        except Exception:
            self._fails_everywhere = not self.world.is_broken()
            raise

    def begin_step(self) -> None:
        """Count the step that begins, and note what it draws from, for as long as it can be undone."""
        # What updates in backward is in the middle of it as soon as backward begins.
        updates_early = getattr(self.optimizer, "update_in_backward", False)
        self._random_before = None if updates_early else random_state(self.device)
        self.is_between_steps = False
        self.global_step, self.step_in_epoch = self.global_step + 1, self.step_in_epoch + 1

    def begin_update(self) -> None:
        """From here the step changes what is saved."""
        self._random_before = None

    @property
    def is_evaluated(self) -> bool:
        """Whether an evaluation is due after this step, whichever is the last."""
        evaluation = self.settings.evaluation
        return evaluation is not None and self.is_due(evaluation.every_n_steps)

    @property
    def is_logged(self) -> bool:
        """Whether a line of metrics is due after this step."""
        return self.is_due(self.settings.log_every_n_steps) or self.is_evaluated

    def end_step(self, grad_norm: Tensor | None, *, interrupted: bool) -> bool:
        """The step is done, for all that is saved: evaluate, log and save, as far as it is time for it.

        Args:
            grad_norm: before clipping; None where it was not asked for.
            interrupted: the run was told to stop.

        Returns:
            Whether the run stops.
        """
        reporter = self.reporter
        assert reporter is not None
        self.is_between_steps = True
        self.page_locking.tell()
        self.saving.look()
        is_last = self.global_step == self.total_steps
        ends_epoch = self.step_in_epoch == self.steps_per_epoch
        should_save = is_last or interrupted or self.saving.is_due(self.global_step, ends_epoch=ends_epoch)
        # On an accelerator nothing here waits for the step: its values are read when the next is queued.
        if self.is_logged or should_save:
            values: dict[str, Any] = {"grad_norm": grad_norm}
            if self.is_evaluated or (is_last and self.held_out is not None):
                reporter.flush()  # evaluating waits for the device anyway
                with reporter.timer("evaluation"):
                    values["evaluation/loss"] = self.evaluate()
                should_save |= self.judge(values["evaluation/loss"])
            reporter.log(self.global_step, values)
        else:
            reporter.advance(self.global_step)
        if should_save:
            reporter.flush()  # stops the run if a loss until here is not finite
            with reporter.timer("checkpoint"):
                self.save()
                if is_last or interrupted or self.best.is_exhausted:
                    self.saving.finish()
        if self.profiler is not None:
            with reporter.timer("profile"):  # a trace takes longer to write than a step to train
                self.profiler.step()
        return interrupted or self.best.is_exhausted

    def _undo_step(self) -> None:
        """Take back a step that has computed gradients and no more."""
        if self._random_before is not None:
            self.global_step, self.step_in_epoch = self.global_step - 1, self.step_in_epoch - 1
            set_random_state(self._random_before, self.device)
            self.is_between_steps = True

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """Around the loop: a failure that leaves the state whole saves the steps done before it is told.

        That is one of data, a log or an evaluation, between two steps; and memory that runs out in forward or
        backward, unless the optimizer updates in backward.
        """
        try:
            with self.page_locking.watched():
                yield
        except NotFiniteError:
            self.saving.finish_before_stopping()
            raise
        except Exception:
            self.saving.finish_before_stopping()
            self._undo_step()
            if self.world.size > 1 and not self._fails_everywhere:
                raise  # the others are in the middle of something
            if self.is_between_steps and self.global_step > self.saving.newest_step:
                with self.saving.last(self.global_step):
                    if self.reporter is not None:
                        self.reporter.flush()  # a loss that is not finite must not be saved
                    self.save()
            raise

    def cleanup(self, exit_code: int) -> None:
        """Close the logs, whatever happened."""
        with contextlib.ExitStack() as last:
            if self.lock is not None:
                last.callback(self.lock.release)
            if self.reporter is not None:
                last.callback(self._close_reporter, self.reporter, exit_code)
            if self.is_profiling:
                self.profiler.stop()

    def _close_reporter(self, reporter: Reporter, exit_code: int) -> None:
        is_compared = exit_code == 0 and self._is_compared(reporter)
        expect = self._expect if is_compared else None
        reporter.close(exit_code, self.saving.newest, best=self.saving.best, expect=expect)

    @property
    def sharding(self) -> Sharding:
        """How the model is divided among processes, for the planner."""
        return Sharding(1)

    def _is_compared(self, reporter: Reporter) -> bool:
        asked = self.settings.compare_with_plan
        timer = reporter.timer
        trained = sum(spent for phase, spent in timer.totals.items() if phase not in timer.EXCLUDED)
        return trained >= hindsight.LEAST_SECONDS if asked is None else asked

    def _expect(self, measured: Mapping[str, float]) -> hindsight.Expected:
        settings = self.settings
        sequences = settings.batch_size * settings.gradient_accumulation_steps * self.world.size
        return hindsight.expect(
            settings,
            self.device,
            self.dtype,
            adapts=self.adapts,
            memory_before=self.memory_before,
            sharding=self.sharding,
            world=self.world,
            tokens_per_sequence=measured["tokens"] / (measured["steps"] * sequences),
        )
