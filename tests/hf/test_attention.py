"""Attention over a compressed cache: masks, other attention functions, and what stands in for its tensors."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tests.helpers.compare import compress, press_of
from tests.helpers.models import tiny_llama, tokens


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny_llama(attn=request.param)


LENGTH = 66  # a context of 60 and six new tokens
SEEN = torch.ones(6, LENGTH, dtype=torch.bool).tril(LENGTH - 6)[None, None]
MIN = torch.finfo(torch.float32).min


def additive(mask, hidden):
    return torch.where(mask, 0.0, hidden)


EQUAL = {
    "flat": torch.ones(1, LENGTH, dtype=torch.long),
    "flat, bool": torch.ones(1, LENGTH, dtype=torch.bool),
    "pairs": SEEN,
    "pairs, every head": SEEN.expand(1, 4, -1, -1),
    "additive, smallest number": additive(SEEN, MIN),
    "additive, infinity": additive(SEEN, -torch.inf),
}


@pytest.mark.parametrize("mask", EQUAL)
def test_masks_that_hide_nothing_but_the_future(model, mask):
    want = model(tokens(6, seed=1), past_key_values=compress(model, tokens(60), press_of())).logits
    cache = compress(model, tokens(60), press_of())
    got = model(tokens(6, seed=1), past_key_values=cache, attention_mask=EQUAL[mask]).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def changed(mask, index, value):
    mask = mask.clone()
    mask[index] = value
    return mask


REFUSED = {
    "a hole in the context": (changed(EQUAL["flat"], (0, 50), 0), "may hide left padding only"),
    "the context's beginning": (changed(EQUAL["flat"], (0, slice(5)), 0), "may hide left padding only"),
    "the question only": (torch.ones(1, 6, dtype=torch.long), "may hide left padding only"),
    "a later token": (changed(SEEN, (0, 0, 0, 65), True), "causal attention"),
    "one row of the question": (changed(SEEN, (0, 0, 5, 61), False), "may hide left padding only"),
    "one head": (changed(SEEN.repeat(1, 4, 1, 1), (0, 2, slice(None), 61), False), "must be the same for all heads"),
    "a bias": (changed(additive(SEEN, MIN), (0, 0, slice(1, None), 61), -0.5), "must hold 0 and -inf only, not a bias"),
}


@pytest.mark.parametrize("mask", REFUSED)
def test_masks_that_cannot_be_honoured_are_refused(model, mask):
    mask, message = REFUSED[mask]
    cache = compress(model, tokens(60), press_of())
    with pytest.raises(NotImplementedError, match=message):
        model(tokens(6, seed=1), past_key_values=cache, attention_mask=mask)


def test_a_mask_of_another_size_is_refused(model):
    cache = compress(model, tokens(60), press_of())
    with pytest.raises(ValueError, match="attention_mask must cover 6 new tokens and 66 entries, got"):
        model(tokens(6), past_key_values=cache, attention_mask=SEEN[..., :-1])


def test_each_mask_says_anew_which_appended_tokens_are_hidden(model):
    hiding = changed(EQUAL["flat"], (0, slice(60, 62)), 0)
    hidden, shown = compress(model, tokens(60), press_of()), compress(model, tokens(60), press_of())
    model(tokens(6, seed=1), past_key_values=hidden, attention_mask=hiding)
    for head in range(2):
        log_w = hidden.layers[0].store.segment(0, head)[2][-6:]
        assert torch.equal(log_w, torch.tensor([-torch.inf] * 2 + [0.0] * 4))
    # As over a dense cache, the next token sees everything unless its own mask hides it.
    model(tokens(6, seed=1), past_key_values=shown, attention_mask=hiding)
    assert torch.equal(
        model(tokens(1), past_key_values=hidden).logits,
        model(tokens(1), past_key_values=shown, attention_mask=torch.ones(1, 67)).logits,
    )
    assert (hidden.layers[0].store.segment(0, 0)[2][-7:] == 0).all()


def test_a_padded_context_needs_its_mask(model):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :8] = 0
    cache = compress(model, tokens(20, batch=2), press_of(), attention_mask=mask)
    for n in (1, 3):
        with pytest.raises(NotImplementedError, match="attention_mask m"):
            model(tokens(n, batch=2), past_key_values=cache)


def test_the_implementation_can_change_between_prefill_and_decoding():
    model = tiny_llama(attn="sdpa")
    want = model(tokens(3, seed=1), past_key_values=compress(model, tokens(60), press_of())).logits
    cache = compress(model, tokens(60), press_of())
    model.set_attn_implementation("eager")
    got = model(tokens(3, seed=1), past_key_values=cache).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def reads_keys(module, query, key, value, attention_mask, **kwargs):
    return torch.einsum("bhqd,bhkd->bhqk", query, key), None


def adds_keys(module, query, key, value, attention_mask, **kwargs):
    return key + value, None


def forgets_the_softmax(module, query, key, value, attention_mask, scaling, **kwargs):
    return torch.matmul(torch.matmul(query, key.transpose(2, 3)) * scaling, value), None


def masks_after_the_softmax(module, query, key, value, attention_mask, scaling, **kwargs):
    weights = F.softmax(torch.matmul(query, key.transpose(2, 3)) * scaling, dim=-1)
    return torch.matmul(weights + 1.0, value), None


def wrong_layout(module, query, key, value, attention_mask, **kwargs):
    return key.transpose(1, 2), None


OTHERS = {
    reads_keys: "einsum cannot read a compressed KV cache: decode with attn_implementation",
    adds_keys: "unsupported operand",
    forgets_the_softmax: "linear logits are multiplied with the values",
    masks_after_the_softmax: "normalised logits are masked",
    wrong_layout: "has no other layout",
}


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_an_attention_function_that_computes_something_else_raises(function):
    model = tiny_llama()
    cache = compress(model, tokens(60), press_of())
    AttentionInterface.register("another", function)
    model.config._attn_implementation = "another"
    with pytest.raises(TypeError, match=OTHERS[function]):
        model(tokens(3), past_key_values=cache)


def test_attention_weights_are_not_kept_and_say_so():
    model = tiny_llama(attn="eager")
    cache = compress(model, tokens(60), press_of())
    weights = model(tokens(3), past_key_values=cache, output_attentions=True).attentions[0]
    with pytest.raises(AttributeError, match="attention weights are not kept"):
        weights.mean()
    with pytest.raises(TypeError, match="cannot read a compressed KV cache"):
        torch.mean(weights)
