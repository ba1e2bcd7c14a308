"""What of a press' settings a bounded cache has a use for, and the settings of the cache's pool."""

from dataclasses import replace
from typing import Any, cast

import torch
from kvpress import CriticalKVPress, ScorerPress

from kvpress_prob.hf import CacheBudget, PoolSettings
from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.h2o_press import H2OPress
from kvpress_prob.presses.kvpress_scorers import described, score_rule
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.surrogate_press import SurrogatePress
from kvpress_prob.sources import PassSource, PrefillRows


def reads_rows(press: ScorerPress) -> bool:
    """Scorers of this package that read query rows of whatever entries they are given."""
    if isinstance(press, AttentionPress):
        return isinstance(press.source, PrefillRows) and press.heads == "group"
    return isinstance(press, MinVariancePress | H2OPress)


def kept_for_certain(press: Any) -> tuple[int, int]:
    """First and newest entries that no draw evicts: the press' own, those of the newest queries, and what scorers
    protect."""
    sinks, recent = press.n_sink, max(press.n_recent, press.budget.queries)
    for component in press.components:
        ends = component.rule.ends
        if ends is not None and not reads_rows(component.press):
            first, last = ends(component.press, None)
            sinks, recent = max(sinks, first), max(recent, last)
    return sinks, recent


def check_budget(press: Any) -> None:
    """Raise ``ValueError`` for parameters of a ``ProbabilisticPress`` that a bounded cache has no use for."""
    budget: CacheBudget = press.budget
    bounded = budget.start == "prefill"
    sinks, recent = kept_for_certain(press) if bounded else (press.n_sink, max(budget.queries, press.n_recent))
    certain = budget.interval + budget.room + recent + sinks
    if budget.max_entries is not None and budget.max_entries <= certain:
        raise ValueError(
            f"budget.max_entries must be more than interval {budget.interval} + room {budget.room} + the newest "
            f"{recent} and the first {sinks} entries, which are always kept (queries, n_recent, n_sink, and what the "
            f"scorer protects), got {budget.max_entries}"
        )
    if budget.start == "decoding":
        return
    if press.measure_dropped_mass:
        raise ValueError("measure_dropped_mass must be False with a budget: the dense cache is never there")
    if press.entries_per_head is not None:
        raise ValueError(f"entries_per_head must be None with a budget's max_entries, got {press.entries_per_head}")
    if budget.max_entries is None and not press.compression_ratio:
        raise ValueError("budget must have max_entries, or the press a compression_ratio > 0, got neither")
    if press.sampler == "multinomial":
        raise ValueError("sampler must be 'systematic' (drawn by priority) or 'top_k' with a budget, got 'multinomial'")
    if not press.compression_ratio and any(callable(component.share) for component in press.components):
        raise ValueError(
            "compression_ratio must be given with a budget and a share that depends on it: what the budget will be of "
            "the whole context, since what the first chunks lose never comes back"
        )
    for component in press.components:
        scorer = component.press
        _check_scorer(scorer)
        if press.uniform_mix and score_rule(scorer).never_changes:
            raise ValueError(
                f"uniform_mix must be 0 with a budget and scores that never change ({type(scorer).__name__}), "
                f"got {press.uniform_mix}"
            )


def _check_scorer(scorer: ScorerPress) -> None:
    if isinstance(scorer, CriticalKVPress):
        _check_scorer(cast(ScorerPress, scorer.press))
    if isinstance(scorer, AttentionPress) and isinstance(scorer.source, PassSource):
        raise ValueError(
            f"{type(scorer.source).__name__} needs the finished prefill, which a bounded cache never holds: use "
            "SurrogatePress, which predicts its scores, or a scorer that reads the prefill's own rows"
        )
    if isinstance(scorer, AttentionPress) and not isinstance(scorer.source, PrefillRows):
        raise ValueError(f"source must be PrefillRows with a budget, got {type(scorer.source).__name__}")
    if isinstance(scorer, AttentionPress) and scorer.project:
        raise ValueError("project must be False with a budget, got True")
    if isinstance(scorer, SurrogatePress) and scorer.recency:
        raise ValueError(f"recency must be 0 with a budget: ages of what is held are not known, got {scorer.recency}")
    if score_rule(scorer).whole:
        raise ValueError(
            f"{type(scorer).__name__} can only score a whole prefill, which a bounded cache never holds: use "
            "SurrogatePress, KnormPress, or a scorer that reads the newest queries"
        )


def pool_settings(press: Any, certain: tuple[int, int], known: PoolSettings | None) -> PoolSettings:
    """Settings of a cache's pool, the seed of ``known`` ones included; ``certain`` of ``kept_for_certain``.

    Raises
    ------
    ValueError
        If the cache is bounded by another budget or press already.
    """
    budget, (sinks, recent) = press.budget, certain
    seed = torch.Generator().seed() if press.seed is None else press.seed
    settings = PoolSettings(
        budget=replace(budget, chunk_size=None, progress=False),
        draw=press.draw_settings,
        compression_ratio=press.compression_ratio,
        n_sink=sinks,
        n_recent=recent,
        changing=tuple(not component.rule.never_changes for component in press.components),
        uniform=tuple(component.budget_weighting == "uniform" for component in press.components),
        seed=int(seed) % 2**64 if known is None else known.seed,
        scorers="; ".join(
            f"{described(it.press)} by {it.budget_weighting} at {it.proposal_temperature}, share "
            f"{getattr(it.share, '__qualname__', it.share)}"
            for it in press.components
        ),
    )
    if known is not None and settings != known:
        raise ValueError(f"past_key_values is bounded by another budget or press: it has {known}, got {settings}")
    return settings
