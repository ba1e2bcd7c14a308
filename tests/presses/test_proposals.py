"""Any scorer as a proposal: what its scores are, what it protects, its own rows alone, and what warns.

``SCORERS`` has a row for every ``ScorerPress`` of kvpress 0.5.5; ``docs/proposals.md`` is written from it.
"""

import pytest
import torch
from kvpress import CriticalKVPress, KnormPress, LagKVPress, ScorerPress, SnapKVPress, StreamingLLMPress
from transformers import DynamicCache

from kvpress_prob import Component, H2OPress, MinVariancePress, ProbabilisticPress
from kvpress_prob.hf import watch_prefills
from kvpress_prob.presses.kvpress_scorers import score_rule
from tests.helpers.models import tiny_llama, tokens
from tests.helpers.oracle import biases_of
from tests.helpers.scorers import PATH, SCORERS, page, presses


def t1(**settings):
    """The scenarios' model T1."""
    return tiny_llama(layers=4, heads=8, kv_heads=4, head_dim=32, **settings)


class Given(ScorerPress):
    """Scores that a test makes: ``make(layer index, keys)`` is [b, hkv, t]."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.make(module.layer_idx, keys)


def kept_and_weights(model, press, ids, **settings):
    """Kept entries and log-weights [b hkv t] of every layer, padding as not kept."""
    cache, full = DynamicCache(), DynamicCache()
    with press(model):
        model(ids, past_key_values=cache, **settings)
    model(ids, past_key_values=full, **settings)
    return biases_of(cache, full)


ORDINARY = {
    "ranks": lambda layer, keys: torch.arange(keys.shape[2]).float().expand(keys.shape[:3]),
    "integer ranks": lambda layer, keys: torch.arange(keys.shape[2]).expand(keys.shape[:3]),
    "ranks from the end": lambda layer, keys: torch.arange(keys.shape[2]).flip(0).expand(keys.shape[:3]),
    "ranks by key": lambda layer, keys: keys.norm(dim=-1).argsort(-1).argsort(-1),
    "negative ranks": lambda layer, keys: -torch.arange(keys.shape[2]).expand(keys.shape[:3]),
    "fractions": lambda layer, keys: (torch.arange(keys.shape[2]) / keys.shape[2]).expand(keys.shape[:3]),
    "halves": lambda layer, keys: (torch.arange(keys.shape[2]) + 0.5).expand(keys.shape[:3]),
    "counts": lambda layer, keys: (keys[..., 0] * 1e3).long() % 8,
    "int32 counts": lambda layer, keys: ((keys[..., 0] * 1e3).long() % 8).int(),
    "float16": lambda layer, keys: keys.norm(dim=-1).half(),
    "booleans": lambda layer, keys: keys[..., 0] > -9,
    "zeros": lambda layer, keys: torch.zeros(keys.shape[:3]),
    "ones": lambda layer, keys: torch.ones(keys.shape[:3]),
    "constant": lambda layer, keys: torch.full(keys.shape[:3], -2.5),
    "powers of ten": lambda layer, keys: 10.0 ** (torch.arange(keys.shape[2]) % 60 - 30).expand(keys.shape[:3]),
}


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("allocation", ["global", "head"])
def test_ordinary_scores_reach_the_ratio(name, ratio, allocation):
    """Scenario S34: nothing is taken for a mark; integers work. A ratio that the zeros forbid warns."""
    press = ProbabilisticPress(Given(ORDINARY[name]), ratio, allocation=allocation, seed=0)
    model = tiny_llama()
    if "counts" in name and ratio == 0.1:
        with pytest.warns(UserWarning, match="fewer entries than the budget have a score above 0"), press(model):
            model(tokens(151), past_key_values=DynamicCache())
        return
    with press(model):
        model(tokens(151), past_key_values=DynamicCache())
    assert abs(press.report.achieved_ratio - ratio) <= 1 / 151 + 1e-9
    if allocation == "head":
        assert ((press.report.kept - (1 - ratio) * 151).abs() <= 1).all()


@pytest.mark.parametrize("sampler", ["systematic", "multinomial"])
@pytest.mark.parametrize("weighting", ["uniform", "score"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_one_warning_when_too_few_entries_have_a_score(sampler, weighting, dtype):
    """Scenarios S34 and S38: one-hot scores."""
    scores = torch.eye(60)[7].to(dtype)
    scorer = Given(lambda layer, keys: scores.expand(keys.shape[:3]))
    press = ProbabilisticPress(scorer, 0.5, sampler=sampler, budget_weighting=weighting, seed=0)
    with pytest.warns(UserWarning, match=r"fewer entries than the budget .* 16 against 480: .* 0.983 .* 0.500") as seen:
        kept_and_weights(t1(), press, tokens(60, batch=2))
    assert len(seen) == 1
    press = ProbabilisticPress(scorer, 0.5, sampler=sampler, uniform_mix=0.1, seed=0)
    kept_and_weights(t1(), press, tokens(60))
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("scale", [15.0, 30.0])
def test_attention_that_is_too_sharp_warns(scale):
    """Scenario S38: float32 mass is 0 on most entries; ``uniform_mix`` is the remedy that is documented."""
    model = t1()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(scale)
        layer.self_attn.k_proj.weight.mul_(scale)
    press = ProbabilisticPress(MinVariancePress(prior="last"), 0.1, seed=0)
    with pytest.warns(UserWarning, match="fewer entries than the budget have a score above 0") as seen:
        kept_and_weights(model, press, tokens(300))
    assert len(seen) == 1
    assert press.report.achieved_ratio > 0.3
    press = ProbabilisticPress(MinVariancePress(prior="last"), 0.1, uniform_mix=0.05, seed=0)
    kept_and_weights(model, press, tokens(300))
    assert press.report.achieved_ratio == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    "press",
    [
        ProbabilisticPress(SnapKVPress(window_size=64), 0.9, seed=0),
        ProbabilisticPress(H2OPress(), 0.9, n_recent=50, seed=0),
        ProbabilisticPress(H2OPress(), 0.9, n_sink=20, n_recent=20, allocation="head", seed=0),
        ProbabilisticPress([Component(SnapKVPress(window_size=40), 0.5), Component(H2OPress())], 0.9, seed=0),
        ProbabilisticPress(H2OPress(), 0.9, n_recent=50, sampler="top_k", correction="none", seed=0),
    ],
    ids=["window", "recent", "both ends", "components", "top_k"],
)
def test_one_warning_when_protected_entries_exceed_the_budget(press):
    """Scenario S34."""
    with pytest.warns(UserWarning, match=r"protected entries alone exceed the budget.*instead of 0.900") as seen:
        kept_and_weights(t1(), press, tokens(200, batch=2))
    assert len(seen) == 1


@pytest.mark.parametrize("temperature", [0.01, 0.005, 0.001, 1e-5])
@pytest.mark.parametrize("weighting", ["uniform", "score"])
@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
def test_sharp_proposals_approach_top_k(temperature, weighting, allocation):
    """Scenario S35: heads neither end with one entry nor become uniform."""
    settings = {"allocation": allocation, "seed": 0, "budget_weighting": weighting}
    draw = ProbabilisticPress(MinVariancePress(), 0.6, proposal_temperature=temperature, **settings)
    settings["proposal_temperature"] = temperature if weighting == "uniform" else 1.0
    best = ProbabilisticPress(MinVariancePress(), 0.6, sampler="top_k", correction="none", **settings)
    got = kept_and_weights(t1(), draw, tokens(150))
    want = kept_and_weights(t1(), best, tokens(150))
    same = sum(int(((got[layer] > -torch.inf) & (want[layer] > -torch.inf)).sum()) for layer in got)
    total = sum(int((it > -torch.inf).sum()) for it in want.values())
    assert draw.report.achieved_ratio == pytest.approx(0.6, abs=1 / 150)
    assert same / total > 1 - max(3 * temperature, 0.005)


@pytest.mark.parametrize("temperature", [0.005, 0.001])
def test_sharp_components_reach_the_ratio(temperature):
    """Scenario S35: components that want the same entries hand the overlap back, however sharp they are."""
    components = [
        Component(MinVariancePress(), 0.5, proposal_temperature=temperature),
        Component(H2OPress(), 0.5, "score", proposal_temperature=temperature),
    ]
    press = ProbabilisticPress(components, 0.5, seed=0)
    kept_and_weights(t1(), press, tokens(150))
    assert press.report.achieved_ratio == pytest.approx(0.5, abs=1 / 150)


def test_the_multinomial_sampler_says_when_a_proposal_is_too_sharp_for_it():
    press = ProbabilisticPress(MinVariancePress(), 0.5, proposal_temperature=0.001, sampler="multinomial", seed=0)
    with pytest.warns(UserWarning, match=r"1e\+15 draws from so sharp a proposal find fewer entries.*systematic"):
        kept_and_weights(t1(), press, tokens(150))


@pytest.mark.parametrize("where", [(1, 2, 3), (0, 1, 0)])
@pytest.mark.parametrize("value", [-1e-7, -0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_a_negative_score_changes_nothing_for_other_rows(where, value, temperature):
    """Scenario S36: a row is compressed as it would be alone, whatever the other row's scores are."""
    scores = torch.rand(2, 4, 4, 90)  # [b layer hkv t]
    scores[where[0], where[1], where[2], 5] = value
    given = {90 + row: scores[row] for row in (0, 1)}

    def of_row(layer, keys):
        row = 90 + int(keys[0, 0, 0].eq(first[layer][1, 0, 0]).all())
        return given[row][layer][None]

    model, ids = t1(), tokens(90, batch=2)
    full = DynamicCache()
    model(ids, past_key_values=full)
    first = [layer.keys for layer in full.layers]

    def press():
        return ProbabilisticPress(Given(of_row), 0.5, proposal_temperature=temperature, seed=3)

    both = kept_and_weights(model, press(), ids)
    for row in (0, 1):
        caches = [DynamicCache(), DynamicCache()]
        single = press()
        # Keys of a row alone differ in their last bits from those in a batch: the scores are given by hand.
        single.press.make = lambda layer, keys, row=row: scores[row, layer][None]
        with single(model):
            model(ids[row : row + 1], past_key_values=caches[0])
        model(ids[row : row + 1], past_key_values=caches[1])
        alone = biases_of(*caches)
        for layer in both:
            assert torch.equal(both[layer][row], alone[layer][0])


