"""A compressed cache layer: positions, growth, cropping, copies and batches, against the oracle."""

import copy

import pytest
import torch

from kvpress_prob.hf import RaggedLayer, cache_bytes
from tests.helpers.compare import assert_equals_oracle, compress, dense, press_of
from tests.helpers.models import tiny_gemma3, tiny_llama, tokens
from tests.helpers.oracle import biases_of, oracle_attention


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_llama(attn=request.param)


def logits(model, cache, ids, **kwargs):
    return model(ids, past_key_values=cache, **kwargs).logits


def test_positions_go_on_where_the_context_ended(model):
    """Scenario S16: compressed or not, the next token's position is the number of tokens seen."""
    cache, same = (compress(model, tokens(100), press_of(0.6)) for _ in range(2))
    assert cache.get_seq_length() == 100
    assert int(cache.layers[0].store.length.max()) < 60
    for step, length in enumerate((1, 5, 1)):
        ids, start = tokens(length, seed=step), cache.get_seq_length()
        explicit = torch.arange(start, start + length)[None]
        assert torch.equal(logits(model, cache, ids), logits(model, same, ids, position_ids=explicit))


def test_many_tokens_one_by_one_and_at_once(model):
    """Growth: 200 appended tokens cross the slack several times."""
    ids = tokens(200, seed=1)
    full = dense(model, tokens(50))
    one_by_one, at_once = (compress(model, tokens(50), press_of()) for _ in range(2))
    biases = biases_of(at_once, full)
    steps = torch.cat([logits(model, one_by_one, ids[:, i : i + 1]) for i in range(200)], 1)
    with oracle_attention(model, biases):
        want = logits(model, full, ids)
    torch.testing.assert_close(logits(model, at_once, ids), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps, want, atol=1e-4, rtol=1e-4)


def test_a_second_turn_with_a_second_prefill(model):
    cache, full = compress(model, tokens(60), press_of()), dense(model, tokens(60))
    assert_equals_oracle(model, cache, full, [tokens(9, seed=1), tokens(1), tokens(40, seed=2), tokens(1)])


def test_two_caches_on_one_model_do_not_meet(model):
    a, b = compress(model, tokens(60), press_of(0.5)), compress(model, tokens(90, seed=5), press_of(0.8))
    alone_a, alone_b = copy.deepcopy(a), copy.deepcopy(b)
    mixed = [logits(model, cache, tokens(1, seed=i)) for i in range(4) for cache in (a, b)]
    assert all(torch.equal(mixed[2 * i], logits(model, alone_a, tokens(1, seed=i))) for i in range(4))
    assert all(torch.equal(mixed[2 * i + 1], logits(model, alone_b, tokens(1, seed=i))) for i in range(4))


