"""LoRA, DoRA and QLoRA fine-tuning on one device, with an optimizer that may live off it.

The base model is frozen; small low-rank matrices beside its linear layers are trained. Which layers, which rank,
DoRA's magnitudes (``use_dora``) and 4-bit base weights (``quantize_base``, QLoRA) are arguments of torchtune's
model builders (``model._component_: torchtune.models.llama2.lora_llama2_7b``); for a model of transformers, the section
``adapter`` is one of peft's configurations.

Features, each behind the configuration key of that name:

- ``optimizer``: any optimizer class by its dotted path. ``offload.OffloadOptimizer`` keeps states, gradients
  and the update's work off the device; ``torch.optim.*``, ``bitsandbytes.optim.*``, ``torchao.optim.*`` and
  ``offload.TorchAOCPUOffloadOptimizer`` are its peers, for comparison on the same run.
- ``gradient_accumulation_steps`` and ``clip_grad_norm``: exact for every optimizer. The loss is divided by the
  labels of all micro-batches of a step before its first backward.
- ``enable_activation_checkpointing``, ``enable_activation_offloading``, ``compile``: memory and speed.
- ``loss``: fused head and cross-entropy, chunked, or plain.
- ``dataset``: one component or a list of them, packed or padded.
- ``evaluation``: loss on held-out data every N steps; stopping when it no longer falls, keeping the best checkpoint.
- ``save_every_n_steps``, ``keep_last_n``, ``resume_from_checkpoint``: whole checkpoints with an adapter that
  peft loads; a resumed run goes on in the middle of an epoch as if it had not stopped.
- ``save_adapter_weights_only``: leave out the merged model, which otherwise is saved beside the adapter.
- ``metric_logger``: wandb mirrors ``metrics.jsonl`` in ``output_dir``, which has one line per log. On an accelerator
  a line is written when the next step is queued, so that logging every step costs no time.
- ``profiler``: torch.profiler traces.

Stops with status 2 and one line for what the user can mend: an unknown key, a missing file, a device that is
not there, memory that runs out, a loss, gradients or weights that are not finite. SIGINT and SIGTERM finish the
step, save, and end with status 130 and 143.

    tune run lora_finetune_single_device --config llama2_7b_lora model.lora_rank=16
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoints.beside import Beside
from offload.checkpoints.manager import Loaded
from offload.config.loading import Component
from offload.models.protocol import AdaptedLM
from offload.training.finetune import FinetuneRecipe
from offload.training.interrupt import Interrupt
from offload.training.launch import run_recipe
from offload.training.optimizer import evaluation_weights
from offload.training.settings import TrainSettings
from offload.training.step import clip_gradients, forward_backward, step_scheduler


@dataclass(kw_only=True)
class Settings(TrainSettings):
    """Everything that this recipe reads from its configuration."""

    adapter: Component | None = None
    """of a transformers model: one of peft's configurations, such as peft.LoraConfig with r and target_modules"""
    save_adapter_weights_only: bool = False
    """save the adapter without the merged model"""


class LoRAFinetuneRecipeSingleDevice(FinetuneRecipe):
    """LoRA fine-tuning on one device."""

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
        self.prepare_model(self.source.adapted(adapter, self.resumed_from))

    # -------------------------------------------------------------------------------------------- training

    def train(self) -> int:
        """The loop; returns the exit status."""
        settings, reporter = self.settings, self.reporter
        assert reporter is not None
        timer = reporter.timer
        accumulation = settings.gradient_accumulation_steps
        self.start()
        with Interrupt() as interrupt, self.saving_on_failure():
            interrupted = stops = False
            while self.epoch < settings.epochs and not stops:
                batches = self.batches.epoch(self.epoch, start=self.step_in_epoch * accumulation)
                while self.step_in_epoch < self.steps_per_epoch and not stops:
                    with timer("data"):
                        micro_batches = [next(batches).to(self.device) for _ in range(accumulation)]
                    self.begin_step()
                    with timer("forward_backward"):
                        loss = forward_backward(
                            self.loss, micro_batches, self.optimizer, self.activations, measures_norm=self.is_logged
                        )
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
    sys.exit(run_recipe(LoRAFinetuneRecipeSingleDevice))
