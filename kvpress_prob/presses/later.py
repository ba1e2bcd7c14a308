"""What enters a cache behind its context is said not to be compressed."""

import warnings


class Later:
    """Says once in a block what was not compressed."""

    def __init__(self, evicts: bool):
        self.silent = not evicts

    def __call__(self, new: int, held: int) -> None:
        if new == 1 or self.silent:  # an answer grows token by token
            return
        self.silent = True
        warnings.warn(
            f"{new} tokens that follow {held} in a cache are kept whole: only a forward pass on an empty cache is "
            "compressed. Give the whole context in one pass (no prefill_chunk_size, no cached beginning), and ask "
            "questions after the `with press(model)` block",
            stacklevel=2,
        )
