"""What settings are called in other trainers, for the hint beside a key that nothing reads or a value that is no path.

Names are those of TRL 1.16 and transformers' ``TrainingArguments``, of Axolotl's ``utils/schemas``, LLaMA-Factory's
``hparams``, Unsloth's ``FastLanguageModel`` and torchtune 0.6.1; docs/configuration.md has them as a table.
"""

from __future__ import annotations

import os
from collections.abc import Collection

_NAMES = {
    "model.path": "model_name_or_path model_name base_model",
    "model.trust_remote_code": "trust_remote_code",
    "model.attn_implementation": "flash_attn flash_attention sdp_attention flex_attention eager_attention",
    "model.load_in_4bit": "load_in_4bit quantization_bit",
    "dataset.path": "dataset_name datasets",
    "dataset.columns": "dataset_text_field",
    "dataset.split": "dataset_train_split max_samples max_train_samples",
    "dataset.train_on": "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt",
    "dataset.packed": "packing sample_packing neat_packing",
    "evaluation.dataset": "eval_dataset test_datasets",
    "evaluation.every_n_steps": "eval_steps eval_strategy evaluation_strategy evals_per_epoch",
    "evaluation.early_stopping_patience": "early_stopping_patience",
    "evaluation.batch_size": "per_device_eval_batch_size eval_batch_size",
    "evaluation.keep_best": "load_best_model_at_end",
    "tokenizer.max_seq_len": "max_length max_seq_length sequence_len cutoff_len",
    "tokenizer.chat_template": "chat_template_path chat_template_jinja template",
    "batch_size": "per_device_train_batch_size micro_batch_size",
    "num_workers": "dataloader_num_workers",
    "epochs": "num_train_epochs num_epochs total_epochs",
    "max_steps_per_epoch": "max_steps",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.update_in_backward": "optimizer_in_bwd",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler.num_warmup_steps": "warmup_steps warmup_ratio",
    "clip_grad_norm": "max_grad_norm",
    "dtype": "bf16 fp16 torch_dtype",
    "device": "no_cuda use_cpu",
    "seed": "random_state data_seed",
    "compile": "torch_compile use_torch_compile",
    "enable_activation_checkpointing": (
        "gradient_checkpointing use_gradient_checkpointing disable_gradient_checkpointing"
    ),
    "enable_activation_offloading": "activation_offloading",
    "adapter.r": "lora_r lora_rank rank",
    "adapter.lora_alpha": "lora_alpha",
    "adapter.lora_dropout": "lora_dropout",
    "adapter.target_modules": "lora_target lora_target_modules lora_target_linear target_modules",
    "save_every_n_steps": "save_steps save_strategy saves_per_epoch",
    "keep_last_n": "save_total_limit",
    "resume_from_checkpoint": "auto_resume_from_checkpoints",
    "log_every_n_steps": "logging_steps",
    "metric_logger": "report_to",
    "metric_logger.project": "wandb_project",
    "metric_logger.entity": "wandb_entity",
    "metric_logger.name": "wandb_name run_name",
    "metric_logger.run_id": "wandb_run_id",
    "metric_logger.mode": "wandb_mode",
}

HERE = {theirs: ours for ours, names in _NAMES.items() for theirs in names.split()}
"""Our key for theirs."""

_REASONS = {
    "peak memory is always logged": "log_peak_memory_stats",
    "held-out data is evaluation.dataset": "val_set_size val_size",
    "a run is divided among GPUs by `tune run --nproc_per_node N full_finetune_distributed`": (
        "fsdp fsdp_config deepspeed custom_sharded_layers memory_efficient_fsdp_wrap fsdp_cpu_offload"
    ),
    "no process ever holds the whole model twice": "low_cpu_ram low_cpu_mem_usage",
    "torchrun numbers the processes": "local_rank",
    "the recipe says what is trained; `tune ls` lists them": (
        "stage do_train do_eval do_predict finetuning_type use_peft"
    ),
    "adapters are trained by the recipe lora_finetune_single_device": "adapter save_adapter_weights_only",
    "`tune push` shares a checkpoint when it is there": "push_to_hub hub_model_id hub_token",
    "`tune compare` draws the loss": "plot_loss logging_dir",
    "rows are tokenized as they are read": (
        "dataset_prepared_path preprocessing_num_workers dataset_num_proc overwrite_cache remove_unused_columns"
    ),
    "a batch is as long as its longest sample": "pad_to_sequence_len pad_to_max_length",
    "dataset.packed=True leaves nothing to pad": "group_by_length length_column_name",
    "the model's folder tells it": "model_type tokenizer_type special_tokens tokens eos_token pad_token",
    "weights in 4 bits are model.load_in_4bit, of the config hf_qlora": "load_in_8bit",
    "checkpoints are safetensors": "save_safetensors",
    "loss.num_output_chunks makes the logits chunk by chunk": "use_liger_kernel enable_liger_kernel liger_kernel",
    "a run that does not resume begins anew in any output_dir": "overwrite_output_dir",
}

