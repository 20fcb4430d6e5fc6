"""What a recipe reads: YAML, overrides, interpolation, schema; checked before anything is built."""
