"""What a run tells: the log, throughput, memory, flops, progress, wandb."""
