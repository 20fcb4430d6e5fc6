"""Everything a run tells while it trains: metrics, progress bar, summary."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from offload.config.loading import instantiate
from offload.config.secrets import resolved_and_masked
from offload.data.batches import Batch
from offload.distributed.world import World
from offload.errors import UserError
from offload.metrics.environment import environment
from offload.metrics.flops import flops_per_token, mfu, peak_flops
from offload.metrics.late import LateReader, LateValues
from offload.metrics.lines import say
from offload.metrics.log import MetricLog, read_metrics
from offload.metrics.memory import GIB, peak_memory, peaks_of_all, reset_peak
from offload.metrics.optimizer_label import label_of, optimizer_facts
from offload.metrics.progress import Progress, from_here, summary
from offload.metrics.run_record import RunRecord
from offload.metrics.run_summary import summarise
from offload.metrics.timing import Lap, StepTimer, Throughput, TokenCount
from offload.metrics.wandb_logger import WandBLogger
from offload.models.size import Size
from offload.training.hindsight import Expected
from offload.training.step import check_finite


@dataclass
class _Line:
    """A line of metrics whose step is queued.

    Attributes:
        step: what it is about.
        num_steps: steps since the line before, this one included.
        values: ``loss``, their sum; ``lr``; and what the recipe measured.
        lap: their time.
        tokens: their tokens.
        sample_length: mean tokens of their samples.
        memory: the memory metrics.
    """

    step: int
    num_steps: int
    values: LateValues
    lap: Lap
    tokens: TokenCount
    sample_length: float
    memory: dict[str, float]


@dataclass
class _Written:
    """What the main process writes."""

    log: MetricLog
    mirror: Any
    record: RunRecord
    progress: Progress


class Reporter:
    """Collects what a run measures and writes it where it belongs.

    On an accelerator the host queues a step while the device still works on the one before. So :meth:`log` only
    queues: the values are copied behind the step that computes them, and its line is written when the next step is
    queued, by when the device has work to go on with. On the CPU a line is written at once.

    Each of several processes has one, and all make the same calls; the main one writes. Losses are given as sums over
    the processes; tokens are added up here, and of memory the most and the least of a process are told.

    Args:
        cfg: the whole configuration; goes to the metric logger.
        metric_logger: its section, or None.
        output_dir: folder of the run.
        device: the device that trains.
        size: of the model, for the FLOPs of a token; None where nobody asks for MFU.
        optimizer: asked for its page-locked memory, if it reports it.
        total_steps: optimizer steps of the whole run.
        resume_step: steps done before this process, None for a fresh run.
        tokens_seen: tokens seen before this process.
        data: counts of the rows that were read before training, for ``run.json`` and the metric logger.
        last_checkpoint: tells the last checkpoint that is good, for advice.
        world: the processes that train.
    """

    def __init__(
        self,
        cfg: DictConfig,
        metric_logger: DictConfig | None,
        *,
        output_dir: Path,
        device: torch.device,
        size: Size | None,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        resume_step: int | None,
        tokens_seen: int,
        data: Mapping[str, int] | None = None,
        last_checkpoint: Callable[[], Path | None] = lambda: None,
        world: World | None = None,
    ) -> None:
        self._last_checkpoint = last_checkpoint
        self._world = World() if world is None else world
        self.timer = StepTimer(device)
        self.tokens = Throughput(tokens_seen, self._world)
        self._reader = LateReader(device)
        self._pending: deque[_Line] = deque()
        self._zero = torch.zeros((), device=device)
        self._loss, self._num_steps = self._zero, 0
        self._lr: float | Tensor = 0.0
        self._num_lines = 0
        self._pinned_bytes = 0
        self._device, self._optimizer = device, optimizer
        self._output_dir = output_dir
        self._peak = peak_flops(device)
        self._size = size
        self._length_sum = 0.0
        self._batches = 0
        self._started = time.perf_counter()
        self._written: _Written | None = None
        if self._world.is_main:
            self._written = self._open(cfg, metric_logger, dict(data or {}), total_steps, resume_step)
        reset_peak(device)

    def _open(
        self,
        cfg: DictConfig,
        metric_logger: DictConfig | None,
        data: dict[str, int],
        total_steps: int,
        resume_step: int | None,
    ) -> _Written:
        mirror = instantiate(metric_logger)
        log = MetricLog(self._output_dir, [] if mirror is None else [mirror], resume_step=resume_step)
        facts = optimizer_facts(self._optimizer, cfg.get("optimizer"))
        label = label_of(facts)
        config = OmegaConf.create(resolved_and_masked(cfg))
        log.log_config(config)
        log.log_facts({"label": label, "label_parts": facts, "data": data})
        record = RunRecord(
            self._output_dir,
            {
                "label": label,
                "optimizer": facts,
                "data": data,
                "config": OmegaConf.to_container(config),
                "environment": environment(str(self._device)) | self._processes(),
            },
            resume_step=resume_step,
        )
        return _Written(log, mirror, record, Progress(total_steps, initial=resume_step or 0))

    def _processes(self) -> dict[str, int]:
        return {"processes": self._world.size} if self._world.size > 1 else {}

    def start(self) -> None:
        """Training begins: set-up time does not count."""
        self.timer.restart()

    def count(self, batches: list[Batch], loss: Tensor, lr: float | Tensor) -> None:
        """Count a step that is queued.

        Args:
            batches: its micro-batches.
            loss: 0-dim, on the device.
            lr: what it updates with.
        """
        for batch in batches:
            self.tokens.add(batch.num_tokens, batch.num_labels)
            self._length_sum += batch.sample_length
            self._batches += 1
        self._loss, self._num_steps = self._loss + loss, self._num_steps + 1
        self._lr = lr.detach().clone() if isinstance(lr, Tensor) else lr  # a scheduler changes a tensor in place

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Make a line of metrics for ``step`` (optimizer steps done), and write those that are due.

        Args:
            step: the last that was counted.
            values: by name, what was measured beside loss and lr; numbers, 0-dim tensors, None.

        Raises:
            UserError: where the loss of a line that is due is not finite.
        """
        lap = self.timer.cut()  # before the copies: when they are done, so is the step
        line = _Line(
            step=step,
            num_steps=self._num_steps,
            values=self._reader.fetch({"loss": self._loss, "lr": self._lr, **values}),
            lap=lap,
            tokens=self.tokens.cut(),
            sample_length=self._length_sum / max(1, self._batches),
            memory=peaks_of_all(peak_memory(self._device, self._pinned()), self._world),
        )
        self._loss, self._num_steps = self._zero, 0
        self._length_sum, self._batches = 0.0, 0
        self._pending.append(line)
        self._write_all_but(0 if self._reader.is_immediate else 1)

    def advance(self, step: int) -> None:
        """``step`` is queued and not logged: write what is due, and move the bar."""
        self.flush()
        if self._written is not None:
            self._written.progress.update(step)

    def flush(self) -> None:
        """Write every line; waits for the device to finish their steps.

        Raises:
            UserError: where the loss is not finite.
        """
        self._write_all_but(0)

    def _write_all_but(self, number: int) -> None:
        while len(self._pending) > number:
            line = self._pending.popleft()
            try:
                self._write(line)
            except BaseException:
                self._pending.clear()
                raise

    def _write(self, line: _Line) -> None:
        values = line.values.read()
        loss = values["loss"] / line.num_steps
        check_finite(
            {"the loss": loss, "the norm of the gradients": values.get("grad_norm")},
            line.step - line.num_steps + 1,
            line.step,
            values["lr"],
            self._last_checkpoint(),
        )
        times = self.timer.read(line.lap)
        if self._written is None:
            return
        rates = line.tokens.rates(self.timer.training_seconds)
        row = {**values, "loss": loss, **rates, **times, **line.memory, **self._placed()}
        if self._peak is not None and self._size is not None:
            peak = self._peak * self._world.size
            row["mfu"] = mfu(rates["tokens_per_second"], _flops_per_token(self._size, line.sample_length), peak)
        self._written.log.log(row, line.step)
        on_device = self._device.type != "cpu"
        shown = "memory/device_peak_allocated_gib" if on_device else "memory/host_rss_peak_gib"
        self._written.progress.update(
            line.step,
            loss=loss,
            tokens_per_second=rates["tokens_per_second"],
            memory_gib=line.memory[shown],
        )

    def _placed(self) -> dict[str, float]:
        """Where strategy ``auto`` has put the optimizer's states, and units of the model that go each way."""
        auto = getattr(self._optimizer, "auto", None)
        found: dict[str, float] = {}
        for way, entry in {} if auto is None else auto.placed().items():
            found |= {f"states/{way}_gib": entry["bytes"] / GIB, f"states/{way}_units": entry["units"]}
        return found

    def _pinned(self) -> int:
        """Page-locked bytes of the optimizer, as of the last line out of 1, 2, 4, 8, …: they hardly change."""
        self._num_lines += 1
        if hasattr(self._optimizer, "memory_report") and self._num_lines & (self._num_lines - 1) == 0:
            self._pinned_bytes = sum(self._optimizer.memory_report().get("pinned_host", {}).values())
        return self._pinned_bytes

    def close(
        self,
        exit_code: int,
        checkpoint: Path | None,
        *,
        best: Path | None = None,
        expect: Callable[[Mapping[str, float]], Expected] | None = None,
    ) -> None:
        """End the logs; print the summary of a run that ended well or was interrupted.

        Args:
            exit_code: the run's status.
            checkpoint: the last one that was saved.
            best: that of the best evaluation, where it is kept.
            expect: tells what a run with these measured values should have taken; None where nobody asks.
        """
        failed = exit_code not in (0, 130, 143)
        rest: dict[str, float] = {}
        # After a failure, what the steps before it left is worth having if the device can still tell.
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            self.flush()
            rest = self.timer.read(self.timer.cut())  # what came after the last line: the final checkpoint
        if self._written is None:
            return
        log, mirror = self._written.log, self._written.mirror
        with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
            log.restore()
            values = summarise(read_metrics(log.path), rest)
            notes = [] if failed or expect is None else _compared(expect, values)
            log.log_summary(values)
            self._written.record.finish(exit_code, values)
        self._written.progress.close()
        log.close(exit_code)
        if failed:
            return
        if best is not None:
            notes.append(("best", from_here(best)))
        note = mirror.note() if isinstance(mirror, WandBLogger) else None
        if note is not None:
            notes.append(note)
        if exit_code != 0 and checkpoint is not None:
            again = f"output_dir={self._output_dir} resume_from_checkpoint=True"
            notes.append(("next", f"the same command with {again} goes on from here"))
        say(
            summary(
                log.path,
                times=self.timer.totals,
                wall_seconds=time.perf_counter() - self._started,
                checkpoint=checkpoint,
                notes=notes,
            )
        )


def _compared(expect: Callable[[Mapping[str, float]], Expected], values: dict[str, float]) -> list[tuple[str, str]]:
    """What was expected, as lines for the summary; its numbers are added to the measured ones."""
    try:
        expected = expect(values)
    except Exception as error:  # the run is done and saved, whatever the planner makes of it
        first = next(iter(str(error).splitlines()), "")
        return [("predicted", f"nothing, since {first if isinstance(error, UserError) else repr(error)}")]
    lines = expected.lines(values)
    values |= expected.values()
    return lines


def _flops_per_token(size: Size, sample_length: float) -> float:
    return flops_per_token(
        size.trainable,
        size.frozen,
        num_layers=size.layers,
        num_heads=size.heads,
        head_dim=size.head_dim,
        seq_len=sample_length,
    )
