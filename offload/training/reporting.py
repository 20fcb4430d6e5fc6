"""Everything a run tells while it trains: metrics, progress bar, summary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload.training.config import instantiate
from offload.training.data import Batch
from offload.training.flops import flops_per_token, matmul_parameters, mfu, peak_flops
from offload.training.memory import peak_memory, reset_peak
from offload.training.metrics import MetricLog, StepTimer, Throughput
from offload.training.progress import Progress, say, summary
from offload.training.wandb_logger import WandBLogger


class Reporter:
    """Collects what a run measures and writes it where it belongs.

    Args:
        cfg: the whole configuration; goes to the metric logger.
        metric_logger: its section, or None.
        output_dir: folder of the run.
        device: the device that trains.
        model: for the FLOPs of a token.
        optimizer: asked for its page-locked memory, if it reports it.
        total_steps: optimizer steps of the whole run.
        resume_step: steps done before this process, None for a fresh run.
        tokens_seen: tokens seen before this process.
    """

    def __init__(
        self,
        cfg: DictConfig,
        metric_logger: DictConfig | None,
        *,
        output_dir: Path,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        resume_step: int | None,
        tokens_seen: int,
    ) -> None:
        self.timer = StepTimer(device)
        self.tokens = Throughput(tokens_seen)
        self._device, self._model, self._optimizer = device, model, optimizer
        self._output_dir = output_dir
        self._mirror = instantiate(metric_logger)
        mirrors = [] if self._mirror is None else [self._mirror]
        self._log = MetricLog(output_dir, mirrors, resume_step=resume_step)
        self._log.log_config(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))
        self._progress = Progress(total_steps, initial=resume_step or 0)
        self._peak = peak_flops(device)
        self._matmul = matmul_parameters(model)
        self._length_sum = 0.0
        self._batches = 0
        self._started = time.perf_counter()
        reset_peak(device)

    def start(self) -> None:
        """Training begins: set-up time does not count."""
        self.timer.restart()

    def count(self, batches: list[Batch]) -> None:
        """Count a step's micro-batches."""
        for batch in batches:
            self.tokens.add(batch.num_tokens, batch.num_labels)
            self._length_sum += batch.sample_length
            self._batches += 1

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write one line of metrics for ``step`` (optimizer steps done), and move the bar."""
        times = self.timer.read_and_reset()
        rates = self.tokens.read_and_reset(self.timer.training_seconds)
        pinned = 0
        if hasattr(self._optimizer, "memory_report"):
            pinned = sum(self._optimizer.memory_report().get("pinned_host", {}).values())
        memory = peak_memory(self._device, pinned)
        row = {**values, **rates, **times, **memory}
        if self._peak is not None:
            row["mfu"] = mfu(rates["tokens_per_second"], self._flops_per_token(), self._peak)
        self._log.log(row, step)
        on_device = self._device.type != "cpu"
        shown = "memory/device_peak_allocated_gib" if on_device else "memory/host_rss_peak_gib"
        self._progress.update(
            step,
            loss=values["loss"],
            tokens_per_second=rates["tokens_per_second"],
            memory_gib=memory[shown],
        )

    def _flops_per_token(self) -> float:
        frozen, trainable = self._matmul
        model: Any = self._model
        length, self._length_sum, self._batches = self._length_sum / max(1, self._batches), 0.0, 0
        return flops_per_token(
            trainable,
            frozen,
            num_layers=len(model.layers),
            num_heads=model.num_heads,
            head_dim=model.head_dim,
            seq_len=length,
        )

    def advance(self, step: int) -> None:
        """Move the bar to a step that is not logged."""
        self._progress.update(step)

    def close(self, exit_code: int, checkpoint: Path | None) -> None:
        """End the logs; print the summary of a run that ended well or was interrupted."""
        self._progress.close()
        self._log.close(exit_code)
        if exit_code not in (0, 130, 143):
            return
        self.timer.read_and_reset()  # counts what came after the last log: the final checkpoint
        notes = []
        note = self._mirror.note() if isinstance(self._mirror, WandBLogger) else None
        if note is not None:
            notes.append(note)
        if exit_code != 0 and checkpoint is not None:
            again = f"output_dir={self._output_dir} resume_from_checkpoint=True"
            notes.append(("next", f"the same command with {again} goes on from here"))
        say(
            summary(
                self._log.path,
                times=self.timer.totals,
                wall_seconds=time.perf_counter() - self._started,
                checkpoint=checkpoint,
                notes=notes,
            )
        )
