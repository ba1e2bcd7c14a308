"""How far the attention of the question's tokens over a compressed cache is from that over the dense one.

The question runs once over the dense cache; its queries, keys and values are then put to every compressed copy, so a
layer's error is that of its own eviction and not of the layers before it::

    relative    mean of |o_hat - o| / |o| over layers, query heads and the question's tokens
    absolute    mean of |o_hat_d - o_d| over layers, query heads and coordinates d, first token only (arXiv 2608.28293,
                figure 2)
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvpress_prob.hf import AttentionInputs, RaggedLayer, attention_inputs
from kvpress_prob.ops.append import append
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.decoding import RowBatch
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill


@dataclass(frozen=True)
class AttentionError:
    """Errors of one compressed cache."""

    relative: float
    absolute: float


class DenseQuestion:
    """The question's attention inputs, keys and values of every full-attention layer, from one pass over the dense
    cache."""

    def __init__(self, shared: SharedPrefill, question_ids: Tensor):
        self.inputs: dict[int, AttentionInputs] = {}
        modules = [layer.module for layer in shared.layers]
        handles = [module.register_forward_hook(self._note, with_kwargs=True) for module in modules]
        cache = shared.copy_cache()
        try:
            shared.prefill.model(input_ids=question_ids, past_key_values=cache, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
        self.keys, self.values = (
            {index: cast(Tensor, getattr(cache.layers[index], name))[:, :, shared.tokens :] for index in self.inputs}
            for name in ("keys", "values")
        )

    def _note(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.inputs[cast(int, module.layer_idx)] = attention_inputs(module, hidden_states, kwargs)


def attention_errors(
    shared: SharedPrefill, question: DenseQuestion, rows: list[Compressed], question_length: int
) -> list[AttentionError]:
    """Errors of every row against the dense cache."""
    dense = compressor(None, shared).compress(0.0, None)
    batch = RowBatch(shared, [dense, *rows], question_length)
    cache = batch.cache()
    relative, absolute = [], []
    for index, inputs in question.inputs.items():
        layer = cast(RaggedLayer, cache.layers[index])
        keys, values = (part[index].expand(batch.rows, -1, -1, -1) for part in (question.keys, question.values))
        append(layer.store, keys, values)
        query = inputs.query.expand(batch.rows, -1, -1, -1)
        output = weighted_decode(query, layer.store, scaling=inputs.scaling, softcap=inputs.softcap)[0].float()
        error = output[1:] - output[:1]
        relative.append((error.norm(dim=-1) / output[:1].norm(dim=-1)).mean((1, 2)))
        absolute.append(error[:, :, 0].abs().mean((1, 2)))
    means = (torch.stack(part).mean(0).tolist() for part in (relative, absolute))
    return [AttentionError(*pair) for pair in zip(*means, strict=True)]
