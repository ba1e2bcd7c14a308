"""Floor 7: the demo."""
