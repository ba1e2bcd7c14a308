"""Decode-time eviction: a layer that grew past its budget is sampled again (``maths.resampling``)."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvpress_prob.hf.budget import CacheBudget
from kvpress_prob.maths.draw import DrawSettings
from kvpress_prob.maths.proposals import check_finite, log_normalise, log_proposal, min_variance_proposal
from kvpress_prob.maths.random import streams
from kvpress_prob.maths.resampling import resample
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ragged import RaggedKV

UNLIMITED = 2**62
EXTRA = "extra_log_w"
"""Column of a bounded cache's store: the part of a log-weight that its pool does not know of."""


@dataclass(frozen=True)
class ResamplingSettings:
    """A layer's budget and how it is met.

    Attributes
    ----------
    budget : CacheBudget
    draw : DrawSettings
        As in the press.
    n_sink : int
        First entries of every head that are always kept.
    seed : int
        The press' seed; layers and rounds draw from streams of their own.
    layer : int
        Index of the layer.
    """

    budget: CacheBudget
    draw: DrawSettings
    n_sink: int
    seed: int
    layer: int


class Resampler:
    """What a layer with a budget knows besides its store.

    Parameters
    ----------
    settings : ResamplingSettings
    store : RaggedKV
        The layer's store.

    Attributes
    ----------
    rounds : list of int
        How often each batch row was sampled again.
    held : list of int
        Entries that each batch row stores besides the layer's appended ones.
    limit : list of int
        Entries that each batch row may store; a layer whose heads have no even share of a budget sets its own.
    queries : Float[Tensor, "b hq n d"] or None
        The most recent queries; their entries are the newest ``n`` of every segment.
    """

    def __init__(self, settings: ResamplingSettings, store: RaggedKV):
        self.settings = settings
        self.rounds = [0] * store.batch
        most = settings.budget.max_entries
        self.limit = [UNLIMITED if most is None else most * store.kv_heads] * store.batch
        self.queries: Tensor | None = None
        self.count(store, 0)

    def count(self, store: RaggedKV, appended: int) -> None:
        """Set ``held``; asks the device."""
        stored = store.length.view(store.batch, -1).sum(-1).tolist()
        self.held = [count - appended * store.kv_heads for count in stored]

    def remember(self, query: Tensor, appended: int) -> None:
        """Take over the queries of the newest tokens, of which ``appended`` are whole."""
        recent = query if self.queries is None else torch.cat([self.queries, query], 2)
        self.queries = recent[:, :, -min(self.settings.budget.queries, appended) :].detach().clone()

    def keep(self, n: int) -> None:
        """Only the newest ``n`` tokens are whole."""
        self.queries = None if self.queries is None else self.queries[:, :, -n:]

    def forget(self, n: int) -> None:
        """The newest ``n`` tokens were cropped."""
        if self.queries is not None and n:
            self.queries = self.queries[:, :, :-n] if n < self.queries.shape[2] else None

    def select_rows(self, rows: list[int]) -> None:
        self.rounds = [self.rounds[row] for row in rows]
        self.held = [self.held[row] for row in rows]
        self.limit = [self.limit[row] for row in rows]
        self.queries = None if self.queries is None else self.queries[rows]

    def exceeded(self, appended: int, kv_heads: int) -> list[int]:
        """Batch rows that hold more than the budget. Nothing is asked of the device."""
        stored = [count + appended * kv_heads for count in self.held]
        return [row for row, (count, limit) in enumerate(zip(stored, self.limit, strict=True)) if count > limit]

    def sample(self, store: RaggedKV, rows: list[int], scaling: float, softcap: float | None) -> RaggedKV:
        """The store with the given batch rows sampled again; the others keep what they have.

        ``scaling`` and ``softcap`` as in ``weighted_decode``.
        """
        settings, query = self.settings, cast(Tensor, self.queries)
        keys, values, log_w, valid = store.aligned()  # [s t d], [s t dv], [s t], [s t]
        segments, t = valid.shape
        n, heads = query.shape[2], store.kv_heads
        mass, _ = attention_mass(
            query.reshape(segments, -1, n, query.shape[-1]),
            keys.unsqueeze(1),
            query.new_full((segments, n), 1 / n, dtype=torch.float64),
            scaling=scaling,
            softcap=softcap,
            valid=valid,
            column_bias=log_w.unsqueeze(1).expand(-1, query.shape[1] // heads, -1),
        )
        scores = min_variance_proposal(mass, values.unsqueeze(1), centered=True).squeeze(1)  # [s t]
        age = torch.arange(t, 0, -1, device=valid.device)
        take_all = valid & ((valid.cumsum(-1) <= settings.n_sink) | (age <= n))
        drawable = valid & ~take_all
        check_finite("recent attention", scores)
        log_a = log_proposal(scores, drawable, "weights", uniform_mix=settings.draw.uniform_mix)
        weights = log_normalise(log_a).exp()
        kept = valid.clone()
        for row in rows:
            these = slice(row * heads, (row + 1) * heads)
            kept[these], log_w[these] = resample(
                log_w[these],
                weights[these],
                take_all[these],
                keep=max(self.limit[row] / heads - settings.budget.interval, 1),
                settings=settings.draw,
                stream=streams(
                    settings.seed, settings.layer, torch.arange(heads, device=valid.device), self.rounds[row] + 1
                ),
            )
            self.rounds[row] += 1
        place, _ = store.entries()  # in the order of the valid places of an aligned copy
        if EXTRA in store.columns:
            store.columns[EXTRA][place] += log_w[valid] - store.log_w[place]
        store.log_w[place] = log_w[valid]
        sampled = store.keep(kept[valid], settings.budget.interval)
        self.count(sampled, n)
        return sampled
