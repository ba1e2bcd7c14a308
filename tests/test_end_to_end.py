"""The main job, against the oracle: a prefill inside ``with press(model)``, then decoding over the compressed cache."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvpress_prob import H2OPress, MinVariancePress, ProbabilisticPress
from tests.helpers.models import tiny_gemma3, tiny_llama, tokens
from tests.helpers.oracle import biases_of, oracle_attention


def compress(model, ids, press, **kwargs) -> DynamicCache:
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache, **kwargs)
    return cache


def dense(model, ids, **kwargs) -> DynamicCache:
    cache = DynamicCache()
    model(ids, past_key_values=cache, **kwargs)
    return cache


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("ratio", [0.3, 0.9])
@pytest.mark.parametrize(
    ("sampler", "correction"),
    [("systematic", "inclusion"), ("multinomial", "counts"), ("multinomial", "inclusion"), ("systematic", "none")],
)
def test_decoding_equals_the_oracle(attn, ratio, sampler, correction):
    model = tiny_llama(attn=attn)
    ids, question, answer = tokens(100), tokens(7, seed=1), tokens(1, seed=2)
    press = ProbabilisticPress(MinVariancePress(), ratio, sampler=sampler, correction=correction, seed=3)
    cache, full = compress(model, ids, press), dense(model, ids)
    biases = biases_of(cache, full)
    assert sum(int((bias > -torch.inf).sum()) for bias in biases.values()) == int(press.report.kept.sum())

    for step in (question, answer, answer):
        got = model(step, past_key_values=cache).logits
        with oracle_attention(model, biases):
            want = model(step, past_key_values=full).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_sliding_layers_stay_as_they_are(attn):
    model = tiny_gemma3(attn=attn)
    ids, question = tokens(40), tokens(5, seed=1)
    press = ProbabilisticPress(H2OPress(), 0.5, seed=0)
    cache, full = compress(model, ids, press), dense(model, ids)
    assert press.report.layers == [5]
    for index in range(5):
        assert torch.equal(cache.layers[index].keys, full.layers[index].keys)
    biases = biases_of(cache, full)
    got = model(question, past_key_values=cache).logits
    with oracle_attention(model, biases):
        want = model(question, past_key_values=full).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", [1, 2, 3, 8, 50])
def test_ratio_zero_is_dense_to_the_bit(context):
    """Scenarios S1 and S25: nothing of this package is left in the way of decoding."""
    model = tiny_llama()
    ids, question = tokens(context), tokens(4, seed=1)
    press = ProbabilisticPress(MinVariancePress(), 0.0)
    cache, full = compress(model, ids, press), dense(model, ids)
    assert press.report.achieved_ratio == 0
    assert all(type(layer) is DynamicLayer for layer in cache.layers)
    assert torch.equal(model(question, past_key_values=cache).logits, model(question, past_key_values=full).logits)


def test_infinite_temperature_is_no_correction():
    model = tiny_llama()
    ids, question = tokens(80), tokens(3, seed=1)
    hot = compress(model, ids, ProbabilisticPress(MinVariancePress(), 0.5, temperature=float("inf"), seed=0))
    none = compress(model, ids, ProbabilisticPress(MinVariancePress(), 0.5, correction="none", seed=0))
    assert torch.equal(model(question, past_key_values=hot).logits, model(question, past_key_values=none).logits)