@pytest.mark.parametrize("scores_are", ["weights", None])
def test_rounding_below_zero_is_zero(scores_are):
    """Scenario S36: in one layer, and nowhere else anything changes; nor there."""

    def scores(noise):
        def make(layer, keys):
            made = torch.rand(keys.shape[:3], generator=torch.Generator().manual_seed(layer))
            made[..., 4] = noise if layer == 1 else 0
            return made

        return make

    def press(noise):
        return ProbabilisticPress([Component(Given(scores(noise)), scores_are=scores_are)], 0.5, seed=0)

    clean, noisy = (kept_and_weights(t1(), press(noise), tokens(80)) for noise in (0.0, -1e-7))
    assert all(torch.equal(clean[layer], noisy[layer]) for layer in clean)


def test_what_scores_are_can_be_declared():
    class Logarithms(ScorerPress):
        scores_are = "log_weights"

        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return keys.norm(dim=-1).log() * 3

    class Weights(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return keys.norm(dim=-1) ** 3

    for weighting in ("uniform", "score"):
        logarithms = [Component(Logarithms(), None, weighting)]
        a = kept_and_weights(t1(), ProbabilisticPress(logarithms, 0.5, seed=0), tokens(80))
        b = kept_and_weights(t1(), ProbabilisticPress(Weights(), 0.5, budget_weighting=weighting, seed=0), tokens(80))
        assert all(torch.allclose(a[layer], b[layer], atol=1e-4) for layer in a)
    logits = ProbabilisticPress([Component(Weights(), scores_are="logits")], 0.5, seed=0)
    c = kept_and_weights(t1(), logits, tokens(80))
    assert not all(torch.equal(b[layer], c[layer]) for layer in b)


def test_negative_weights_are_refused_naming_layer_and_scorer():
    scorer = Given(lambda layer, keys: torch.rand(keys.shape[:3]) - (0.5 if layer == 2 else 0))
    press = ProbabilisticPress([Component(scorer, scores_are="weights")], 0.5)
    with pytest.raises(ValueError, match="scores of layer 2 must be >= 0, got negative ones from Given, whose scores"):
        kept_and_weights(t1(), press, tokens(60))
    press = ProbabilisticPress(scorer, 0.5, budget_weighting="score")
    with pytest.raises(ValueError, match=r"needs scores with one scale for all heads: scores of layer 2 .*from Given"):
        kept_and_weights(t1(), press, tokens(60))


@pytest.mark.parametrize("name", [name for name, it in SCORERS.items() if not it.common_scale])
def test_score_weighting_refuses_what_has_no_common_scale(name):
    """Scenario S36."""
    with pytest.raises(ValueError, match=f"budget_weighting='score' needs scores with one scale .*got {name}"):
        ProbabilisticPress(make(name), 0.5, budget_weighting="score")
    with pytest.raises(ValueError, match=f"budget_weighting='score' needs scores with one scale .*got {name}"):
        ProbabilisticPress([Component(make(name), 0.5, "score"), Component(H2OPress())], 0.5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scores_are": "ranks"}, "scores_are must be one of .*got 'ranks'"),
        ({"scores_are": 1}, "must be one of .*got 1"),
    ],
)
def test_unknown_declarations_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ProbabilisticPress([Component(H2OPress(), **kwargs)], 0.5)


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (lambda layer, keys: torch.rand((*keys.shape[:2], 3)), r"got \(1, 4, 3\)"),
        (lambda layer, keys: torch.rand(1, 1, keys.shape[2]), r"got \(1, 1, 60\)"),
        (lambda layer, keys: torch.rand(1, 8, keys.shape[2]), r"got \(1, 8, 60\)"),
        (lambda layer, keys: torch.rand(keys.shape[2]), r"got \(60,\)"),
        (lambda layer, keys: torch.rand(keys.shape[:3]).unsqueeze(-1), r"got \(1, 4, 60, 1\)"),
        (lambda layer, keys: torch.rand(keys.shape[:3]).to(torch.complex64), r"got .* of torch.complex64"),
        (lambda layer, keys: None, "got NoneType"),
        (lambda layer, keys: torch.rand(keys.shape[:3]).numpy(), "got ndarray"),
    ],
)
def test_scores_of_another_shape_are_refused(scores, got):
    press = ProbabilisticPress(Given(scores), 0.5)
    with pytest.raises(ValueError, match=r"scores of Given must be real numbers of shape \(1, 4, 60\), " + got):
        kept_and_weights(t1(), press, tokens(60))


