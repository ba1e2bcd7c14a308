"""``ProbabilisticPress``: parameters, every kvpress scorer as a proposal, budgets, reports, seeds and re-use."""

from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import pytest
import torch
from kvpress import (
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import DynamicCache

from kvpress_prob import (
    PRESSES,
    AttentionPress,
    Component,
    H2OPress,
    Lookahead,
    MinVariancePress,
    ProbabilisticPress,
    make_press,
)
from kvpress_prob.hf import RaggedLayer, cache_bytes
from tests.helpers.compare import assert_equals_oracle, dense
from tests.helpers.models import tiny_gemma3, tiny_llama, tokens
from tests.helpers.oracle import biases_of


def run(press, length=128, model=None, seed=0):
    model = model or tiny_llama()
    cache = DynamicCache()
    with press(model):
        model(tokens(length, seed=seed), past_key_values=cache)
    return cache


def stored(cache):
    return [layer.store.length.tolist() for layer in cache.layers]


SCORERS = {
    "snapkv": lambda: SnapKVPress(window_size=8),
    "tova": TOVAPress,
    "expected": ExpectedAttentionPress,
    "knorm": KnormPress,
    "keydiff": KeyDiffPress,
    "random": RandomPress,
    "streaming": StreamingLLMPress,
    "h2o": H2OPress,
    "min": lambda: MinVariancePress(prior="last"),
}


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
def test_any_scorer_is_a_proposal(name, sampler):
    """Scenario S6: sentinels become the take-all stratum, negative scores are mapped, budgets hold."""
    press = ProbabilisticPress(SCORERS[name](), 0.5, sampler=sampler, seed=0)
    cache = run(press)
    protected = {"snapkv": range(120, 128), "tova": [127], "expected": range(4)}.get(name, [])
    for layer in cache.layers:
        for head in range(2):
            keys, _, log_w = layer.store.segment(0, head)
            assert torch.isfinite(log_w).all()
            assert (log_w == 0).sum() >= len(protected)
            assert len(keys) >= 1
    slack = 0.01 if sampler == "systematic" else 0.06
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=slack)


@pytest.mark.parametrize(
    ("scorer", "protected"),
    [
        (SnapKVPress(window_size=8), slice(-8, None)),
        (TOVAPress(), slice(-1, None)),
        (ExpectedAttentionPress(n_sink=4), slice(None, 4)),
    ],
    ids=lambda it: type(it).__name__,
)
@pytest.mark.parametrize(("sampler", "correction"), [("systematic", "inclusion"), ("multinomial", "counts")])
def test_protected_entries_are_all_kept(scorer, protected, sampler, correction):
    """Scenario S6: with weight 1, which no count of draws gives them."""
    model, ids = tiny_llama(), tokens(128)
    cache, uncompressed = DynamicCache(), DynamicCache()
    with ProbabilisticPress(scorer, 0.9, sampler=sampler, correction=correction, seed=0)(model):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=uncompressed)
    for layer, full in zip(cache.layers, uncompressed.layers, strict=True):
        for head in range(2):
            keys, _, log_w = layer.store.segment(0, head)
            assert torch.equal(keys[protected], full.keys[0, head, protected])
            assert (log_w[protected] == 0).all()


def test_sinks_and_recent_entries_are_kept():
    model, ids = tiny_llama(), tokens(128)
    cache, uncompressed = DynamicCache(), DynamicCache()
    press = ProbabilisticPress(H2OPress(), 0.8, n_sink=3, n_recent=5, seed=0)
    with press(model):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=uncompressed)
    for layer, full in zip(cache.layers, uncompressed.layers, strict=True):
        keys, _, log_w = layer.store.segment(0, 1)
        assert torch.equal(keys[:3], full.keys[0, 1, :3])
        assert torch.equal(keys[-5:], full.keys[0, 1, -5:])
        assert (log_w[:3] == 0).all()
        assert (log_w[-5:] == 0).all()
    assert press.report.achieved_ratio == pytest.approx(0.8, abs=0.01)


