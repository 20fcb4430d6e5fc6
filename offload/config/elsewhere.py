"""What settings are called in other trainers, for the hint beside a key that nothing reads.

Names are those of TRL 1.16 and transformers' ``TrainingArguments``, of Axolotl's ``utils/schemas``, LLaMA-Factory's
``hparams``, Unsloth's ``FastLanguageModel`` and torchtune 0.6.1; docs/configuration.md has them as a table.
"""

from __future__ import annotations

_NAMES = {
    "model.path": "model_name_or_path model_name base_model",
    "model.attn_implementation": "flash_attn flash_attention sdp_attention flex_attention eager_attention",
    "model.load_in_4bit": "quantization_bit",
    "dataset.path": "dataset_name datasets",
    "dataset.train_on": "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt",
    "dataset.packed": "packing sample_packing neat_packing",
    "evaluation.dataset": "eval_dataset test_datasets",
    "evaluation.every_n_steps": "eval_steps",
    "evaluation.batch_size": "per_device_eval_batch_size eval_batch_size",
    "evaluation.keep_best": "load_best_model_at_end",
    "tokenizer.max_seq_len": "max_length max_seq_length sequence_len cutoff_len",
    "tokenizer.chat_template": "chat_template_path chat_template_jinja template",
    "batch_size": "per_device_train_batch_size micro_batch_size",
    "num_workers": "dataloader_num_workers",
    "epochs": "num_train_epochs num_epochs",
    "max_steps_per_epoch": "max_steps",
    "optimizer": "optim",
    "optimizer.lr": "learning_rate",
    "optimizer.update_in_backward": "optimizer_in_bwd",
    "lr_scheduler": "lr_scheduler_type",
    "lr_scheduler.num_warmup_steps": "warmup_steps warmup_ratio",
    "clip_grad_norm": "max_grad_norm",
    "dtype": "bf16 fp16 torch_dtype",
    "compile": "torch_compile",
    "enable_activation_checkpointing": (
        "gradient_checkpointing use_gradient_checkpointing disable_gradient_checkpointing"
    ),
    "enable_activation_offloading": "activation_offloading",
    "adapter.r": "lora_r lora_rank",
    "adapter.lora_alpha": "lora_alpha",
    "adapter.lora_dropout": "lora_dropout",
    "adapter.target_modules": "lora_target lora_target_modules lora_target_linear target_modules",
    "save_every_n_steps": "save_steps",
    "keep_last_n": "save_total_limit",
    "resume_from_checkpoint": "auto_resume_from_checkpoints",
    "log_every_n_steps": "logging_steps",
    "metric_logger": "report_to",
    "metric_logger.project": "wandb_project",
}

HERE = {theirs: ours for ours, names in _NAMES.items() for theirs in names.split()}
"""Our key for theirs."""

NOT_HERE = {
    "log_peak_memory_stats": "peak memory is always logged",
    "val_set_size": "held-out data is evaluation.dataset",
    "val_size": "held-out data is evaluation.dataset",
}
"""Theirs that no key of ours stands for, and what to do instead."""
