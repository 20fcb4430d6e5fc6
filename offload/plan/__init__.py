"""What a machine could do with a schedule: cost model, replay of the engine on it."""
