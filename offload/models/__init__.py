"""What a model is to the recipes, whoever defines it."""
