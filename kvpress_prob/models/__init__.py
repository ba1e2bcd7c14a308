"""Floor 5: models by name."""
