"""A run's checkpoints: whole or absent, locked, summed, resumed."""
