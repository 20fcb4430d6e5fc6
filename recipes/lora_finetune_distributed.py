"""LoRA, DoRA and QLoRA fine-tuning on several devices, the frozen model and its adapter divided among them.

PyTorch's own FSDP2 divides the model, torchrun starts a process for each device, on one host or on many.

Features, beside those of ``lora_finetune_single_device``, with the same keys:

- ``batch_size`` is per process. N processes see the batches that one would see with N times the batch size, and the
  loss is divided by the labels of all of them: loss and weights are those of one process.
- ``reshard_after_forward``, ``data_parallel_replicate_dim``, ``reduce_dtype``: memory against traffic.
- One progress bar, one ``metrics.jsonl`` and one wandb run for all processes: tokens per second of all of them, and the
  most and the least memory of any.
- A run goes on from a checkpoint with another number of processes; with the same batch of all processes, as if nothing
  had changed.

Stops with status 2 and one line, from one process, for what the user can mend. SIGINT and SIGTERM to any process finish
the step, save, and end all of them with status 130 and 143.

    tune run --nproc_per_node 2 lora_finetune_distributed --config tiny_llama_lora
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoints.beside import Beside
from offload.checkpoints.manager import Loaded
from offload.config.loading import Component
from offload.models.protocol import AdaptedLM
from offload.training.distributed import DistributedFinetuneRecipe, DistributedSettings
from offload.training.interrupt import Interrupt
from offload.training.launch import run_recipe
from offload.training.optimizer import evaluation_weights
from offload.training.step import clip_gradients, forward_backward, step_scheduler


@dataclass(kw_only=True)
class Settings(DistributedSettings):
    """Everything that this recipe reads from its configuration."""

    adapter: Component | None = None
    """of a transformers model: one of peft's configurations, such as peft.LoraConfig with r and target_modules"""
    save_adapter_weights_only: bool = False
    """save the adapter without the merged model"""


class LoRAFinetuneRecipeDistributed(DistributedFinetuneRecipe):
    """LoRA fine-tuning on several devices."""

    Settings = Settings
    settings: Settings
    adapts = True
    parts: AdaptedLM

    # ---------------------------------------------------------------------------------------------- set-up

    def setup(self) -> None:
        """Everything that can fail before the first step; the cheap and the likely first."""
        resumed = self.setup_run()
        self.setup_data()
        self._setup_model(resumed)
        self.setup_optimizer(resumed)
        self.setup_reporting(resumed)

    def _setup_model(self, resumed: Loaded | None) -> None:
        adapter = resumed.adapter if resumed else None
        begin = self.source.empty_adapted if self.reads_parts else self.source.adapted
        self.prepare_model(begin(adapter, self.resumed_from))

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
        """Save the adapter, the merged model unless it is not wanted, and all that a resume needs."""
        only_adapter = self.settings.save_adapter_weights_only
        self.synchronize_optimizer()
        with evaluation_weights(self.optimizer):
            self.check_weights()
            return self.write_checkpoint(
                None if only_adapter else self.parts.merged_weights(goes_on=self.settings.enable_async_checkpointing),
                adapter=self.parts.adapter_weights(),
                adapter_config=self.parts.adapter_config(),
            )


if __name__ == "__main__":
    sys.exit(run_recipe(LoRAFinetuneRecipeDistributed))