def test_the_table_has_every_scorer_of_kvpress():
    assert set(SCORERS) == {cls.__name__ for cls in presses() if issubclass(cls, ScorerPress)}


def test_presses_that_are_no_scorers_are_refused():
    others = [cls for cls in presses() if not issubclass(cls, ScorerPress)]
    assert len(others) > 20
    for cls in others:
        with pytest.raises(TypeError, match=f"press must be a kvpress ScorerPress, got {cls.__name__}"):
            ProbabilisticPress(object.__new__(cls))


def test_the_page_is_up_to_date():
    assert PATH.read_text() == page(), "run `make models-table`"


def make(name):
    return SCORERS[name].make()


def needs(name, **settings):
    return t1(attn="eager" if name == "ObservedAttentionPress" else "sdpa", **settings)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize(("ratio", "sampler"), [(0.3, "systematic"), (0.7, "systematic"), (0.5, "multinomial")])
def test_a_scorer_of_kvpress_as_a_proposal(name, ratio, sampler):
    """The ratio is reached; what the scorer protects is kept with weight 1, and nothing else for certain."""
    press = ProbabilisticPress(make(name), ratio, sampler=sampler, seed=0)
    bias = kept_and_weights(needs(name), press, tokens(300))
    slack = 1 / 300 if sampler == "systematic" else 0.04
    assert press.report.achieved_ratio == pytest.approx(ratio, abs=slack)
    first, last = SCORERS[name].ends
    for layer in bias.values():
        ends = torch.cat([layer[..., :first], layer[..., 300 - last :]], -1)
        assert (ends == 0).all()
        if name not in ("StreamingLLMPress", "CriticalKVPress"):
            assert (layer[..., first : 300 - last].isfinite() & (layer[..., first : 300 - last] != 0)).any()


