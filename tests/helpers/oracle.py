"""The oracle: float32 attention over the full keys and values with a bias per KV head.

The bias is log_w on kept entries, -inf on evicted ones and 0 on entries added later, so it says in the plainest way
what decoding over a compressed cache must compute. Only the bookkeeping (which entries were kept, with which weight) is
read from the cache under test; keys, values and every product come from a dense cache of transformers' own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvpress_prob.hf import RaggedLayer, decoder_of
from kvpress_prob.hf.attention import SUPPORTED_ATTENTION

_BIASES: dict[int, Tensor] = {}


def _oracle_attention(base, module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
    group = query.shape[1] // key.shape[1]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = scaling * query.float() @ key.float().repeat_interleave(group, 1).mT
    if softcap is not None and base == "eager":  # transformers' sdpa attention ignores it
        logits = softcap * torch.tanh(logits / softcap)
    bias = _BIASES.get(module.layer_idx)
    if bias is not None:
        later = logits.shape[-1] - bias.shape[-1]
        logits = logits + torch.nn.functional.pad(bias, (0, later)).repeat_interleave(group, 1).unsqueeze(2)
    mask = attention_mask
    if mask is None:
        n, length = logits.shape[-2:]
        mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    logits = logits.masked_fill(~mask, -torch.inf)
    output = torch.softmax(logits, -1).nan_to_num(0) @ value.float().repeat_interleave(group, 1)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


for _base in SUPPORTED_ATTENTION:
    AttentionInterface.register(f"oracle_{_base}", partial(_oracle_attention, _base))
    AttentionMaskInterface.register(f"oracle_{_base}", sdpa_mask)


@contextmanager
def oracle_attention(model: PreTrainedModel, biases: dict[int, Tensor]) -> Iterator[None]:
    """Let the model attend with the given bias [b, hkv, t] per layer index."""
    config = decoder_of(model).config
    before = config._attn_implementation
    _BIASES.clear()
    _BIASES.update(biases)
    config._attn_implementation = f"oracle_{before}"
    try:
        yield
    finally:
        config._attn_implementation = before
        _BIASES.clear()


def biases_of(compressed: DynamicCache, dense: DynamicCache, atol: float = 0.0) -> dict[int, Tensor]:
    """Per compressed layer, the bias over the context: finds each kept key among the dense ones, checks its value,
    reads its weight.

    Both caches hold the same context; ``compressed`` may hold appended tokens as well. With ``atol`` keys need not be
    equal to the bit: those of tokens that were appended before a budget made them part of the context are not.
    """
    biases = {}
    for index, layer in enumerate(compressed.layers):
        if not isinstance(layer, RaggedLayer):
            continue
        keys, values = dense.layers[index].keys, dense.layers[index].values
        t = layer.context_length
        bias = torch.full((*keys.shape[:2], t), -torch.inf)
        for row in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                k, v, log_w = layer.store.segment(row, head)
                kept = len(k) - layer.appended
                place = layer.padding[row] - 1
                for i in range(kept):
                    # Entries are stored in position order, so equal keys cannot be confused.
                    match = ((keys[row, head, place + 1 : t] - k[i]).abs() <= atol).all(-1).nonzero()
                    assert len(match), "a kept key is not one of the context's, or out of order"
                    place = place + 1 + int(match[0])
                    assert ((values[row, head, place] - v[i]).abs() <= atol).all()
                    bias[row, head, place] = log_w[i]
        biases[index] = bias
    return biases
