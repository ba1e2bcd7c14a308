"""The evictable part of a bounded cache: every layer's state, and one draw over all layers (``maths.order_sampling``).

Of a cache that may hold a number of entries per head, the first ``n_sink`` entries and at least the ``n_recent`` newest
are kept for certain. The others are the pool. Tokens join it in blocks that end at multiples of ``interval``, so what
is in the pool is a function of how many tokens were read, and not of the passes they came in.

A layer's store has two columns for it: ``position`` of every entry in its row, and ``scores``, one number a component:
the logarithm of its amount, for scores that never change, or of the probability that it is still in the sample, for
those that do. Everything else is a few numbers a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress_prob.hf.budget import CacheBudget
from kvpress_prob.hf.resampling import EXTRA, ResamplingSettings
from kvpress_prob.maths.draw import DrawSettings
from kvpress_prob.ragged import RaggedKV

POSITION, SCORES = "position", "scores"
RATIO_FROM = 512
"""Tokens that a budget that is a ratio of what was read waits for: a tenth of a sentence is no sample of it."""
MIN_LOG_AMOUNT = -690.0
"""An entry without any score has this one: it goes first, and a smaller number would overflow its weight."""


@dataclass(frozen=True)
class PoolSettings:
    """What a pool may hold and how it is drawn from.

    Attributes
    ----------
    budget : CacheBudget
        Without what concerns a call alone (chunks and progress).
    draw : DrawSettings
        As in the press.
    compression_ratio : float
        What a budget without ``max_entries`` keeps to.
    n_sink, n_recent : int
        Entries that are kept for certain; ``n_recent`` is at least 1.
    changing : tuple of bool
        Whether a component's scores change from pass to pass.
    uniform : tuple of bool
        Whether a component draws from every head alike (``budget_weighting="uniform"``).
    seed : int
    scorers : str
        What the scores are: another press' scores and thresholds cannot be compared with them.
    """

    budget: CacheBudget
    draw: DrawSettings
    compression_ratio: float
    n_sink: int
    n_recent: int
    changing: tuple[bool, ...]
    uniform: tuple[bool, ...]
    seed: int
    scorers: str

    @property
    def top_k(self) -> bool:
        """Whether nothing is drawn: the largest amounts stay."""
        return self.draw.sampler == "top_k"

    def capacity(self, boundary: int) -> int | None:
        """Entries per head that a pool of ``boundary`` tokens may keep; None for all."""
        budget = self.budget
        if budget.max_entries is not None:
            return budget.max_entries - self.n_sink - self.n_recent - budget.interval - budget.room
        if boundary < RATIO_FROM:
            return None
        return max(int((1 - self.compression_ratio) * boundary) - self.n_sink, 0)

    def resampling(self, layer: int) -> ResamplingSettings:
        """How a layer is kept to its budget where nobody scores: after the press' block."""
        return ResamplingSettings(self.budget, self.draw, self.n_sink, self.seed, layer)


class Pool:
    """One layer's part of the pool.

    Parameters
    ----------
    settings : PoolSettings
    layer : int
        Index of the layer.
    rows, kv_heads : int
    device : torch.device

    Attributes
    ----------
    log_scale, log_tau : Float64[Tensor, "b k hkv"]
        Added to a component's log amounts (NaN: not fixed yet), and the largest log priority that was evicted.
    boundary : list of int
        Tokens of each row that joined the pool so far, sinks included.
    evicted : bool
        Whether the pool ever had to evict.
    """

    def __init__(self, settings: PoolSettings, layer: int, rows: int, kv_heads: int, device: torch.device):
        self.settings, self.layer = settings, layer
        shape = (rows, len(settings.changing), kv_heads)
        self.log_scale = torch.full(shape, torch.nan, dtype=torch.float64, device=device)
        self.log_tau = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
        self.boundary = [0] * rows
        self.evicted = False

    def adopt(self, store: RaggedKV) -> RaggedKV:
        """The store with this pool's columns. Entries are counted from their head's first one; what weighs something
        already goes on weighing it."""
        place, segment = store.entries()
        first = store.length.cumsum(0) - store.length
        with torch.inference_mode(False), torch.no_grad():
            position = torch.zeros(len(store.log_w), dtype=torch.int32, device=place.device)
            position[place] = (torch.arange(len(place), device=place.device) - first[segment]).int()
            scores = self._unscored(place.device).expand(len(store.log_w), -1).contiguous()
            extra = torch.zeros_like(store.log_w)
            extra[place] = store.log_w[place]
        return store.with_columns(**{POSITION: position, SCORES: scores, EXTRA: extra})

    def admit(self, store: RaggedKV, positions: Tensor) -> None:
        """Fill in the columns of the newest entries, at positions [b n], which have no score yet."""
        n = positions.shape[1]
        places = (store.start + store.length).unsqueeze(-1) - torch.arange(n, 0, -1, device=store.start.device)
        positions = positions.to(places.device).repeat_interleave(store.kv_heads, 0)
        store.columns[POSITION][places.flatten()] = positions.flatten().int()
        store.columns[SCORES][places.flatten()] = self._unscored(places.device)
        store.columns[EXTRA][places.flatten()] = 0.0

    def _unscored(self, device: torch.device) -> Tensor:
        """Scores [k] of a new entry, float32: none yet, or certainly still in the sample."""
        scores = [0.0 if changing else torch.nan for changing in self.settings.changing]
        return torch.tensor(scores, dtype=torch.float32, device=device)

    def draw_was(self, row: int, boundary: int, log_scale: Tensor, log_tau: Tensor) -> None:
        """Note a draw over the tokens of a batch row before ``boundary``, with its numbers [k hkv]."""
        device = self.log_tau.device
        with torch.inference_mode(False), torch.no_grad():
            self.log_scale, self.log_tau = self.log_scale.clone(), self.log_tau.clone()
            self.log_scale[row], self.log_tau[row] = log_scale.to(device), log_tau.to(device)
        self.boundary[row] = boundary

    def select_rows(self, rows: list[int]) -> None:
        self.log_scale, self.log_tau = self.log_scale[rows], self.log_tau[rows]
        self.boundary = [self.boundary[row] for row in rows]


def score_newest(store: RaggedKV, component: int, log_amounts: Tensor) -> None:
    """Write the log amounts [b hkv n] of the newest entries; left padding, of which a store has no entries, is left
    out."""
    n = log_amounts.shape[-1]
    places = (store.start + store.length).unsqueeze(-1) - torch.arange(n, 0, -1, device=store.start.device)
    stored = places >= store.start.unsqueeze(-1)
    amounts = log_amounts.reshape(len(store.start), n).clamp(min=MIN_LOG_AMOUNT).float()
    store.columns[SCORES][places[stored], component] = amounts[stored].to(store.log_w.device)
