"""What can go wrong while a sweep runs."""


class SweepInterrupted(RuntimeError):
    """A run ended early for a reason that is not in its configuration; the same command continues it."""
