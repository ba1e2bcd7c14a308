"""``MinVariancePress`` and ``H2OPress`` as ordinary kvpress scorers: against eager attention, inside kvpress' own
wrappers."""

import pytest
import torch
from kvpress import AdaKVPress, DecodingPress, ObservedAttentionPress
from transformers import DynamicCache

from kvpress_prob import H2OPress, MinVariancePress, ProbabilisticPress
from tests.helpers.models import tiny_llama, tokens


def captured_scores(model, press, ids):
    """The scores of every layer, as kvpress' own hook asks for them."""
    scores = []
    original = press.score

    def score(*args, **kwargs):
        scores.append(original(*args, **kwargs))
        return scores[-1]

    press.score = score
    press.compression_ratio = 0.5
    with press(model):
        model(ids, past_key_values=DynamicCache())
    return scores


def attentions_of(ids):
    return tiny_llama(attn="eager")(ids, output_attentions=True).attentions


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_h2o_average_is_kvpress_observed_attention(attn):
    ids = tokens(70)
    ours = captured_scores(tiny_llama(attn=attn), H2OPress(average=True), ids)
    theirs = captured_scores(tiny_llama(attn="eager"), ObservedAttentionPress(), ids)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a * 70, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("prior", ["last", "uniform", "harmonic"])
def test_scores_are_the_papers_proposals(prior):
    ids = tokens(60)
    cache = DynamicCache()
    tiny_llama()(ids, past_key_values=cache)
    age = torch.arange(60, 0, -1).double()
    h = {"last": (age == 1).double(), "uniform": torch.ones(60).double(), "harmonic": 1 / age}[prior]
    h = h / h.sum()
    min_h = captured_scores(tiny_llama(), MinVariancePress(prior=prior, centered=False), ids)
    h2o = captured_scores(tiny_llama(), H2OPress(prior=prior), ids)
    for index, attention in enumerate(attentions_of(ids)):
        pbar = (h.view(1, 1, -1, 1) * attention.double()).sum(2)  # [1 hq t]
        norm = cache.layers[index].values.double().norm(dim=-1).repeat_interleave(2, 1)
        pi = pbar * norm / (pbar * norm).sum(-1, keepdim=True)
        torch.testing.assert_close(min_h[index].double(), pi.view(1, 2, 2, 60).mean(2), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(h2o[index].double(), pbar.view(1, 2, 2, 60).mean(2), atol=1e-6, rtol=1e-4)


def test_recorded_and_recomputed_queries_give_the_same_scores():
    ids = tokens(50)
    recomputed = captured_scores(tiny_llama(), MinVariancePress(), ids)
    recorded = captured_scores(tiny_llama(), scorer := MinVariancePress(), ids)
    model, scores = tiny_llama(), []
    scorer = MinVariancePress()
    original = scorer.score
    scorer.score = lambda *args: scores.append(original(*args)) or scores[-1]
    with ProbabilisticPress(scorer, 0.5, seed=0)(model):
        model(ids, past_key_values=DynamicCache())
    for a, b, c in zip(recomputed, recorded, scores, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-6, rtol=1e-5)


def test_max_rows_reads_fewer_rows_and_all_of_them_when_it_can():
    ids = tokens(80)
    exact = captured_scores(tiny_llama(), MinVariancePress(), ids)
    enough = captured_scores(tiny_llama(), MinVariancePress(max_rows=80), ids)
    few = captured_scores(tiny_llama(), MinVariancePress(max_rows=30), ids)
    for a, b, c in zip(exact, enough, few, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert (a - c).abs().sum(-1).max() < 0.35  # total variation x 2


@pytest.mark.parametrize("scorer", [MinVariancePress, H2OPress])
@pytest.mark.parametrize("max_rows", [None, 3])
def test_work_while_decoding(scorer, max_rows):
    """kvpress' DecodingPress scores all entries by the few newest queries."""
    model, cache = tiny_llama(), DynamicCache()
    press = DecodingPress(scorer(max_rows=max_rows), compression_interval=8, target_size=20)
    with press(model):
        model(tokens(40), past_key_values=cache)
        for step in range(20):
            model(tokens(1, seed=step), past_key_values=cache)
    assert cache.layers[0].keys.shape[2] < 20 + 8


def test_few_query_rows_are_the_newest():
    """With the prior on the newest row alone, ten rows say what all rows say."""
    scorer, calls = MinVariancePress(prior="last", compression_ratio=0.5), []
    original = scorer.score
    scorer.score = lambda *args: calls.append(args) or original(*args)
    model = tiny_llama()
    with scorer(model):
        model(tokens(50), past_key_values=DynamicCache())
    module, hidden, keys, values, attentions, kwargs = calls[0]
    newest = tuple(part[:, -10:] for part in kwargs["position_embeddings"])
    few = original(module, hidden[:, -10:], keys, values, attentions, kwargs | {"position_embeddings": newest})
    torch.testing.assert_close(few, original(*calls[0]))
    with pytest.raises(ValueError, match="position_embeddings must cover the 10 tokens of hidden_states, got 50"):
        original(module, hidden[:, -10:], keys, values, attentions, kwargs)


def test_rows_that_see_an_entry_are_counted_among_the_few():
    scorer = H2OPress(average=True, compression_ratio=0.5)
    model, module = tiny_llama(), tiny_llama().model.layers[0].self_attn
    hidden, keys = torch.randn(1, 4, 64), torch.randn(1, 2, 12, 16)
    positions = model.model.rotary_emb(hidden, torch.arange(8, 12)[None])
    plain = H2OPress().score(module, hidden, keys, keys, None, {"position_embeddings": positions})
    rows = torch.tensor([4.0] * 9 + [3, 2, 1])
    average = scorer.score(module, hidden, keys, keys, None, {"position_embeddings": positions})
    torch.testing.assert_close(average, plain / rows)


@pytest.mark.parametrize("scorer", [MinVariancePress, H2OPress])
def test_work_as_top_k_and_inside_kvpress_wrappers(scorer):
    model, ids = tiny_llama(), tokens(40)
    cache = DynamicCache()
    with scorer(compression_ratio=0.5)(model):
        model(ids, past_key_values=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [20, 20]
    with AdaKVPress(scorer(compression_ratio=0.5))(model):
        model(ids, past_key_values=DynamicCache())
    assert len(model.model.layers[0].self_attn.masked_key_indices[0]) == 40


@pytest.mark.parametrize("scorer", [MinVariancePress, H2OPress])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"compression_ratio": 1.0}, r"compression_ratio must be a number in \[0, 1\), got 1.0"),
        ({"compression_ratio": -0.1}, r"compression_ratio must be a number in \[0, 1\), got -0.1"),
        ({"compression_ratio": "half"}, r"compression_ratio must be a number in \[0, 1\), got 'half'"),
        ({"prior": "first"}, "prior must be one of .*got 'first'"),
        ({"max_rows": 0}, "max_rows must be None or an integer >= 1, got 0"),
        ({"max_rows": 2.5}, "max_rows must be None or an integer >= 1, got 2.5"),
    ],
)
def test_refuse_bad_parameters(scorer, kwargs, message):
    with pytest.raises(ValueError, match=message):
        scorer(**kwargs)
