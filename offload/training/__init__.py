"""What the recipes' loops share: settings, steps, loss, where a model comes from, interruption, launch."""
