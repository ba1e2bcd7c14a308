"""How much a cache may hold: what users say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvpress_prob.maths.arguments import check_integer

Start = Literal["prefill", "decoding"]
STARTS: tuple[Start, ...] = ("prefill", "decoding")

Progress = bool | Callable[[int, int], None]


@dataclass(frozen=True)
class CacheBudget:
    """
    How much a cache may hold at any time: from the first token of the prefill to the last of the answer.

    At the end of every forward pass inside the press' block, entries are drawn and the others evicted, so that a KV
    head holds ``max_entries`` of them on average. Long prefills are read in chunks: by ``generate(prefill_chunk_size=
    ...)``, a loop of the caller's, or by the press itself (``chunk_size``). After the block, where only attention can
    be watched, a layer that grows past its budget is sampled again by what its most recent queries attend to.

    Parameters
    ----------
    max_entries : int, optional, default=None
        Mean number of entries per KV head. None: the share ``1 - compression_ratio`` of what was read, once there are
        512 tokens, and ``interval + n_recent`` entries more.
    chunk_size : int, optional, default=None
        Split every call of the model with more tokens into calls of so many. The caller gets the last chunk's hidden
        states (and logits). None leaves calls as they are.
    interval : int, default=64
        Tokens that are evicted from together. Evicting more often costs time, and accuracy where scores change.
    queries : int, default=32
        Number of most recent queries that changing scores are made from; their own entries are kept for certain.
    room : int, default=0
        Of the entries, so many stay free for what comes after the block: a question and its answer that are as long
        push nothing out, and can be dropped again for the next question over the same context.
    start : {"prefill", "decoding"}, default="prefill"
        "decoding" leaves the prefill to the press' ``compression_ratio`` and bounds what comes after it.
    progress : bool or callable, default=False
        Show a bar over the chunks of a call, or call ``progress(tokens_read, tokens)`` after each.
    """

    max_entries: int | None = None
    chunk_size: int | None = None
    interval: int = 64
    queries: int = 32
    room: int = 0
    start: Start = "prefill"
    progress: Progress = False

    def __post_init__(self):
        optional = ("max_entries", "chunk_size")
        for name in (*optional, "interval", "queries", "room"):
            value = getattr(self, name)
            check_integer(name, value, 0 if name == "room" else 1, optional=name in optional)
            if value is not None:
                object.__setattr__(self, name, int(value))  # numpy's integers cannot be saved
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {STARTS}, got {self.start!r}")
        certain = self.interval + self.queries + self.room
        if self.max_entries is not None and self.max_entries <= certain:
            raise ValueError(
                f"max_entries must be more than interval + queries + room = {certain}, got {self.max_entries}"
            )
        if self.start == "decoding" and (self.max_entries is None or self.chunk_size is not None):
            raise ValueError("start='decoding' needs max_entries, and chunk_size=None")
        if self.start == "decoding" and self.room:
            raise ValueError(f"room must be 0 with start='decoding', where nothing is evicted before, got {self.room}")
        if not (isinstance(self.progress, bool) or callable(self.progress)):
            raise TypeError(f"progress must be True, False or callable, got {self.progress!r}")