class Given(ScorerPress):
    """Scores that a test makes: ``make(layer index)`` is [1, 2, t]."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.make(module.layer_idx)


def zeros_and_ones(layer):
    """Half of the entries must never be drawn."""
    scores = torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(layer))
    scores[..., ::2] = 0
    return scores


def all_zero_row(layer):
    scores = torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(layer))
    scores[0, layer] = 0
    return scores


def one_hot(layer):
    scores = torch.zeros(1, 2, 60)
    scores[0, 0, 7], scores[0, 1, 59] = 1e-30, 3e30
    return scores


DEGENERATE = {zeros_and_ones: (1, 30), all_zero_row: (1, 60), one_hot: (1, 1)}


@pytest.mark.parametrize("scores", DEGENERATE, ids=lambda function: function.__name__)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
@pytest.mark.parametrize("weighting", ["uniform", "score"])
def test_degenerate_scores(scores, ratio, sampler, weighting):
    """Scenario S7: entries of score 0 are never kept, a head of zeros is drawn uniformly, every search ends."""
    model = tiny_llama()
    press = ProbabilisticPress(Given(scores), ratio, sampler=sampler, budget_weighting=weighting, seed=0)
    support = sum(int(((given > 0) | (given == 0).all(-1, True)).sum()) for given in (scores(0), scores(1)))
    sharp = scores is all_zero_row and (ratio, sampler, weighting) == (0.1, "multinomial", "score")
    short = support < (1 - ratio) * 240 - 4
    with pytest.warns(UserWarning, match="fewer entries than the budget") if short or sharp else nullcontext():
        cache = run(press, 60, model)
    full = dense(model, tokens(60))
    least, most = DEGENERATE[scores]
    for layer, bias in biases_of(cache, full).items():
        kept = bias > -torch.inf
        assert ((kept.sum(-1) >= least) & (kept.sum(-1) <= most)).all()
        given = scores(layer)
        assert not kept[(given == 0) & (given > 0).any(-1, keepdim=True)].any()
        assert bias[kept].isfinite().all()
    assert_equals_oracle(model, cache, full, [tokens(3, seed=1)])


@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
@pytest.mark.parametrize("weighting", ["uniform", "score"])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.97])
def test_a_head_of_tiny_scores_under_one_budget_for_all(sampler, weighting, ratio):
    """Scenario S2: one head's scores are 1e-6 of the others'; no head is empty and the report adds up."""

    def scores(layer):
        scores = torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(layer))
        if layer == 1:
            scores[0, 0] *= 1e-6
        return scores

    model = tiny_llama()
    press = ProbabilisticPress(Given(scores), ratio, sampler=sampler, budget_weighting=weighting, seed=0)
    cache = run(press, 60, model)
    assert press.report.kept.squeeze(1).tolist() == stored(cache)
    assert all(length >= 1 for layer in stored(cache) for length in layer)
    slack = 4 / 240 if sampler == "systematic" else 4 * (ratio * (1 - ratio) / 240) ** 0.5 + 2 / 240
    assert abs(press.report.achieved_ratio - ratio) <= slack
    assert_equals_oracle(model, cache, dense(model, tokens(60)), [tokens(3, seed=1)])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused_naming_the_layer(bad):
    class Broken(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            scores = torch.rand(keys.shape[:3])
            scores[0, 0, 3] = bad if module.layer_idx == 1 else 0.5
            return scores

    with pytest.raises(ValueError, match="scores of layer 1 must be finite"):
        run(ProbabilisticPress(Broken(), 0.5))


@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
def test_report_adds_up(allocation):
    """Scenario S4: ratio 0.37, context 101; the systematic sampler is within one entry a head of its budget."""
    press = ProbabilisticPress(MinVariancePress(), 0.37, allocation=allocation, seed=0)
    cache = run(press, length=101)
    report = press.report
    assert report.kept.shape == (2, 1, 2)
    assert report.kept.squeeze(1).tolist() == stored(cache)
    assert report.achieved_ratio == 1 - sum(map(sum, stored(cache))) / (4 * 101)
    assert abs(report.achieved_ratio - 0.37) <= 1 / 101
    if allocation == "head":
        assert ((report.kept - 0.63 * 101).abs() <= 1).all()
    assert report.bytes_after == cache_bytes(cache)
    assert report.bytes_before == 2 * 2 * 2 * 101 * 16 * 4
    assert torch.allclose(torch.tensor(report.layer_ratios).mean(), torch.tensor(report.achieved_ratio))
    assert (report.effective <= report.kept + 1e-6).all()
    text = str(report)
    assert "target 0.3700" in text
    assert f"achieved {report.achieved_ratio:.4f}" in text


@torch.no_grad()
@pytest.mark.parametrize("scorer", [MinVariancePress(), SnapKVPress(window_size=8), KnormPress()])
@pytest.mark.parametrize(
    "settings",
    [
        {"proposal_temperature": float("inf"), "n_sink": 4},
        {"proposal_temperature": 1e-300},
        {"temperature": 1e-40},
        {"temperature": float("inf")},
    ],
)
def test_extreme_temperatures_are_limits(scorer, settings):
    """Scenario S35: the uniform draw, top-k, the largest weights that there are, and none."""
    model, press = tiny_llama(), ProbabilisticPress(scorer, 0.5, seed=0, **settings)
    cache = run(press, model=model, length=120)
    assert abs(press.report.achieved_ratio - 0.5) <= 1 / 120
    assert model(tokens(3), past_key_values=cache).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("family", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.95])
def test_the_report_bounds_the_bytes_of_every_later_moment(family, ratio):
    """Scenario S39, seen by a user: a token at a time, a few at a time, and many at once."""
    model, press = family().eval(), ProbabilisticPress(KnormPress(), ratio, seed=0)
    cache = run(press, model=model, length=700)
    report, generated = press.report, 0
    entry = 2 * 2 * (2 * 16 * 4 + (4 if ratio else 0))
    assert report.bytes_per_token == entry if family is tiny_llama else report.bytes_per_token > 0
    assert f"{report.bytes_per_token / 1e3:.2f} kB a further token" in str(report)
    for step in [1] * 40 + [7] * 40 + [500, 1, 1]:
        model(tokens(step), past_key_values=cache)
        generated += step
        assert cache_bytes(cache) <= report.bytes_while_decoding(generated)
    assert cache_bytes(cache) > report.bytes_while_decoding(0) or family is not tiny_llama
    with pytest.raises(ValueError, match="tokens must be an integer >= 0, got -1"):
        report.bytes_while_decoding(-1)


def test_multinomial_report_has_one_number_of_draws():
    press = ProbabilisticPress(H2OPress(), 0.5, sampler="multinomial", correction="counts", seed=0)
    run(press)
    assert press.report.draws.shape == (2, 1, 2)
    assert press.report.draws.unique().numel() == 1


def test_memory_is_the_formula():
    """Scenario S22: context 2,048, ratio 0.75."""
    press = ProbabilisticPress(H2OPress(), 0.75, seed=0)
    cache = run(press, length=2048)
    kept = int(press.report.kept.sum())
    slack = 4 * 32 * (2 * 16 * 4 + 4)
    assert cache_bytes(cache) == kept * (2 * 16 * 4 + 4) + slack + 4 * 2 * 8
    assert cache_bytes(cache) < 0.28 * press.report.bytes_before


def test_dense_tensors_are_released():
    """Scenario S22: with the prefill's last layer, not with the block."""
    import gc
    import weakref

    model, ids = tiny_llama(), tokens(64)
    cache = DynamicCache()
    references = []

    class Watching(H2OPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            references.extend([weakref.ref(keys), weakref.ref(values), weakref.ref(kwargs["attention_inputs"].query)])
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    with ProbabilisticPress(Watching(), 0.5, seed=0)(model):
        model(ids, past_key_values=cache)
        gc.collect()
        assert len(references) == 6
        assert all(reference() is None for reference in references)


def test_the_ratio_can_be_set_after_construction():
    press = ProbabilisticPress(StreamingLLMPress(n_sink=2), seed=0)
    press.compression_ratio = 0.5
    run(press, length=40)
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.03)
    assert press.press.compression_ratio == 0
    press.compression_ratio = 1.5
    with pytest.raises(ValueError, match="compression_ratio must be a number"), press(tiny_llama()):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_seeds_and_the_global_random_state(dtype):
    """Scenario S11."""
    press = ProbabilisticPress(H2OPress(), 0.5, seed=7)
    model = tiny_llama(dtype=dtype)
    before = torch.get_rng_state()
    first = run(press, model=model)
    assert torch.equal(before, torch.get_rng_state())
    again, other = run(press, model=model), run(ProbabilisticPress(H2OPress(), 0.5, seed=8), model=model)
    for a, b, c in zip(first.layers, again.layers, other.layers, strict=True):
        assert torch.equal(a.store.keys[: a.store.length[0]], b.store.keys[: b.store.length[0]])
        assert a.store.keys.shape != c.store.keys.shape or not torch.equal(a.store.keys[:40], c.store.keys[:40])
    assert press.report.seed == 7