NOT_HERE = {theirs: reason for reason, names in _REASONS.items() for theirs in names.split()}
"""Theirs that no key of ours stands for, and what to do instead."""

_BUILDERS = {
    "adapter.r": "lora_rank",
    "adapter.lora_alpha": "lora_alpha",
    "adapter.lora_dropout": "lora_dropout",
    "adapter.target_modules": "lora_attn_modules",
}

_ADAPTERS = "lora_finetune_single_device"

_COMPONENTS = {
    "optimizer": {
        "torch.optim.AdamW": "adamw adamw_torch adamw_torch_fused adamw_hf",
        "torch.optim.Adam": "adam",
        "torch.optim.SGD": "sgd",
        "torch.optim.Adafactor": "adafactor",
        "torch.optim.Muon": "muon",
        "bitsandbytes.optim.AdamW8bit": "adamw_8bit adamw_bnb_8bit",
        "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
        "bitsandbytes.optim.PagedAdamW": "paged_adamw paged_adamw_32bit",
        "bitsandbytes.optim.Lion8bit": "lion_8bit",
        "bitsandbytes.optim.Lion": "lion lion_32bit",
    },
    "lr_scheduler": {
        "offload.training.schedules.get_cosine_schedule_with_warmup": "cosine",
        "transformers.get_linear_schedule_with_warmup": "linear",
        "transformers.get_constant_schedule_with_warmup": "constant_with_warmup",
        "null": "constant none",
    },
    "metric_logger": {
        "offload.metrics.wandb_logger.WandBLogger": "wandb all",
        "torchtune.training.metric_logging.TensorBoardLogger": "tensorboard",
        "null": "none",
    },
    "adapter": {"peft.LoraConfig": "lora qlora"},
}

USUAL = {
    "adapter": "peft.LoraConfig",
    "dataset": "offload.data.sft.sft_dataset",
    "loss": "offload.training.loss.LinearCrossEntropyLoss",
    "lr_scheduler": "offload.training.schedules.get_cosine_schedule_with_warmup",
    "metric_logger": "offload.metrics.wandb_logger.WandBLogger",
    "model": "offload.models.huggingface.from_pretrained",
    "optimizer": "offload.OffloadOptimizer",
    "profiler": "offload.training.profiler.torch_profiler",
    "tokenizer": "offload.data.tokenizer.ChatTokenizer",
}
"""The component that stands in most configs, by section."""


def of_builder(name: str) -> str | None:
    """What torchtune's ``lora_*`` builders call another trainer's setting of adapters; None where they have it not."""
    return _BUILDERS.get(HERE.get(name, ""))


def key_here(name: str, read: Collection[str]) -> str | None:
    """What to do instead of a key of another trainer's; None where it is of none.

    Args:
        name: the key.
        read: the keys, without sections, that the recipe reads.
    """
    ours = HERE.get(name)
    if ours is not None and ours.partition(".")[0] in read:
        return f"it is called {ours} here"
    if ours is not None and ours.startswith("adapter."):
        return f"remove it, or train an adapter: it is called {ours} in the recipe {_ADAPTERS} (--config hf_lora)"
    return f"remove it: {NOT_HERE[name]}" if name in NOT_HERE else None


def component_here(section: str, value: str) -> str | None:
    """What to write for a section whose component is ``value``: a name of another trainer's, or a file.

    None where it may be a dotted path.
    """
    for ours, theirs in _COMPONENTS.get(section, {}).items():
        if value.lower() in theirs.split():
            return f"{section}={ours}"
    is_file = "/" in value or value.lower().endswith(_FILES) or os.path.exists(value)
    if is_file and section in ("model", "dataset", "tokenizer"):
        return f"{section}={USUAL[section]} {section}.path={value}"
    return None


_FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
