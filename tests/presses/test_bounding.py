"""A cache that is bounded at all times: the law of what it keeps, its bound, whoever cuts the context into passes."""

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from kvpress import (
    CompactorPress,
    CriticalKVPress,
    KeyDiffPress,
    KnormPress,
    LagKVPress,
    LeverageScorePress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import DynamicCache, StaticCache

from kvpress_prob import (
    AttentionPress,
    CacheBudget,
    Component,
    ExpectedQueries,
    H2OPress,
    MinVariancePress,
    ProbabilisticPress,
    Reconstruction,
    SurrogatePress,
    load_compressed,
    save_compressed,
)
from kvpress_prob.hf import RaggedLayer, cache_bytes
from kvpress_prob.hf.pool import POSITION
from tests.helpers.compare import greedy
from tests.helpers.models import ARCHITECTURES, build, tiny_gemma3, tiny_llama, tiny_mistral, tokens, words
from tests.test_generate import pipeline_of

BUDGET = CacheBudget(96, interval=8, queries=8)


@dataclass
class AnglePress(ScorerPress):
    """Scores of an entry's own position alone, to the bit: from the rotary angles, which every press is shown."""

    compression_ratio: float = 0.0
    sharpness: float = 1.0
    scores_are = "weights"
    scores_never_change = True

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        cos, sin = kwargs["position_embeddings"]
        angles = torch.stack([cos, sin]).double().sum(0)[..., : keys.shape[1]]  # [b or 1, n, hkv]
        scores = (self.sharpness * (angles + module.layer_idx * cos[..., :1])).exp().transpose(1, 2)
        return scores.expand(len(keys), -1, -1)


def bounded(scorer=None, budget=BUDGET, **settings) -> ProbabilisticPress:
    settings = {"seed": 0} | settings
    if scorer is None or isinstance(scorer, AnglePress):
        settings = {"budget_weighting": "score"} | settings
    return ProbabilisticPress(scorer or AnglePress(), budget=budget, **settings)


def read(model, press, ids, size, cache=None, **kwargs) -> DynamicCache:
    """A cache of the context, in passes of ``size`` tokens inside one block."""
    cache = DynamicCache() if cache is None else cache
    with press(model):
        for begin in range(0, ids.shape[1], size):
            model(ids[:, begin : begin + size], past_key_values=cache, **kwargs)
    return cache


def sample(cache) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Positions, weights and lengths of every bounded layer."""
    held = []
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            place, _ = layer.store.entries()
            held.append((layer.store.columns[POSITION][place], layer.store.log_w[place], layer.store.length))
    return held


def same(first, second) -> bool:
    pairs = zip(sample(first), sample(second), strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def mean_entries(cache) -> float:
    lengths = torch.stack([layer.store.length for layer in cache.layers if isinstance(layer, RaggedLayer)])
    return float(lengths.double().mean())


@pytest.fixture
def model():
    return tiny_llama()


# -- The law -----------------------------------------------------------------------------------------------------------

UNION = [
    Component(AnglePress(sharpness=2.0), 0.4, budget_weighting="score"),
    Component(AnglePress(), 0.6, budget_weighting="uniform", proposal_temperature=0.5),
]
SETTINGS = {
    "score": {},
    "uniform": {"budget_weighting": "uniform"},
    "layer": {"allocation": "layer", "n_sink": 3},
    "head": {"allocation": "head", "n_recent": 20, "max_weight": 3.0},
    "union": {"scorer": UNION, "n_sink": 2},
    "ratio": {"budget": CacheBudget(interval=32, queries=8), "compression_ratio": 0.6},
    "top_k": {"sampler": "top_k", "correction": "none"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_passes_of_any_size_keep_the_same_entries_with_the_same_weights_to_the_bit(model, name):
    ids = tokens(700)
    want = read(model, bounded(**SETTINGS[name]), ids, 700)
    assert any((log_w > 0).any() for _, log_w, _ in sample(want)) == (name != "top_k")
    for size in (64, 7):
        assert same(read(model, bounded(**SETTINGS[name]), ids, size), want), size


def test_token_by_token_is_the_same_again(model):
    ids = tokens(200)
    assert same(read(model, bounded(), ids, 1), read(model, bounded(), ids, 200))


def exact_sums(keys, values, probe):
    mass = torch.exp(0.35 * keys.double() @ probe)
    return torch.cat([mass.sum(-1, keepdim=True), torch.einsum("bht,bhtd->bhd", mass, values.double())], -1)


SCORERS = {
    "never change": AnglePress(sharpness=0.3),
    "change": MinVariancePress(),
    "mixed": [Component(AnglePress(sharpness=0.3), 0.7), Component(H2OPress(), 0.3)],
}


@pytest.mark.parametrize("name", SCORERS)
def test_the_weighted_mass_is_the_dense_mass_on_average(name):
    """Numerator and denominator of the attention of a query that no proposal has seen. In a model of one layer keys and
    values do not depend on what was evicted; heads and seeds are the replicates."""
    model = tiny_llama(layers=1)
    ids = tokens(260)
    dense = model(ids, past_key_values=DynamicCache()).past_key_values.layers[0]
    probe = torch.randn(16, generator=torch.Generator().manual_seed(1)).double()
    want = exact_sums(dense.keys, dense.values, probe)[0]  # [hkv 1 + dv]
    got = []
    for seed in range(150):
        press = bounded(copy.deepcopy(SCORERS[name]), CacheBudget(64, interval=8, queries=8), seed=seed)
        layer = read(model, press, ids, 40).layers[0]
        assert layer.store.length.double().mean() <= 64
        sums = []
        for head in range(2):
            keys, values, log_w = layer.store.segment(0, head)
            mass = torch.exp(0.35 * keys.double() @ probe + log_w)
            sums.append(torch.cat([mass.sum(0, keepdim=True), mass @ values.double()]))
        got.append(torch.stack(sums))
    got = torch.stack(got)
    z = (got.mean(0) - want) / (got.std(0) / len(got) ** 0.5)
    assert z.abs().max() < 4, z
    spread = got.std(0)[:, 0] / want[:, 0]
    assert (spread > 0.005).all(), "nothing was left to chance"
    assert (spread < 0.5).all(), "too noisy to say anything"


def test_seeds_matter_and_rows_are_drawn_as_they_would_be_alone(model):
    ids = tokens(300)
    assert not same(read(model, bounded(seed=1), ids, 64), read(model, bounded(seed=2), ids, 64))
    batch = read(model, bounded(), ids.expand(2, -1), 64)
    alone = sample(read(model, bounded(), ids, 64))
    for (position, log_w, length), (wanted, wanted_w, wanted_length) in zip(sample(batch), alone, strict=True):
        assert torch.equal(position, wanted.repeat(2))
        assert torch.equal(log_w, wanted_w.repeat(2))
        assert torch.equal(length, wanted_length.repeat(2))


def test_left_padded_rows_equal_rows_alone(model):
    lengths, ids = (300, 171), tokens(300, batch=2)
    mask = torch.stack([torch.arange(300) >= 300 - length for length in lengths]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    press, cache = bounded(), DynamicCache()
    with press(model):
        for begin in range(0, 300, 150):  # the second row's padding ends inside the first pass
            part = slice(begin, begin + 150)
            model(ids[:, part], past_key_values=cache, attention_mask=mask[:, : begin + 150],
                  position_ids=positions[:, part])  # fmt: skip
    for row, length in enumerate(lengths):
        alone = DynamicCache()
        with bounded()(model):
            start = 300 - length
            for begin, end in ((start, 150), (150, 300)):
                model(ids[row : row + 1, begin:end], past_key_values=alone)
        for layer, mine in zip(alone.layers, cache.layers, strict=True):
            for head in range(2):
                want, got = layer.store.segment(0, head), mine.store.segment(row, head)
                for a, b in zip(want, got, strict=True):
                    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    step = tokens(1, batch=2, seed=9)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    got = model(step, past_key_values=cache, attention_mask=longer, position_ids=longer.sum(-1, keepdim=True) - 1)
    want = model(step[1:], past_key_values=alone)
    torch.testing.assert_close(got.logits[1:], want.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("pad", [0, 21])
def test_masks_of_a_pass_do_not_grow_with_what_was_read(attn, pad):
    model, ids, cache, covered = tiny_llama(attn=attn), tokens(800, batch=2), DynamicCache(), []
    mask = torch.ones(2, 800, dtype=torch.long)
    mask[1, :pad] = 0
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: covered.append(
                0 if kwargs["attention_mask"] is None else kwargs["attention_mask"].shape[-1]
            ),
            with_kwargs=True,
        )
    with bounded()(model):
        for end in range(40, 801, 40):
            model(ids[:, end - 40 : end], past_key_values=cache, attention_mask=mask[:, :end])
    assert max(covered) <= 40 + 96  # the first passes evict nothing
    assert max(covered[-20:]) <= 40 + BUDGET.queries + BUDGET.interval
    assert cache.get_seq_length() == 800


@pytest.mark.parametrize("pad", [0, 21])
def test_a_mask_that_hides_what_was_read_is_refused(model, pad):
    mask = torch.ones(1, 300, dtype=torch.long)
    mask[:, :pad] = 0
    hidden, early, shown = mask.clone(), mask.clone(), mask.clone()
    hidden[:, 180], early[:, pad], shown[:, :pad] = 0, 0, 1
    cache = DynamicCache()
    with bounded()(model):
        model(tokens(300)[:, :200], past_key_values=cache, attention_mask=mask[:, :200])
        before = sample(cache)
        for wrong in (hidden, early, *([shown, None] if pad else [])):
            with pytest.raises(NotImplementedError, match="attention_mask must"):
                model(tokens(300)[:, 200:], past_key_values=cache, attention_mask=wrong)
        for one, two in zip(before, sample(cache), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        short = torch.ones(1, 1, 100, 299, dtype=torch.bool).tril(199)
        with pytest.raises(ValueError, match="attention_mask must cover 300 entries"):
            model(tokens(300)[:, 200:], past_key_values=cache, attention_mask=short)
        assert cache.get_seq_length() == 200
        model(tokens(300)[:, 200:], past_key_values=cache, attention_mask=mask)
    assert cache.get_seq_length() == 300


# -- The bound ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocation", ["global", "layer", "head"])
@pytest.mark.parametrize("scorer", [AnglePress(), KnormPress(), MinVariancePress(), SnapKVPress(window_size=8)])
def test_no_pass_ends_above_the_budget(model, scorer, allocation):
    cache, press = DynamicCache(), bounded(scorer, allocation=allocation, n_sink=2)
    for begin in range(0, 600, 50):
        with press(model):
            model(tokens(50, seed=begin), past_key_values=cache)
        assert mean_entries(cache) <= 96
        if allocation == "head":
            assert all((layer.store.length <= 96).all() for layer in cache.layers)
    assert mean_entries(cache) >= 96 - 8 - 1
    assert cache.get_seq_length() == 600
    assert all((layer.store.length >= 2 + 8).all() for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 50, 400])
def test_no_room_is_left_of_a_chunk(model, size):
    """However large the chunks, a head holds its entries and room for the tokens until the next sampling."""
    press = bounded()
    cache = read(model, press, tokens(400), size)
    places = sum(len(layer.store.log_w) for layer in cache.layers)
    assert places <= 4 * (BUDGET.max_entries + BUDGET.interval)
    assert press.report.bytes_after == cache_bytes(cache) < press.report.bytes_before / 2


def test_below_the_budget_nothing_is_evicted_and_answers_are_the_dense_ones(model):
    ids = tokens(80)
    cache = read(model, bounded(), ids, 16)
    want = model(ids, past_key_values=DynamicCache()).past_key_values
    assert mean_entries(cache) == 80
    got = model(tokens(1, seed=1), past_key_values=cache).logits
    torch.testing.assert_close(got, model(tokens(1, seed=1), past_key_values=want).logits, atol=1e-4, rtol=1e-4)


def test_memory_is_flat():
    model = tiny_llama(layers=1)
    press, cache, largest = bounded(), DynamicCache(), []
    with press(model):
        for begin in range(0, 3000, 100):
            model(tokens(100, seed=begin), past_key_values=cache)
            largest.append(cache_bytes(cache))
    assert max(largest[3:]) <= 1.06 * min(largest[3:])
    entries = 2 * (96 + 100)
    assert max(largest) <= 1.15 * entries * (2 * 16 * 4 + 16) + 8 * 4 * 16 * 4


def test_the_ratio_of_what_was_read_is_kept(model):
    press = bounded(budget=CacheBudget(interval=16, queries=8), compression_ratio=0.75)
    cache = read(model, press, tokens(1200), 100)
    assert 0.72 <= press.report.achieved_ratio <= 0.80
    assert press.report.target_ratio == 0.75
    assert cache.layers[0].get_seq_length() == 1200


# -- Whoever cuts ------------------------------------------------------------------------------------------------------


def test_the_press_splits_a_long_call_and_returns_the_last_chunk(model):
    ids, seen = tokens(500), []
    budget = CacheBudget(96, chunk_size=64, interval=8, queries=8, progress=lambda done, of: seen.append((done, of)))
    cache = DynamicCache()
    before = dict(vars(model.model))
    with bounded(budget=budget)(model):
        output = model(ids, past_key_values=cache)
    assert vars(model.model).keys() == before.keys()
    by_hand = DynamicCache()
    with bounded()(model):
        for begin in range(0, 500, 64):
            want = model(ids[:, begin : begin + 64], past_key_values=by_hand)
    assert same(cache, by_hand)
    assert torch.equal(output.logits, want.logits)
    assert output.logits.shape[1] == 500 % 64
    assert seen == [(min(done, 500), 500) for done in range(64, 564, 64)]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_generate_in_chunks(attn):
    model = tiny_llama(attn=attn)
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    ids = tokens(300)
    with bounded()(model):  # transformers' chunks leave out the last token
        got = model.generate(ids, prefill_chunk_size=50, return_dict_in_generate=True, **settings)
    assert got.sequences.shape == (1, 330)
    assert mean_entries(got.past_key_values) <= 96
    with bounded(budget=CacheBudget(96, chunk_size=50, interval=8, queries=8))(model):
        split = model.generate(ids, **settings)
        want = greedy(model, DynamicCache(), ids, 30)
        beams = model.generate(ids, num_beams=3, **settings)
    assert torch.equal(split[:, 300:], want)
    assert beams.shape == (1, 330)


def test_the_pipeline_reads_a_context_in_chunks():
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    budget = CacheBudget(96, chunk_size=64, interval=16, queries=8, room=8)
    press, cache = bounded(budget=budget), DynamicCache()
    question = words(tokens(4, seed=1))
    pipe = pipeline_of(model)
    answers = pipe(words(tokens(500)), questions=[question] * 2, press=press, max_new_tokens=4, cache=cache)["answers"]
    assert answers[0] == answers[1]
    assert mean_entries(cache) <= 96
    assert press.report.context_lengths == [cache.get_seq_length()]
    # After the block nobody scores: a layer is bounded by what its newest queries attend to.
    for step in range(60):
        model(tokens(1, seed=step), past_key_values=cache)
        assert mean_entries(cache) <= 96
    assert max(layer.resampler.rounds[0] for layer in cache.layers) > 0


@pytest.mark.parametrize("how", ["dense", "compressed"])
def test_on_top_of_a_cached_prefix(model, how):
    """A prefix that came in outside the block is evicted from like everything else."""
    cache = DynamicCache()
    if how == "dense":
        model(tokens(150), past_key_values=cache)
    else:
        with ProbabilisticPress(MinVariancePress(), 0.5, seed=0)(model):
            model(tokens(150), past_key_values=cache)
    read(model, bounded(), tokens(200, seed=1), 50, cache)
    assert cache.get_seq_length() == 350
    assert mean_entries(cache) <= 96
    positions = sample(cache)[0][0]
    assert ((positions < 75) & (positions >= 0)).any()


@torch.no_grad()
@pytest.mark.parametrize("scorer", [MinVariancePress(), SnapKVPress(window_size=8)])
def test_on_top_of_a_compressed_prefix_scores_may_change(model, scorer):
    ids, cache = tokens(300), DynamicCache()
    with ProbabilisticPress(MinVariancePress(), 0.5, seed=0)(model):
        model(ids[:, :150], past_key_values=cache)
    read(model, bounded(scorer), ids[:, 150:], 50, cache)
    assert cache.get_seq_length() == 300
    assert mean_entries(cache) <= BUDGET.max_entries


@torch.no_grad()
@pytest.mark.parametrize("other", [{"scorer": AnglePress(sharpness=9.0)}, {"proposal_temperature": 0.5}])
def test_another_scorer_over_the_same_cache_is_refused(model, other):
    """Its scores cannot be compared with those that the cache's thresholds are made of."""
    cache = read(model, bounded(), tokens(200), 50)
    with pytest.raises(ValueError, match="bounded by another budget or press"):
        read(model, bounded(**other), tokens(50), 50, cache)
    assert cache.get_seq_length() == 200


def test_streaming_llm_keeps_sinks_and_the_newest():
    """The uncorrected baseline is StreamingLLM itself, whatever the chunks are."""
    press = bounded(StreamingLLMPress(n_sink=2), sampler="top_k", correction="none", allocation="head")
    for size in (50, 400):
        store = read(tiny_llama(layers=1), press, tokens(400), size).layers[0].store
        for head in range(2):
            begin, length = int(store.start[head]), int(store.length[head])
            position = store.columns[POSITION][begin : begin + length].tolist()
            assert position[:2] == [0, 1]
            assert position[2:] == list(range(400 - length + 2, 400))


@pytest.mark.parametrize("scorer", [CriticalKVPress(KnormPress()), RandomPress()])
def test_scores_that_follow_from_other_entries_change(scorer):
    """A budget is filled whatever the chunks are."""
    held = [mean_entries(read(tiny_llama(layers=1), bounded(scorer), tokens(400), size)) for size in (50, 400)]
    assert min(held) >= 96 - 2 * 8 - 1


@torch.no_grad()
def test_marks_that_exceed_the_budget_are_one_error(model):
    class Marked(ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            scores = torch.rand(keys.shape[:3])
            scores[..., :-10] = torch.finfo(scores.dtype).max
            return scores

    with pytest.raises(ValueError, match="protected entries alone exceed the budget"):
        read(model, bounded(Marked()), tokens(400), 200)


@torch.no_grad()
def test_the_report_is_that_of_the_last_token(model):
    press = bounded()
    cache = read(model, press, tokens(80), 1)
    assert press.report.context_lengths == [80]
    assert int(press.report.kept.sum()) == 4 * 80
    assert press.report.bytes_after == cache_bytes(cache)
    wide = tiny_llama(heads=8, kv_heads=2)
    press = bounded(MinVariancePress(), compression_ratio=0.2)
    read(wide, press, tokens(400), 100)
    dense = DynamicCache()
    wide(tokens(400), past_key_values=dense)
    assert press.report.bytes_before == cache_bytes(dense)
    assert press.report.target_ratio == 1 - 96 / 400


@torch.no_grad()
def test_padding_that_goes_on_after_the_first_chunk_is_refused(model):
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, :229] = 0
    for budget, size in ((replace(BUDGET, chunk_size=50), 300), (BUDGET, 50)):
        cache = DynamicCache()
        with (
            pytest.raises(NotImplementedError, match=r"left padding must end in the first pass .* got row 1"),
            bounded(budget=budget)(model),
        ):
            model(tokens(300, batch=2)[:, :size], attention_mask=mask[:, :size], past_key_values=cache)
        assert cache.get_seq_length() == 0


@torch.no_grad()
@pytest.mark.parametrize("hidden", [slice(250, 300), slice(100, 120)])
def test_a_mask_is_checked_before_the_first_chunk(model, hidden):
    mask, cache = torch.ones(1, 300, dtype=torch.long), DynamicCache()
    mask[0, hidden] = 0
    with (
        pytest.raises(NotImplementedError, match="must be left padding"),
        bounded(budget=replace(BUDGET, chunk_size=64))(model),
    ):
        model(tokens(300), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_model_whose_layers_all_slide_is_left_alone_and_says_so():
    press = bounded(KnormPress())
    with pytest.warns(UserWarning, match="every layer of MistralForCausalLM has a sliding window"):
        read(tiny_mistral(), press, tokens(100), 50)


def test_turns_go_on_outside_and_inside_of_blocks(model):
    """Tokens that came in outside have no score: they count as their head's average, and the bound holds."""
    cache = read(model, bounded(), tokens(200), 50)
    for turn in range(4):
        for step in range(20):
            model(tokens(1, seed=step), past_key_values=cache)
            assert mean_entries(cache) <= 96
        read(model, bounded(), tokens(40, seed=turn), 40, cache)
        assert mean_entries(cache) <= 96
    assert cache.get_seq_length() == 200 + 4 * 60


def test_another_budget_over_the_same_cache_is_refused(model):
    cache = read(model, bounded(), tokens(50), 50)
    with pytest.raises(ValueError, match="past_key_values is bounded by another budget or press"):
        read(model, bounded(n_sink=4), tokens(50), 50, cache)
    assert cache.get_seq_length() == 50


def test_sliding_layers_are_left_alone():
    model = tiny_gemma3()
    cache = read(model, bounded(), tokens(300), 50, DynamicCache(config=model.config))
    assert mean_entries(cache) <= 96
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers[:5])
    assert cache.layers[0].keys.shape[2] == model.config.sliding_window - 1


@pytest.mark.parametrize("name", ["Gemma 2", "DeepSeek-V3", "Qwen3"])
@pytest.mark.parametrize("scorer", [KnormPress(), MinVariancePress()])
def test_other_architectures(name, scorer):
    model = ARCHITECTURES[name].build("eager")
    cache = read(model, bounded(scorer), tokens(200), 40)
    assert mean_entries(cache) <= 96
    assert torch.isfinite(model(tokens(2), past_key_values=cache).logits).all()


@pytest.mark.parametrize(
    "scorer", [SnapKVPress(window_size=8), KeyDiffPress(), StreamingLLMPress(n_sink=2), KnormPress()]
)
def test_top_k_of_kvpress_scorers_is_a_baseline(model, scorer):
    press = bounded(scorer, sampler="top_k", correction="none", allocation="head")
    cache = read(model, press, tokens(300), 50)
    assert all((log_w == 0).all() for _, log_w, _ in sample(cache))
    assert 96 - 8 - 1 <= mean_entries(cache) <= 96
    assert all((layer.store.length == layer.store.length[0]).all() for layer in cache.layers)


def test_sinks_and_recent_entries_are_kept(model):
    cache = read(model, bounded(n_sink=3, n_recent=20), tokens(400), 50)
    for layer in cache.layers:
        for head in range(2):
            at = layer.store.start[head], layer.store.start[head] + layer.store.length[head]
            positions = layer.store.columns[POSITION][at[0] : at[1]]
            assert positions[:3].tolist() == [0, 1, 2]
            assert positions[-20:].tolist() == list(range(380, 400))
            assert (layer.store.log_w[at[0] : at[1]][-20:] == 0).all()


# -- A cache's life goes on --------------------------------------------------------------------------------------------


def test_answers_can_be_cropped(model):
    budget = CacheBudget(96, interval=8, queries=8, room=20)
    cache = read(model, bounded(budget=budget, n_recent=30), tokens(400), 50)
    assert mean_entries(cache) <= 96 - 20
    before = copy.deepcopy(cache)
    model(tokens(20, seed=1), past_key_values=cache)
    cache.crop(400)
    step = tokens(1, seed=2)
    assert torch.equal(model(step, past_key_values=cache).logits, model(step, past_key_values=before).logits)
    with pytest.raises(NotImplementedError, match="cannot crop into a compressed context"):
        cache.crop(100)


def test_reordered_rows_take_their_pool_along(model):
    ids = tokens(300, batch=2)
    cache = read(model, bounded(), ids, 50)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    more = tokens(100, batch=2, seed=5)
    read(model, bounded(), more, 50, cache)
    read(model, bounded(), more.flip(0), 50, swapped)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert same(cache, swapped)


@pytest.mark.parametrize("how", ["deepcopy", "file"])
@pytest.mark.parametrize("scorer", [AnglePress(), MinVariancePress()])
def test_a_copy_goes_on_as_the_original(model, scorer, how, tmp_path):
    cache = read(model, bounded(scorer), tokens(300), 50)
    if how == "file":
        save_compressed(cache, tmp_path / "cache")
        twin = load_compressed(tmp_path / "cache")
    else:
        twin = copy.deepcopy(cache)
    for it in (cache, twin):
        read(model, bounded(scorer), tokens(100, seed=3), 50, it)
        for step in range(30):
            model(tokens(1, seed=step), past_key_values=it)
    assert same(cache, twin)


def test_errors_leave_the_model_as_it_was(model):
    before = dict(vars(model.model))
    with pytest.raises(TypeError, match="past_key_values must be a DynamicCache"), bounded()(model):
        model(tokens(100), past_key_values=StaticCache(model.config, 200))
    assert vars(model.model).keys() == before.keys()
    want = model(tokens(30)).logits
    broken = AnglePress()
    broken.score = lambda *args: torch.full((1, 2, 100), math.nan)
    with pytest.raises(ValueError, match="scores of layer 0 must be finite, got NaN"), bounded(broken)(model):
        model(tokens(100), past_key_values=DynamicCache())
    assert vars(model.model).keys() == before.keys()
    assert torch.equal(model(tokens(30)).logits, want)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scorer": AttentionPress(source=Reconstruction())},
            "Reconstruction needs the finished prefill",
        ),
        ({"sampler": "multinomial"}, "sampler must be 'systematic' .* or 'top_k' with a budget, got 'multinomial'"),
        ({"uniform_mix": 0.1}, r"uniform_mix must be 0 with a budget and scores that never change \(AnglePress\)"),
        ({"entries_per_head": 80}, "entries_per_head must be None with a budget's max_entries, got 80"),
        ({"measure_dropped_mass": True}, "measure_dropped_mass must be False with a budget"),
        ({"n_sink": 80}, r"the newest 8 and the first 80 entries, which are always kept .*, got 96"),
        ({"scorer": LagKVPress(lag_size=5000)}, r"the newest 9999 and the first 4 entries, .* got 96"),
        ({"scorer": SnapKVPress(window_size=90)}, r"the newest 90 and the first 0 entries, .* got 96"),
        ({"scorer": SurrogatePress(recency=1.0)}, "recency must be 0 with a budget: .*, got 1.0"),
        (
            {"scorer": AttentionPress(source=ExpectedQueries(), factor="norm")},
            "source must be PrefillRows with a budget",
        ),
        ({"scorer": AttentionPress(statistic="output_change", project=True)}, "project must be False with a budget"),
        ({"scorer": CompactorPress()}, "CompactorPress can only score a whole prefill"),
        ({"scorer": CriticalKVPress(LeverageScorePress())}, "LeverageScorePress can only score a whole prefill"),
        ({"budget": CacheBudget()}, "budget must have max_entries, or the press a compression_ratio > 0"),
    ],
)
def test_refuses_what_has_no_meaning(settings, message):
    with pytest.raises(ValueError, match=message):
        bounded(**settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_entries": 0}, ValueError, "max_entries must be None or an integer >= 1, got 0"),
        ({"chunk_size": 2.0}, ValueError, "chunk_size must be None or an integer >= 1, got 2.0"),
        ({"max_entries": True}, ValueError, "max_entries must be None or an integer >= 1, got True"),
        ({"interval": True}, ValueError, "interval must be an integer >= 1, got True"),
        ({"room": True}, ValueError, "room must be an integer >= 0, got True"),
        ({"room": -1}, ValueError, "room must be an integer >= 0, got -1"),
        ({"start": "later"}, ValueError, "start must be one of .* got 'later'"),
        ({"start": "decoding"}, ValueError, "start='decoding' needs max_entries"),
        (
            {"max_entries": 300, "start": "decoding", "room": 10},
            ValueError,
            "room must be 0 with start=.decoding., .*got 10",
        ),
        ({"progress": 3}, TypeError, "progress must be True, False or callable, got 3"),
    ],
)
def test_refuses_bad_budgets(settings, error, message):
    with pytest.raises(error, match=message):
        CacheBudget(**settings)


