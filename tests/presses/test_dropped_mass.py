"""Attention of the newest rows that falls on evicted entries, in the report on request."""

import pytest
import torch
from transformers import DynamicCache

from kvpress_prob import MinVariancePress, ProbabilisticPress
from tests.helpers.models import tiny_llama, tokens
from tests.helpers.oracle import biases_of


def compressed(model, ids, mask=None, **settings):
    press = ProbabilisticPress(MinVariancePress(), compression_ratio=0.6, seed=0, **settings)
    cache = DynamicCache()
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache)
    return press.report, cache


def test_is_the_eager_attention_outside_the_kept_entries():
    """Two batch rows, one left-padded: mean over the newest 32 rows and the heads of a group."""
    model = tiny_llama(attn="eager")
    ids, mask = tokens(70, batch=2), torch.ones(2, 70, dtype=torch.long)
    mask[1, :20] = 0
    report, cache = compressed(model, ids, mask, measure_dropped_mass=True)
    attentions = model(ids, attention_mask=mask, output_attentions=True).attentions
    heads = model.config.num_key_value_heads
    dense = DynamicCache()
    model(ids, attention_mask=mask, past_key_values=dense)
    biases = biases_of(cache, dense)
    assert report.dropped_mass.shape == (len(attentions), 2, heads)
    for layer, attention in enumerate(attentions):
        kept = biases[layer].isfinite()  # [b hkv t]
        mean = attention[:, :, -32:].mean(2).unflatten(1, (heads, -1)).mean(2)
        want = (mean * ~kept).sum(-1)
        torch.testing.assert_close(report.dropped_mass[layer].float(), want, atol=1e-5, rtol=1e-4)
    assert 0 < report.dropped_mass.min() < report.dropped_mass.max() < 1
    assert "dropped  attention of the newest rows" in str(report)


def test_only_on_request_and_without_effect():
    model, ids = tiny_llama(), tokens(60)
    silent, one = compressed(model, ids)
    measured, other = compressed(model, ids, measure_dropped_mass=True)
    assert silent.dropped_mass is None
    assert "dropped" not in str(silent)
    assert measured.dropped_mass is not None
    assert torch.equal(silent.kept, measured.kept)
    for a, b in zip(one.layers, other.layers, strict=True):
        for head in range(2):
            assert all(
                torch.equal(*parts) for parts in zip(a.store.segment(0, head), b.store.segment(0, head), strict=True)
            )


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_grows_with_the_ratio(ratio):
    model, ids = tiny_llama(), tokens(80)
    masses = []
    for r in (ratio, ratio + 0.05):
        press = ProbabilisticPress(MinVariancePress(), compression_ratio=r, seed=0, sampler="top_k",
                                   correction="none", measure_dropped_mass=True)  # fmt: skip
        with press(model):
            model(ids, past_key_values=DynamicCache())
        masses.append(press.report.dropped_mass)
    assert (masses[1] >= masses[0]).all()
    assert masses[1].sum() > masses[0].sum()