def test_slack_is_never_read(model):
    """Scenario S9: NaN behind every segment's end."""
    cache, poisoned = (compress(model, tokens(60), press_of()) for _ in range(2))
    for layer in poisoned.layers:
        store = layer.store
        free = torch.ones(len(store.log_w), dtype=torch.bool)
        for start, length in zip(store.start.tolist(), store.length.tolist(), strict=True):
            free[start : start + length] = False
        assert free.any()
        for buffer in (store.keys, store.values, store.log_w):
            buffer[free] = torch.nan
    for step in range(3):
        ids = tokens(1 + step, seed=step)
        assert torch.equal(logits(model, cache, ids), logits(model, poisoned, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("padding", [0, 8])
def test_low_precision_models(dtype, attn, scale, padding):
    """Scenario S5: as close to the oracle as the dtype allows, and finite; with padding too, whose mask holds the
    dtype's least number."""
    model = tiny_llama(attn=attn, dtype=dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(scale)
    mask = torch.ones(2, 65, dtype=torch.long)
    mask[1, :padding] = 0
    ids, context = tokens(60, batch=2), {"attention_mask": mask[:, :60]}
    cache, full = compress(model, ids, press_of(0.9), **context), dense(model, ids, **context)
    biases = biases_of(cache, full)
    got = logits(model, cache, tokens(5, batch=2, seed=1), attention_mask=mask)
    with oracle_attention(model, biases):
        want = logits(model, full, tokens(5, batch=2, seed=1), attention_mask=mask)
    assert got.isfinite().all()
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_step_allocates_little_whatever_the_context(attn):
    """Scenario S24: no step copies or expands the cache (masks count tokens); growing is amortised, see
    ``tests/ragged``."""
    model, allocated = tiny_llama(attn=attn, head_dim=128), []
    for length in (200, 2000):
        cache = compress(model, tokens(length), press_of())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            for step in range(16):
                logits(model, cache, tokens(1, seed=step))
        allocated.append(sum(max(event.self_cpu_memory_usage, 0) for event in profile.events()) / 16)
    assert allocated[1] - allocated[0] < 0.05 * cache_bytes(cache)


# -- Cropping --------------------------------------------------------------------------------------------------------


def test_crop_takes_appended_tokens_back(model):
    cache, same = (compress(model, tokens(60), press_of()) for _ in range(2))
    logits(model, cache, tokens(3, seed=1))
    logits(model, same, tokens(3, seed=1))
    logits(model, cache, tokens(40, seed=2))
    for length in (70, 80, 63):  # the second is longer than the cache: nothing happens
        cache.crop(length)
        assert cache.get_seq_length() == min(length, 70)
    assert torch.equal(logits(model, cache, tokens(2)), logits(model, same, tokens(2)))
    cache.crop(-2)
    assert cache.get_seq_length() == 63


@pytest.mark.parametrize("length", [59, 0, -5, -100])
def test_a_compressed_context_cannot_be_cropped(model, length):
    cache, same = (compress(model, tokens(60), press_of()) for _ in range(2))
    for other in (cache, same):
        logits(model, other, tokens(4, seed=1))
    with pytest.raises(NotImplementedError, match="cannot crop into a compressed context of 60 tokens, got"):
        cache.crop(length)
    assert torch.equal(logits(model, cache, tokens(2)), logits(model, same, tokens(2)))


def test_slices_drop_an_answer_as_kvpress_does(model):
    cache, same = (compress(model, tokens(60), press_of()) for _ in range(2))
    logits(model, cache, tokens(20, seed=1))
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :60], layer.values[:, :, :60]
        assert layer.get_seq_length() == 60
        assert layer.keys.shape == (1, 2, 60, 16)
    assert torch.equal(logits(model, cache, tokens(2)), logits(model, same, tokens(2)))


@pytest.mark.parametrize(
    "index",
    [
        0,
        (slice(None), 0),
        (slice(None), slice(None), slice(5, None)),
        (slice(None), slice(None), slice(None, None, 2)),
        ...,
    ],
    ids=str,
)
def test_other_slices_are_refused(index):
    layer = compress(tiny_llama(), tokens(20), press_of()).layers[0]
    with pytest.raises(TypeError, match="can be indexed with"):
        layer.keys[index]


def test_other_assignments_are_refused():
    first, second = (compress(tiny_llama(), tokens(20), press_of()).layers[0] for _ in range(2))
    for value in (torch.zeros(1, 2, 20, 16), second.keys[:, :, :20], None):
        with pytest.raises(TypeError, match=r"can be set to layer.keys\[:, :, :n\] only"):
            first.keys = value
    with pytest.raises(NotImplementedError, match="cannot crop into a compressed context"):
        first.values = first.values[:, :, :10]


# -- Copies and batches ------------------------------------------------------------------------------------------------


def test_deep_copies_are_independent(model):
    cache = compress(model, tokens(60), press_of())
    logits(model, cache, tokens(3, seed=1))
    twin, want = copy.deepcopy(cache), copy.deepcopy(cache)
    logits(model, cache, tokens(9, seed=2))
    cache.crop(61)
    assert twin.get_seq_length() == 63
    for layer, original in zip(twin.layers, cache.layers, strict=True):
        assert layer.store.keys.data_ptr() != original.store.keys.data_ptr()
    assert torch.equal(logits(model, twin, tokens(2)), logits(model, want, tokens(2)))


def test_reordering_selecting_and_repeating_rows(model):
    ids = tokens(40, batch=3)
    cache, full = compress(model, ids, press_of(0.6)), dense(model, ids)
    rows = torch.arange(3)
    for change, order in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True, False, False, True])), [0, 2, 5]),
        (lambda c: c.batch_select_indices(torch.tensor([-1, 1])), [2, 1]),
    ):
        change(cache)
        change(full)
        rows = rows[order]
        assert cache.layers[0].store.batch == len(rows)
        assert_equals_oracle(
            model, cache, full, [tokens(2, batch=len(rows), seed=len(rows)), tokens(1, batch=len(rows))]
        )