def test_numpys_integers_are_numbers():
    budget = CacheBudget(np.int64(1024), np.int32(256), room=np.int64(8))
    assert budget == CacheBudget(1024, 256, room=8)
    assert type(budget.max_entries) is type(budget.chunk_size) is type(budget.room) is int


def test_what_cannot_be_split_is_refused_before_anything_ran(model):
    cache = DynamicCache()
    with (
        bounded(budget=CacheBudget(96, chunk_size=32, interval=8, queries=8))(model),
        pytest.raises(TypeError, match="token_types cannot be split into chunks of 32 tokens"),
    ):
        model.model(tokens(100), past_key_values=cache, token_types=tokens(100))
    assert cache.get_seq_length() == 0


def test_what_was_evicted_while_answering_stays_context_in_a_later_block(model):
    press = bounded(KnormPress(), budget=CacheBudget(24, interval=4, queries=3), sampler="top_k", correction="none")
    cache = read(model, press, tokens(30), 30)
    layer = cache.layers[0]
    for seed in range(9):
        model(tokens(1, seed=seed), past_key_values=cache)
        if layer.context_length > layer.pool.boundary[0] + 4:  # sampled again, and tokens beyond the pool with it
            break
    context = layer.context_length
    assert context > layer.pool.boundary[0] + 4
    read(model, press, tokens(1, seed=9), 1, cache)
    for layer in cache.layers:
        assert layer.context_length >= context
        newest = torch.arange(layer.context_length, layer.get_seq_length())
        for segment in range(2):
            end = int(layer.store.start[segment] + layer.store.length[segment])
            assert layer.store.columns[POSITION][end - layer.appended : end].tolist() == newest.tolist()