class Gatherer:
    """A ``PrefillWatcher`` that only gathers."""

    def __init__(self, gathering):
        self.layer, self.complete = gathering.layer, gathering.complete

    def begin(self, upcoming):
        pass

    def end(self, prefill):
        self.gathered = self.complete(prefill)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("lengths", [(150, 150), (150, 97, 121)])
def test_each_batch_row_is_compressed_as_it_would_be_alone(name, lengths):
    """Scenario S36, with and without padding."""
    model, t = needs(name), max(lengths)
    ids, mask = tokens(t, batch=len(lengths)), torch.ones(len(lengths), t, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : t - length], mask[row, : t - length] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def scores_of(ids, **settings):
        press = ProbabilisticPress(make(name), 0.4, seed=0)
        torch.manual_seed(0)
        press.post_init_from_model(model)
        watcher = Gatherer(press.gathering(0.4))
        with watch_prefills(model, lambda: watcher):
            model(ids, past_key_values=DynamicCache(), **settings)
        return list(zip(watcher.gathered.log_weights[0], watcher.gathered.take_all, strict=True))

    together = scores_of(ids, attention_mask=mask, position_ids=positions)
    for row, length in enumerate(lengths):
        alone = scores_of(ids[row : row + 1, t - length :])
        for (log_a, take), (log_a_alone, take_alone) in zip(together, alone, strict=True):
            assert torch.equal(take[row, :, t - length :], take_alone[0])
            a, b = log_a[row, :, t - length :].softmax(-1), log_a_alone[0].softmax(-1)
            torch.testing.assert_close(a, b, atol=1e-5, rtol=2e-2)


