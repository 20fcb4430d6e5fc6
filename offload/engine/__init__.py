"""The offload engine: where tensors rest, how they move, when units are updated. Knows torch only."""
