"""Floor 5."""
