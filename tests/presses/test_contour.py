"""ContourKV: one threshold for all heads of all layers, budgets in entries, and what rectangular caches would hold."""

import re

import pytest
import torch
from kvpress import CriticalKVPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache

from kvpress_prob import AttentionPress, CompressionReport, MinVariancePress, ProbabilisticPress, Reconstruction
from kvpress_prob import make_press as press_by_name
from kvpress_prob.hf import RaggedLayer
from kvpress_prob.prefills.shared_prefill import SharedPrefill
from kvpress_prob.sources import kvzip_prompt
from tests.helpers.models import tiny_llama, tokens
from tests.presses.test_scorers import captured_scores


def contour(name: str, entries: int) -> ProbabilisticPress:
    press = press_by_name(name)
    press.entries_per_head = entries
    return press


def compressed(model, press, ids, **kwargs) -> DynamicCache:
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache, **kwargs)
    return cache


def kept_keys(cache) -> list[torch.Tensor]:
    """Keys that every head of every layer keeps, in order."""
    return [layer.store.segment(0, head)[0] for layer in cache.layers for head in range(layer.store.kv_heads)]


def by_hand(scores: list[torch.Tensor], entries: int, floor: int) -> torch.Tensor:
    """Kept entries [cells t]: the newest ``floor`` of each, and everything at or above one threshold."""
    cells = torch.cat([layer[0] for layer in scores]).double()
    cells[:, -floor:] = -1
    left = entries * len(cells) - floor * len(cells)
    tau = cells.flatten().sort(descending=True).values[left - 1]
    kept = cells >= tau
    assert int(kept.sum()) == left, "the example has a tie at the threshold"
    kept[:, -floor:] = True
    return kept


def keys_of(model, ids, kept: torch.Tensor) -> list[torch.Tensor]:
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    return [keys[mask] for keys, mask in zip(torch.cat([layer.keys[0] for layer in cache.layers]), kept, strict=True)]


@pytest.mark.parametrize("entries", [33, 40, 64])
def test_the_window_version_is_one_threshold_over_snapkv(entries):
    model, ids = tiny_llama(layers=3), tokens(120)
    kept = by_hand(captured_scores(model, SnapKVPress(window_size=32), ids), entries, 32)
    press = contour("contourkv_window", entries)
    cache = compressed(model, press, ids)
    for got, want in zip(kept_keys(cache), keys_of(model, ids, kept), strict=True):
        assert torch.equal(got, want)
    assert int(press.report.kept.sum()) == entries * 6
    assert press.report.kept.flatten().tolist() == kept.sum(-1).tolist()
    assert all(not layer.store.log_w[: layer.store.length[0]].any() for layer in cache.layers)


@pytest.mark.parametrize("entries", [33, 48])
def test_the_reconstruction_version_is_one_threshold_over_kvzips_scores(pipe, entries):
    ids = tokens(120)
    prompt, skip = kvzip_prompt(pipe.tokenizer)
    scorer = AttentionPress(source=Reconstruction(prompt=prompt, skip=skip, n_sink=4), statistic="max")
    scores = scorer.score_context(SharedPrefill.run(pipe.model, ids).prefill)
    kept = by_hand(scores, entries, 32)
    cache = compressed(pipe.model, contour("contourkv", entries), ids)
    for got, want in zip(kept_keys(cache), keys_of(pipe.model, ids, kept), strict=True):
        assert torch.equal(got, want)


def test_ties_at_the_threshold_go_to_the_earlier_entry():
    class Flat(StreamingLLMPress):
        scores_are = "weights"

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return torch.ones(keys.shape[:3])

    model, ids = tiny_llama(layers=1), tokens(60)
    settings = {"sampler": "top_k", "correction": "none", "allocation": "head", "n_recent": 8}
    cache = compressed(model, ProbabilisticPress(Flat(), entries_per_head=20, **settings), ids)
    first = torch.zeros(2, 60, dtype=torch.bool)
    first[:, :12] = first[:, 52:] = True
    for got, want in zip(kept_keys(cache), keys_of(model, ids, first), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("press", ["contourkv_window", "prob_fast"])
def test_a_budget_of_no_less_than_the_context_keeps_everything(press):
    model, ids = tiny_llama(), tokens(50)
    for entries in (50, 80):
        one = contour(press, entries)
        cache = compressed(model, one, ids)
        assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers)
        assert one.report.achieved_ratio == one.report.target_ratio == 0