def test_without_a_seed_every_draw_is_fresh_and_reported():
    press = ProbabilisticPress(H2OPress(), 0.5)
    first = run(press)
    seed = press.report.seed
    run(press)
    assert press.report.seed != seed
    again = run(ProbabilisticPress(H2OPress(), 0.5, seed=seed))
    assert stored(first) == stored(again)
    assert torch.equal(first.layers[1].store.segment(0, 1)[0], again.layers[1].store.segment(0, 1)[0])


def test_one_press_many_contexts():
    """Scenario S13: contexts of 200, 80, 200 tokens; the third equals a fresh press', and each is really compressed."""
    press, model = ProbabilisticPress(MinVariancePress(), 0.5, seed=0), tiny_llama()
    for length in (200, 80, 200):
        cache = run(press, length, model)
        assert sum(map(sum, stored(cache))) == pytest.approx(2 * length, abs=4)
    fresh = run(ProbabilisticPress(MinVariancePress(), 0.5, seed=0), 200)
    assert stored(cache) == stored(fresh)
    assert torch.equal(cache.layers[0].store.segment(0, 0)[2], fresh.layers[0].store.segment(0, 0)[2])


@pytest.mark.parametrize("context", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
def test_tiny_contexts(context, ratio, sampler):
    """Scenario S1."""
    model = tiny_llama()
    cache = run(ProbabilisticPress(MinVariancePress(), ratio, sampler=sampler, seed=0), context, model)
    assert all(length >= 1 for layer in stored(cache) for length in layer)
    assert torch.isfinite(model(tokens(1), past_key_values=cache).logits).all()


@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
def test_a_one_layer_model(allocation, sampler):
    """Scenario S3."""
    model = tiny_llama(layers=1)
    cache = run(ProbabilisticPress(H2OPress(), 0.5, allocation=allocation, sampler=sampler, seed=0), model=model)
    assert isinstance(cache.layers[0], RaggedLayer)
    assert_equals_oracle(model, cache, dense(model, tokens(128)), [tokens(3, seed=1), tokens(1)])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"compression_ratio": 1}, r"compression_ratio must be a number in \[0, 1\), got 1"),
        ({"compression_ratio": 1.5}, r"compression_ratio must be a number in \[0, 1\), got 1.5"),
        ({"compression_ratio": -0.1}, r"compression_ratio must be a number in \[0, 1\), got -0.1"),
        ({"compression_ratio": float("nan")}, r"compression_ratio must be a number in \[0, 1\), got nan"),
        ({"compression_ratio": "half"}, r"compression_ratio must be a number in \[0, 1\), got 'half'"),
        ({"sampler": "uniform"}, "sampler must be one of .*got 'uniform'"),
        ({"correction": "exact"}, "correction must be one of .*got 'exact'"),
        ({"correction": "counts"}, "correction='counts' needs sampler='multinomial', got sampler='systematic'"),
        ({"temperature": 0}, "temperature must be a number > 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be a number > 0, got nan"),
        ({"proposal_temperature": -1.0}, "proposal_temperature must be a number > 0, got -1.0"),
        ({"uniform_mix": 1.5}, r"uniform_mix must be a number in \[0, 1\], got 1.5"),
        ({"allocation": "pyramid"}, "allocation must be one of .*got 'pyramid'"),
        ({"budget_weighting": "max"}, "budget_weighting must be one of .*got 'max'"),
        ({"n_sink": -1}, "n_sink must be an integer >= 0, got -1"),
        ({"n_recent": 1.5}, "n_recent must be an integer >= 0, got 1.5"),
        ({"n_recent": 2**70}, r"n_recent must be below 2\^63, got 1180591620717411303424"),
        ({"compression_ratio": Fraction(1, 2)}, r"compression_ratio must be a number in \[0, 1\), got Fraction"),
        ({"seed": "one"}, r"seed must be None or an integer in \[-2\^63, 2\^64\), got 'one'"),
    ],
)
def test_refuses_bad_parameters(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ProbabilisticPress(H2OPress(), **kwargs)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (partial(ProbabilisticPress, H2OPress()), "measure_dropped_mass"),
        (H2OPress, "average"),
        (MinVariancePress, "centered"),
        (AttentionPress, "project"),
        (Lookahead, "by_likelihood"),
    ],
)
@pytest.mark.parametrize("value", ["no", 2, None])
def test_flags_are_true_or_false(of, name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        of(**{name: value})


@pytest.mark.parametrize("share", ["a", True, 1.5, float("nan")])
def test_shares_that_are_no_shares_are_refused(share):
    with pytest.raises(ValueError, match=r"share must be a number in \[0, 1\], got"):
        ProbabilisticPress([Component(H2OPress(), share), Component(MinVariancePress())])
    with pytest.raises(ValueError, match="share of the components must be"):
        ProbabilisticPress([Component(H2OPress(), lambda ratio: share), Component(MinVariancePress())])


def test_refuses_what_is_not_a_scorer():
    with pytest.raises(TypeError, match="press must be a kvpress ScorerPress, got str"):
        ProbabilisticPress("snapkv")
    with pytest.raises(TypeError, match="press must be a kvpress ScorerPress, got ProbabilisticPress"):
        ProbabilisticPress(ProbabilisticPress(H2OPress()))


def test_is_not_a_per_layer_press():
    with pytest.raises(NotImplementedError, match="use it as the outermost press"):
        ProbabilisticPress(H2OPress()).compress(None, None, None, None, None, {})


@pytest.mark.parametrize("name", sorted(PRESSES))
def test_every_registered_press_compresses(name, pipe):
    press = make_press(name, 0.5)
    assert make_press(name) is not make_press(name)
    run(press, length=140, model=pipe.model if name == "contourkv" else None)  # whose prompt needs a tokenizer
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.06)


def test_the_papers_presses_are_the_paper_to_the_letter():
    for name in ("prob_min", "prob_min_h", "prob_h2o", "prob_h2o_h"):
        press = make_press(name)
        assert (press.sampler, press.correction, press.temperature) == ("multinomial", "counts", 1.0)
        assert not getattr(press.press, "centered", False)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"name must be one of .*'prob_best'.*got 'best'"):
        make_press("best")
