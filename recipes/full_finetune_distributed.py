"""Full fine-tuning of a dense transformer on several devices, the model and its optimizer divided among them.

PyTorch's own FSDP2 divides the model, torchrun starts a process for each device, on one host or on many. Each process
updates its part of the parameters, with an optimizer that may live off its device.

Features, beside those of ``full_finetune_single_device``, with the same keys:

- ``batch_size`` is per process. N processes see the batches that one would see with N times the batch size, and the
  loss is divided by the labels of all of them: loss and weights are those of one process.
- ``reshard_after_forward``, ``data_parallel_replicate_dim``, ``reduce_dtype``: memory against traffic.
- One progress bar, one ``metrics.jsonl`` and one wandb run for all processes: tokens per second of all of them, and the
  most and the least memory of any.
- A run goes on from a checkpoint with another number of processes; with the same batch of all processes, as if nothing
  had changed.

Stops with status 2 and one line, from one process, for what the user can mend. SIGINT and SIGTERM to any process finish
the step, save, and end all of them with status 130 and 143.

    tune run --nproc_per_node 2 full_finetune_distributed --config tiny_llama_offload_distributed
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoints.beside import Beside
from offload.checkpoints.manager import Loaded
from offload.errors import UserError
from offload.models.protocol import CausalLM
from offload.training.distributed import DistributedFinetuneRecipe, DistributedSettings
from offload.training.interrupt import Interrupt
from offload.training.launch import run_recipe
from offload.training.optimizer import evaluation_weights
from offload.training.step import clip_gradients, forward_backward, step_scheduler


@dataclass(kw_only=True)
class Settings(DistributedSettings):
    """Everything that this recipe reads from its configuration."""


class FullFinetuneRecipeDistributed(DistributedFinetuneRecipe):
    """Full fine-tuning on several devices."""

    Settings = Settings

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Everything that can fail before the first step; the cheap and the likely first."""
        resumed = self.setup_run()
        self.setup_data()
        self._setup_model(resumed)
        self.setup_optimizer(resumed)
        self.setup_reporting(resumed)

    def _setup_model(self, resumed: Loaded | None) -> None:
        if resumed and resumed.adapter is not None:
            raise UserError(
                "resume_from_checkpoint: the checkpoint holds an adapter to go on with; resume it with "
                "lora_finetune_distributed, or give this run an output_dir of its own"
            )
        if self.reads_parts:
            parts: CausalLM = self.source.empty()
        else:
            parts = self.source.full(resumed.model if resumed else None, self.resumed_from)
        self.prepare_model(parts)

    # -------------------------------------------------------------------------------------------- training

    def train(self) -> int:
        """The loop; returns the exit status."""
        settings, reporter = self.settings, self.reporter
        assert reporter is not None
        timer = reporter.timer
        accumulation = settings.gradient_accumulation_steps
        self.start()
        with Interrupt(world=self.world) as interrupt, self.saving_on_failure():
            interrupted = stops = False
            while self.epoch < settings.epochs and not stops:
                batches = self.batches.epoch(self.epoch, start=self.step_in_epoch * accumulation)
                while self.step_in_epoch < self.steps_per_epoch and not stops:
                    with timer("data"):
                        micro_batches, num_labels = self.next_micro_batches(batches)
                    self.begin_step()
                    with timer("forward_backward"):
                        part = forward_backward(
                            self.loss,
                            micro_batches,
                            self.optimizer,
                            self.activations,
                            measures_norm=self.is_logged,
                            num_labels=num_labels,
                            prepare=self.keep_weights,
                        )
                        loss = self.world.summed(part)
                    self.begin_update()
                    reporter.count(micro_batches, loss, lr=self.optimizer.param_groups[0]["lr"])
                    with timer("optimizer"):
                        grad_norm = clip_gradients(
                            self.optimizer, self.params, settings.clip_grad_norm, measure=self.is_logged
                        )
                        self.optimizer.step()
                        self.optimizer.zero_grad(set_to_none=True)
                        step_scheduler(self.lr_scheduler, loss)
                    interrupted = interrupt.came()
                    stops = self.end_step(grad_norm, interrupted=interrupted)
                if not stops:
                    self.epoch, self.step_in_epoch = self.epoch + 1, 0
            return interrupt.exit_code if interrupted else 0

    # ----------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> Path | Beside:
        """Save the model and all that a resume needs; returns the folder, or what writes it beside training."""
        self.synchronize_optimizer()
        with evaluation_weights(self.optimizer):
            self.check_weights()
            return self.write_checkpoint(self.model.state_dict())


if __name__ == "__main__":
    sys.exit(run_recipe(FullFinetuneRecipeDistributed))