@pytest.mark.parametrize(
    "scorer", [MinVariancePress(), StreamingLLMPress(n_sink=2), CriticalKVPress(SnapKVPress(window_size=8))]
)
def test_every_batch_row_has_its_own_share(scorer):
    """As each alone: 30 of 90 entries, 30 of 40, and all of 20; what has no score is kept too where all fit."""
    model, ids = tiny_llama(), tokens(90, batch=3)
    lengths = [90, 40, 20]
    mask = torch.stack([(torch.arange(90) >= 90 - length).long() for length in lengths])
    press = ProbabilisticPress(scorer, entries_per_head=30, seed=0)
    cache = compressed(model, press, ids, attention_mask=mask)
    assert (press.report.kept.double().mean((0, 2)) - torch.tensor([30.0, 30.0, 20.0])).abs().max() <= 1
    assert press.report.target_ratio == pytest.approx(1 - 80 / 150)
    for row, length in enumerate(lengths):
        alone = ProbabilisticPress(scorer, entries_per_head=30, seed=0)
        single = compressed(model, alone, ids[row : row + 1, 90 - length :])
        assert torch.equal(press.report.kept[:, row], alone.report.kept[:, 0])
        for layer, other in zip(cache.layers, single.layers, strict=True):
            for head in range(2):
                got = layer.store.segment(row, head)[1]
                want = other.store.segment(0, head)[1] if isinstance(other, RaggedLayer) else other.values[0, head]
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sampler", ["systematic", "multinomial", "top_k"])
def test_a_row_that_fits_beside_one_that_does_not(sampler):
    model, ids = tiny_llama(), tokens(90, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :60] = 0
    press = ProbabilisticPress(MinVariancePress(), entries_per_head=40, sampler=sampler, correction="none", seed=0)
    compressed(model, press, ids, attention_mask=mask)
    assert (press.report.kept[:, 1] == 30).all()
    # At most 4.5 standard deviations of the mean of four heads for the sampler that hits its budget on average only.
    bound = 4.5 * (90 * 40 / 90 * 50 / 90 / 4) ** 0.5 if sampler == "multinomial" else 1
    assert press.report.kept[:, 0].double().mean() == pytest.approx(40, abs=bound)


def test_protected_entries_alone_and_fewer_than_those():
    model, ids = tiny_llama(), tokens(120)
    press = contour("contourkv_window", 32)
    compressed(model, press, ids)
    assert (press.report.kept == 32).all()
    press = contour("contourkv_window", 20)
    with pytest.warns(UserWarning, match="protected entries alone exceed the budget"):
        compressed(model, press, ids)
    assert (press.report.kept == 32).all()
    press = ProbabilisticPress(MinVariancePress(), entries_per_head=12, n_sink=4, n_recent=8)
    compressed(model, press, ids)
    assert (press.report.kept == 12).all()


def test_scorers_that_know_the_ratio_are_told_it():
    told = []

    class Streaming(StreamingLLMPress):
        def score(self, *args, **kwargs):
            told.append(self.compression_ratio)
            return super().score(*args, **kwargs)

    press = ProbabilisticPress(Streaming(), entries_per_head=30)
    compressed(tiny_llama(), press, tokens(120))
    assert told == [pytest.approx(0.75)] * 2
    assert press.press.compression_ratio == 0  # and it is after the block what it was before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entries_per_head": 0}, "entries_per_head must be None or an integer >= 1, got 0"),
        ({"entries_per_head": 2.5}, "entries_per_head must be None or an integer >= 1, got 2.5"),
        ({"entries_per_head": 8, "compression_ratio": 0.5}, "must be 0 where entries_per_head is given, got 0.5"),
    ],
)
def test_bad_budgets(settings, message):
    with pytest.raises(ValueError, match=message):
        ProbabilisticPress(MinVariancePress(), **settings)


def test_kvzips_prompt_needs_a_tokenizer_and_its_own_skip():
    with pytest.raises(ValueError, match="skip must be 0 with prompt='kvzip', which has its own, got 3"):
        Reconstruction(prompt="kvzip", skip=3)
    with pytest.raises(ValueError, match="prompt must be None, 'kvzip' or callable, got 'please'"):
        Reconstruction(prompt="please")
    with pytest.raises(ValueError, match="prompt='kvzip' needs a tokenizer beside the model ''"):
        compressed(tiny_llama(), contour("contourkv", 40), tokens(80))


def test_padded_ratio_is_what_one_length_a_layer_would_hold():
    kept = torch.tensor([[[3, 1], [2, 2]], [[4, 0], [1, 5]]])  # [layers b hkv]
    report = CompressionReport(0.5, [6, 6], [0, 1], kept, kept.double(), None, 0, 0, 0, None)
    assert report.padded_ratio == (2 * (3 + 2) + 2 * (4 + 5)) / 18
    assert re.search(r"padded +1\.56", str(report))
