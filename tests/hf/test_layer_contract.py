"""The contract of transformers' ``DynamicLayer``, side by side with it: what transformers' own tests of dynamic caches
check (shapes, lengths, masks, cropping, batches, copies, generation), on a layer from which nothing was evicted."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from kvpress_prob.hf import compress_layer
from tests.helpers.compare import dense
from tests.helpers.models import tiny_llama, tokens

CONTEXT = 12


def twins(batch: int = 2) -> tuple[DynamicCache, DynamicCache]:
    """A compressed cache that kept everything with weight 1, and the dense cache of the same context."""
    model = tiny_llama()
    ours, theirs = (dense(model, tokens(CONTEXT, batch=batch)) for _ in range(2))
    for index in range(2):
        shape = (batch, 2, CONTEXT)
        compress_layer(ours, index, torch.ones(shape, dtype=torch.bool), torch.zeros(shape), [0] * batch)
    return ours, theirs


def states(batch: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 2, n, 16, generator=generator) for _ in range(2))


def assert_same(ours: DynamicCache, theirs: DynamicCache) -> None:
    """Everything that transformers reads from a cache, and every entry."""
    assert len(ours) == len(theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.get_max_cache_shape() == theirs.get_max_cache_shape()
    assert ours.is_sliding == theirs.is_sliding
    assert (ours.is_compileable, ours.is_initialized) == (theirs.is_compileable, theirs.is_initialized)
    for index, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        assert a.get_seq_length() == b.get_seq_length() == ours.get_seq_length(index)
        assert (a.is_sliding, a.is_compileable, a.is_initialized) == (b.is_sliding, b.is_compileable, b.is_initialized)
        assert a.get_max_cache_shape() == b.get_max_cache_shape()
        for n in (1, 7):
            position = torch.arange(n) + a.get_seq_length()
            assert a.get_mask_sizes(position) == b.get_mask_sizes(position) == ours.get_mask_sizes(position, index)
        for name in ("keys", "values"):
            mine, tensor = getattr(a, name), getattr(b, name)
            assert (mine.shape, mine.dtype, mine.device) == (tensor.shape, tensor.dtype, tensor.device)
        for row in range(a.store.batch):
            for head in range(2):
                keys, values, log_w = a.store.segment(row, head)
                assert torch.equal(keys, b.keys[row, head])
                assert torch.equal(values, b.values[row, head])
                assert (log_w == 0).all()


def test_every_public_method_of_a_dynamic_layer_is_there():
    layer = twins()[0].layers[0]
    assert isinstance(layer, CacheLayerMixin)
    public = [name for name in dir(DynamicLayer) if not name.startswith("_")]
    assert "batch_select_indices" in public
    assert all(hasattr(layer, name) for name in public)


@pytest.mark.parametrize("n", [1, 2, 5, 70])
def test_update_appends_and_returns_the_whole_length(n):
    ours, theirs = twins()
    for step in range(3):
        for index in range(2):
            got = ours.update(*states(2, n, step), index)
            want = theirs.update(*states(2, n, step), index)
            assert [part.shape for part in got] == [part.shape for part in want]
        assert_same(ours, theirs)


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 40)),
    st.tuples(st.just("crop"), st.integers(CONTEXT, CONTEXT + 60)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.lists(st.booleans(), min_size=8, max_size=8)),
    st.tuples(st.just("copy"), st.none()),
)


@given(st.integers(1, 3), st.lists(OPERATIONS, max_size=6))
def test_any_sequence_of_operations(batch, operations):
    ours, theirs = twins(batch)
    for name, value in operations:
        batch = len(theirs.layers[0].keys)
        if name == "copy":
            ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
        for cache in (ours, theirs):
            if name == "update":
                for index in range(2):
                    cache.update(*states(batch, value), index)
            elif name == "crop":
                cache.crop(value)
            elif name == "reorder":
                cache.reorder_cache(torch.tensor(value) % batch)
            elif name == "repeat" and batch < 8:
                cache.batch_repeat_interleave(value)
            elif name == "select" and any(value[:batch]):
                cache.batch_select_indices(torch.tensor(value[:batch]))
        assert_same(ours, theirs)


@pytest.mark.parametrize("drop", [1, 3, 5])
def test_crop_by_a_negative_length(drop):
    ours, theirs = twins()
    for cache in (ours, theirs):
        for index in range(2):
            cache.update(*states(2, 5), index)
        cache.crop(-drop)
    assert_same(ours, theirs)


def test_a_cropped_cache_is_written_over():
    ours, theirs = twins()
    for cache in (ours, theirs):
        for seed in (1, 2):
            for index in range(2):
                cache.update(*states(2, 9, seed), index)
            cache.crop(CONTEXT + 2)
    assert_same(ours, theirs)


def test_iterating_and_printing():
    ours, theirs = twins()
    assert [len(layer) for layer in ours] == [len(layer) for layer in theirs]
    for (keys, *_), layer in zip(ours, ours.layers, strict=True):
        assert keys.shape == layer.keys.shape
    assert "RaggedLayer(context=12, appended=0, stored=48)" in repr(ours)


SETTINGS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_generate_is_the_dense_generate(settings, attn):
    """Greedy, beam search, sampling, prompt lookup: the same tokens as over the dense cache, and the same lengths."""
    model = tiny_llama(attn=attn)
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2, "max_new_tokens": 12} | SETTINGS[settings]
    model.generation_config.eos_token_id = 2
    results, caches = [], twins(batch=1)
    text = torch.cat([tokens(CONTEXT), tokens(4, seed=1).repeat(1, 3)], 1)
    for cache in caches:
        cache.batch_repeat_interleave(settings.get("num_beams", 1))
        torch.manual_seed(1)
        results.append(model.generate(text, past_key_values=cache, **settings))
    assert torch.equal(*results)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