def test_padding_follows_its_row(model):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    cache = compress(model, tokens(20, batch=2), press_of(), attention_mask=mask)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].padding == [8, 0]
    longer = torch.nn.functional.pad(mask.flip(0), (0, 2), value=1)
    logits(model, cache, tokens(2, batch=2), attention_mask=longer)
    with pytest.raises(NotImplementedError, match="may hide left padding only"):
        logits(model, cache, tokens(1, batch=2), attention_mask=torch.nn.functional.pad(mask, (0, 3), value=1))


def test_questions_of_different_lengths_in_a_batch(model):
    """Left padding of the questions, between context and question, gets weight 0."""
    contexts = tokens(30, batch=2)
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[1, 30:33] = 0
    positions = mask.cumsum(-1) - 1
    cache = compress(model, contexts, press_of())
    questions, answer = tokens(6, batch=2, seed=1), tokens(1, batch=2, seed=2)
    together = logits(model, cache, questions, attention_mask=mask, position_ids=positions[:, 30:])[:, -1]
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    after = logits(model, cache, answer, attention_mask=longer, position_ids=positions[:, -1:] + 1)
    for row, length in ((0, 6), (1, 3)):
        alone = compress(model, contexts[row : row + 1], press_of())
        want = logits(model, alone, questions[row : row + 1, 6 - length :])[:, -1]
        torch.testing.assert_close(together[row : row + 1], want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            after[row : row + 1], logits(model, alone, answer[row : row + 1]), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda layer: layer.reset(), "cannot be reset"),
        (lambda layer: layer.offload(), "cannot be offloaded"),
        (lambda layer: layer.prefetch(), "cannot be offloaded"),
        (lambda layer: layer.lazy_initialization(torch.zeros(1), torch.zeros(1)), "holds its context already"),
    ],
)
def test_what_a_compressed_layer_cannot_do(operation, message):
    layer = compress(tiny_llama(), tokens(20), press_of()).layers[0]
    with pytest.raises(NotImplementedError, match=message):
        operation(layer)


# -- Modes of torch ----------------------------------------------------------------------------------------------------


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("prefill", MODES)
@pytest.mark.parametrize("decode", MODES)
def test_prefill_and_decoding_in_different_modes(model, prefill, decode):
    want = logits(model, compress(model, tokens(60), press_of()), tokens(3, seed=1))
    with MODES[prefill]():
        cache = compress(model, tokens(60), press_of())
    with MODES[decode]():
        got = logits(model, cache, tokens(3, seed=1))
        for _ in range(70):  # grows the store
            logits(model, cache, tokens(1))
        copy.deepcopy(cache).crop(61)
        cache.reorder_cache(torch.tensor([0]))
        logits(model, cache, tokens(1))
    assert torch.equal(got, want)
    assert not any(layer.store.keys.requires_grad for layer in cache.layers)


def test_training_mode_decodes_and_dropout_is_refused(model):
    cache = compress(model, tokens(60), press_of())
    same = copy.deepcopy(cache)
    model.train()
    assert torch.equal(logits(model, cache, tokens(2)), logits(model.eval(), same, tokens(2)))
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match=r"attention dropout over a compressed KV cache: expected 0, got 0.1"):
        logits(model, cache, tokens(2))


def test_sliding_layers_go_on_sliding():
    """Scenario S19: beyond the window, with a cache of sliding layers and with a plain one."""
    for attn in ("sdpa", "eager"):
        model = tiny_gemma3(attn=attn)
        with press_of()(model):
            cache = model(tokens(40), use_cache=True).past_key_values
        full = model(tokens(40), use_cache=True).past_key_values
        assert [isinstance(layer, RaggedLayer) for layer in cache.layers] == [False] * 5 + [True]
        assert_equals_oracle(model, cache, full, [tokens(9, seed=1), tokens(1), tokens(20, seed=2), tokens(1)])
        assert cache.layers[0].keys.shape[2] == 15