def test_a_context_that_fits_is_whole(model, tmp_path):
    cache = read(model, bounded(), tokens(30), 30)
    assert all(layer.context_length == 0 and layer.appended == 30 for layer in cache.layers)
    save_compressed(cache, tmp_path / "cache")
    assert same(load_compressed(tmp_path / "cache"), cache)


def test_a_block_may_follow_inference_mode(model):
    with torch.inference_mode():
        cache = read(model, bounded(), tokens(40), 40)
    with torch.no_grad():
        read(model, bounded(), tokens(100), 50, cache)
    assert cache.get_seq_length() == 140
    assert mean_entries(cache) <= 96
    other = copy.deepcopy(cache)
    assert same(read(model, bounded(), tokens(30), 30, cache), read(model, bounded(), tokens(30), 30, other))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_sliding_layers_in_a_plain_cache(attn):
    model = build(
        "Gemma2ForCausalLM", attn, layer_types=["full_attention", "sliding_attention"] * 2, num_hidden_layers=4,
        sliding_window=16,
    )  # fmt: skip
    ids = tokens(200)
    cache = read(model, bounded(), ids, 50)  # DynamicCache() holds the sliding layers' entries too
    other = read(model, bounded(), ids, 50, DynamicCache(config=model.config))
    assert same(cache, other)