def test_streaming_llm_is_itself_and_drawn_with_uniform_mix():
    """Scenario S34."""
    model, ids = t1(), tokens(200)
    alone = kept_and_weights(model, ProbabilisticPress(StreamingLLMPress(), 0.6, seed=0), ids)
    for layer in alone.values():
        assert (layer[..., :4] == 0).all()
        assert (layer[..., -76:] == 0).all()
        assert (layer[..., 4:-76] == -torch.inf).all()
    for press in (
        ProbabilisticPress(StreamingLLMPress(), 0.6, uniform_mix=0.2, seed=0),
        ProbabilisticPress([Component(StreamingLLMPress(), 0.5), Component(MinVariancePress())], 0.6, seed=0),
    ):
        drawn = kept_and_weights(model, press, ids)
        assert press.report.achieved_ratio == pytest.approx(0.6, abs=0.005)
        assert all((layer[..., 4:-76] > 0).any() for layer in drawn.values())


def test_a_class_that_overrides_score_is_not_taken_for_its_base():
    class Ranks(SnapKVPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return torch.arange(keys.shape[2]).expand(keys.shape[:3])

    class Renamed(SnapKVPress):
        pass

    assert score_rule(Renamed()) == score_rule(SnapKVPress())
    assert score_rule(Ranks()).ends is None
    press = ProbabilisticPress(Ranks(), 0.8, seed=0)
    kept_and_weights(t1(), press, tokens(100))
    assert press.report.achieved_ratio == pytest.approx(0.8, abs=0.01)


def test_critical_kv_protects_its_first_stage_and_what_its_scorer_protects():
    inner = SnapKVPress(window_size=16)
    press = ProbabilisticPress(CriticalKVPress(inner, first_stage_ratio=0.25), 0.5, seed=0)
    bias = kept_and_weights(t1(), press, tokens(200))
    for layer in bias.values():
        assert (layer[..., -16:] == 0).all()
        assert ((layer == 0).sum(-1) >= 25).all()
        assert (layer > 0).any()
    assert score_rule(CriticalKVPress(KnormPress())).scores_are == "logits"


@pytest.mark.parametrize("length", [60, 259, 260, 300, 420])
def test_lag_kv_protects_its_sinks_and_its_tail(length):
    press = LagKVPress(n_sink=4, lag_size=128)
    first, last = score_rule(press).ends(press, length)
    keys = torch.randn(1, 4, length, 32)
    scores = press.score(None, None, keys, keys, None, {})
    assert (scores[..., :first] == 1).all()
    assert (scores[..., length - last :] == 1).all()
    assert (scores[..., first : length - last] < 1).all()


def test_lag_kv_protects_at_most_what_it_says_for_any_length():
    press = LagKVPress(n_sink=4, lag_size=37)
    ends = score_rule(press).ends
    of_lengths = [ends(press, length) for length in range(1, 4 + 5 * 37)]
    assert ends(press, None) == (max(first for first, _ in of_lengths), max(last for _, last in of_lengths))
