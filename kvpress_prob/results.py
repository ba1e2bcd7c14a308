"""Floor 0: the record schema of evaluations."""
