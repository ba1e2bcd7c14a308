"""Decode-time eviction: the estimate stays right, the cache stays bounded, and a layer's life goes on."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kvpress_prob import CacheBudget, load_compressed, save_compressed
from kvpress_prob.hf import RaggedLayer, ResamplingSettings, cache_bytes
from kvpress_prob.maths.draw import DrawSettings
from kvpress_prob.ragged import RaggedKV
from tests.helpers.compare import compress, greedy, press_of
from tests.helpers.models import ARCHITECTURES, tiny_gemma3, tiny_llama, tokens, words
from tests.test_generate import pipeline_of

SMALL = CacheBudget(max_entries=40, interval=8, queries=8, start="decoding")


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_llama(attn=request.param)


def logits(model, cache, ids, **kwargs):
    return model(ids, past_key_values=cache, **kwargs).logits


def stored(layer) -> float:
    """Mean entries a KV head of the fullest batch row."""
    return float(layer.store.length.view(layer.store.batch, -1).double().mean(-1).max())


# -- The estimate ------------------------------------------------------------------------------------------------------


def layer_of(keys, values, budget, seed, **settings) -> RaggedLayer:
    """A layer that holds the given dense entries."""
    everything = torch.ones(keys.shape[:3], dtype=torch.bool)
    store = RaggedKV.pack(keys, values, everything, torch.zeros(keys.shape[:3]))
    n_sink = settings.pop("n_sink", 0)
    resampling = ResamplingSettings(budget, DrawSettings(**settings), n_sink, seed, layer=0)
    return RaggedLayer(store, keys.shape[2], [0], resampling)


@pytest.mark.parametrize(("sampler", "correction"), [("systematic", "inclusion"), ("multinomial", "counts")])
def test_the_weighted_mass_is_the_dense_mass_on_average(sampler, correction):
    """200 tokens after a context of 30 through a budget of 40, in rounds; numerator and denominator of the attention of
    a query that no proposal has seen, against all entries ever appended. Heads with the same entries are the
    replicates."""
    heads, width = 48, 8
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn(1, 1, 230, width, generator=generator).expand(1, heads, -1, -1) for _ in range(3)
    )
    probe = torch.randn(width, generator=generator)
    dense = torch.exp(0.35 * keys[0, 0] @ probe)
    want = torch.cat([dense.sum(0, keepdim=True), dense @ values[0, 0]])
    got = []
    for seed in range(10):
        budget = CacheBudget(max_entries=40, interval=20, queries=4)
        layer = layer_of(keys[:, :, :30], values[:, :, :30], budget, seed, sampler=sampler, correction=correction)
        for begin in range(30, 230, 10):
            new = slice(begin, begin + 10)
            layer.update(keys[:, :, new], values[:, :, new])
            layer.attend(queries[:, :, new], None, 0.35, None)
        assert stored(layer) <= 40
        assert layer.resampler.rounds[0] >= 6
        for head in range(heads):
            k, v, log_w = layer.store.segment(0, head)
            mass = torch.exp(0.35 * k @ probe + log_w)
            got.append(torch.cat([mass.sum(0, keepdim=True), mass @ v]))
    got = torch.stack(got).double()
    error = got.std(0) / len(got) ** 0.5
    z = (got.mean(0) - want) / error
    assert z.abs().max() < 4, z
    assert error[0] < 0.05 * want[0], "too noisy to say anything"


def test_a_larger_budget_is_closer():
    """Consistency: the error of attention falls with the budget."""
    heads, generator = 16, torch.Generator().manual_seed(1)
    keys, values, queries = (torch.randn(1, 1, 600, 16, generator=generator).expand(1, heads, -1, -1) for _ in range(3))
    full = torch.softmax(0.25 * queries[0, 0, -1] @ keys[0, 0].mT, -1) @ values[0, 0]
    errors = []
    for entries in (60, 120, 240, 480):
        layer = layer_of(keys[:, :, :10], values[:, :, :10], CacheBudget(entries, interval=20, queries=8), seed=0)
        for begin in range(10, 600, 10):
            new = slice(begin, begin + 10)
            layer.update(keys[:, :, new], values[:, :, new])
            output = layer.attend(queries[:, :, new], None, 0.25, None)
        errors.append(float((output[0, :, -1] - full).norm(dim=-1).mean() / full.norm()))
    assert errors == sorted(errors, reverse=True), errors
    assert errors[-1] < 0.4 * errors[0], errors


def test_nothing_is_evicted_below_the_budget(model):
    bounded = compress(
        model, tokens(30), press_of(0.5, budget=CacheBudget(200, interval=20, queries=8, start="decoding"))
    )
    plain = compress(model, tokens(30), press_of(0.5))
    for step in range(100):
        ids = tokens(1, seed=step)
        assert torch.equal(logits(model, bounded, ids), logits(model, plain, ids))
    assert bounded.layers[0].resampler.rounds == [0]


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "DeepSeek-V3"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_round_that_keeps_everything_changes_nothing(name, attn, monkeypatch):
    """All of a round but its draw: alignment, packing, weights, masks, positions."""
    monkeypatch.setattr(
        "kvpress_prob.hf.resampling.resample",
        lambda log_w, weights, take_all, **_: (take_all | (weights > 0), log_w),
    )
    model = ARCHITECTURES[name].build(attn)
    bounded = compress(model, tokens(30), press_of(0.5, budget=SMALL))
    plain = compress(model, tokens(30), press_of(0.5))
    for step in range(60):
        ids = tokens(1 + step % 3, seed=step)
        torch.testing.assert_close(logits(model, bounded, ids), logits(model, plain, ids), atol=1e-4, rtol=1e-4)
    layer = next(layer for layer in bounded.layers if isinstance(layer, RaggedLayer))
    assert layer.resampler.rounds[0] > 5


# -- The bound ---------------------------------------------------------------------------------------------------------


def test_a_generation_of_4000_tokens_stays_under_the_budget():
    model = tiny_llama(layers=1)
    cache = compress(model, tokens(300), press_of(0.5, budget=CacheBudget(max_entries=128, start="decoding")))
    ids, largest = tokens(1), 0
    for _ in range(4000):
        ids = logits(model, cache, ids)[:, -1:].argmax(-1)
        assert stored(cache.layers[0]) <= 128
        largest = max(largest, cache_bytes(cache))
    assert cache.get_seq_length() == 4300
    entries = 2 * (128 + 64 + 64)  # the budget, the interval's room, one growth
    assert largest <= entries * (2 * 16 * 4 + 4) + 32 * 4 * 16 * 4 + 100


@pytest.mark.parametrize("length", [1, 5, 300])
def test_a_pass_of_any_length_ends_under_the_budget(model, length):
    cache = compress(model, tokens(100), press_of(0.3, budget=SMALL))
    for step in range(0, 300, length):
        logits(model, cache, tokens(length, seed=step))
        assert all(stored(layer) <= 40 for layer in cache.layers)
    assert cache.get_seq_length() == 100 + 300


def test_ratio_zero_bounds_decoding_only(model):
    press = press_of(0.0, budget=SMALL)
    cache = compress(model, tokens(30), press)
    assert press.report.achieved_ratio == 0
    assert all(isinstance(layer, RaggedLayer) for layer in cache.layers)
    want = logits(model, model(tokens(30), past_key_values=DynamicCache()).past_key_values, tokens(1, seed=1))
    torch.testing.assert_close(logits(model, cache, tokens(1, seed=1)), want, atol=1e-4, rtol=1e-4)
    for step in range(50):
        logits(model, cache, tokens(1, seed=step))
    assert all(stored(layer) <= 40 for layer in cache.layers)


def test_sliding_layers_are_left_alone():
    model = tiny_gemma3()
    cache = compress(model, tokens(30), press_of(0.5, budget=SMALL))
    for step in range(60):
        logits(model, cache, tokens(1, seed=step))
    assert stored(cache.layers[5]) <= 40
    assert not any(isinstance(layer, RaggedLayer) for layer in cache.layers[:5])


def test_sinks_and_the_newest_queries_entries_are_kept():
    model = tiny_llama()
    cache = compress(model, tokens(30), press_of(0.5, budget=SMALL, n_sink=3))
    sinks = [layer.store.segment(0, head)[0][:3].clone() for layer in cache.layers for head in range(2)]
    for step in range(100):
        logits(model, cache, tokens(1, seed=step))
    kept = [layer.store.segment(0, head) for layer in cache.layers for head in range(2)]
    assert all(torch.equal(keys[:3], sink) for (keys, _, _), sink in zip(kept, sinks, strict=True))
    assert all((log_w[-8:] == 0).all() for _, _, log_w in kept)
    assert any((log_w[3:-8] > 0).any() for _, _, log_w in kept)


# -- A layer's life goes on --------------------------------------------------------------------------------------------


def test_it_is_reproducible_and_the_seed_matters(model):
    results = []
    for seed in (3, 3, 4):
        before = torch.get_rng_state()
        cache = compress(model, tokens(30), press_of(0.5, budget=SMALL, seed=seed))
        results.append(torch.cat([logits(model, cache, tokens(1, seed=step)) for step in range(60)]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("how", ["deepcopy", "file"])
def test_a_copy_goes_on_as_the_original(model, how, tmp_path):
    cache = compress(model, tokens(30), press_of(0.5, budget=SMALL))
    for step in range(37):
        logits(model, cache, tokens(1, seed=step))
    if how == "file":
        save_compressed(cache, tmp_path / "cache")
        twin = load_compressed(tmp_path / "cache")
    else:
        twin = copy.deepcopy(cache)
    for step in range(60):
        ids = tokens(1, seed=100 + step)
        assert torch.equal(logits(model, cache, ids), logits(model, twin, ids))
    assert twin.layers[0].resampler.rounds == cache.layers[0].resampler.rounds


def test_rows_of_a_padded_batch_equal_rows_alone(model):
    lengths, press = (30, 18), press_of(0.5, budget=SMALL)
    batch = tokens(30, batch=2)
    mask = torch.stack([torch.arange(30) >= 30 - length for length in lengths]).long()
    longer = torch.nn.functional.pad(mask, (0, 60), value=1)
    positions = (longer.cumsum(-1) - 1).clamp(min=0)
    cache = compress(model, batch, press, attention_mask=mask, position_ids=positions[:, :30])
    alone = [compress(model, batch[row : row + 1, 30 - length :], press) for row, length in enumerate(lengths)]
    for step in range(60):
        ids, end = tokens(1, batch=2, seed=step), 31 + step
        together = logits(model, cache, ids, attention_mask=longer[:, :end], position_ids=positions[:, end - 1 : end])
        for row in range(2):
            want = logits(model, alone[row], ids[row : row + 1])
            torch.testing.assert_close(together[row : row + 1], want, atol=1e-4, rtol=1e-4)
    assert min(cache.layers[0].resampler.rounds) > 0


def test_reordered_rows_take_their_rounds_and_queries_along(model):
    cache = compress(model, tokens(30, batch=2), press_of(0.5, budget=SMALL))
    swapped = copy.deepcopy(cache)
    for step in range(30):
        logits(model, cache, tokens(1, batch=2, seed=step))
        logits(model, swapped, tokens(1, batch=2, seed=step))
    swapped.reorder_cache(torch.tensor([1, 0]))
    for step in range(30, 60):
        ids = tokens(1, batch=2, seed=step)
        assert torch.equal(logits(model, cache, ids), logits(model, swapped, ids.flip(0)).flip(0))


def test_tokens_after_the_last_round_can_be_cropped(model):
    cache, compared = compress(model, tokens(30), press_of(0.5, budget=SMALL)), 0
    for step in range(60):
        before, length = copy.deepcopy(cache), cache.get_seq_length()
        logits(model, cache, tokens(1, seed=step))
        rounds = [[layer.resampler.rounds for layer in it.layers] for it in (before, cache)]
        if sum(map(sum, rounds[0])) and rounds[0] == rounds[1]:
            again = copy.deepcopy(cache)
            again.crop(length)
            assert torch.equal(logits(model, again, tokens(1)), logits(model, before, tokens(1)))
            compared += 1
    assert compared > 20
    with pytest.raises(NotImplementedError, match="cannot crop into a compressed context"):
        cache.crop(length - 30)


def test_cropping_all_recorded_queries_leaves_a_working_layer(model):
    cache = compress(model, tokens(30), press_of(0.5, budget=SMALL))
    logits(model, cache, tokens(3, seed=1))
    cache.crop(30)
    assert cache.layers[0].resampler.queries is None
    for step in range(60):
        logits(model, cache, tokens(1, seed=step))
    assert all(stored(layer) <= 40 for layer in cache.layers)


def test_generate_with_a_budget(model):
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    with press_of(0.5, budget=SMALL)(model):
        got = model.generate(tokens(30), **settings)
        want = greedy(model, DynamicCache(), tokens(30), 60)
        beams = model.generate(tokens(30), num_beams=3, **settings)
    assert torch.equal(got[:, 30:], want)
    assert beams.shape == (1, 90)


def test_the_pipeline_answers_one_question_and_says_why_not_two():
    model = tiny_llama()
    pipe, press = pipeline_of(model), press_of(0.5, budget=SMALL)
    model.generation_config.eos_token_id = None
    context, question = words(tokens(30)), words(tokens(4, seed=1))
    assert pipe(context, question=question, press=press, max_new_tokens=60)["answer"]
    with pytest.raises(NotImplementedError, match="was sampled again while decoding"):
        pipe(context, questions=[question, question], press=press, max_new_tokens=60)
    assert len(pipe(context, questions=[question, question], press=press, max_new_tokens=4)["answers"]) == 2


def test_padding_between_context_and_question_is_refused(model):
    cache = compress(model, tokens(30, batch=2), press_of(0.5, budget=SMALL))
    mask = torch.ones(2, 34, dtype=torch.long)
    mask[1, 30:32] = 0
    with pytest.raises(NotImplementedError, match="with a CacheBudget, attention_mask may hide padding before"):
        logits(model, cache, tokens(4, batch=2), attention_mask=mask)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_entries": 0}, "max_entries must be None or an integer >= 1, got 0"),
        ({"max_entries": 100, "interval": 0}, "interval must be an integer >= 1, got 0"),
        ({"max_entries": 100, "queries": 1.5}, "queries must be an integer >= 1, got 1.5"),
        ({"max_entries": 96}, r"max_entries must be more than interval \+ queries \+ room = 96, got 96"),
    ],
)
def test_refuses_bad_budgets(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CacheBudget(**kwargs)


def test_the_press_refuses_what_cannot_be_met():
    with pytest.raises(TypeError, match="budget must be None or a CacheBudget, got int"):
        press_of(budget=100)
    with pytest.raises(ValueError, match=r"the newest 8 and the first 30 entries, which are always kept .*, got 40"):
        press_of(budget=SMALL, n_sink=30)
