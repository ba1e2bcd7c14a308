"""Greedy answers over compressed caches: one cache after the other as kvpress' pipeline does, or many at once.

*Single* runs kvpress' own ``generate_answer``, masking presses through kvpress' own attention patch.

*Batched* makes every compressed copy of one context a row of one batch: a press that evicts the same entries in every
head is a ragged row with weights 1, a masking press' row simply lacks what it hides, and the logical length is the same
for all. Rows that are finished are dropped. The arithmetic is the same but floating-point sums run in another order, so
where two tokens are almost equally likely the other one can win.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from kvpress import KVPressTextGenerationPipeline
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob.hf import RaggedLayer, reads_of
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill, hidden_entries, now
from kvpress_prob.ragged import RaggedKV


@dataclass(frozen=True)
class Answer:
    """A decoded answer.

    Attributes
    ----------
    text : str
    tokens : int
        Generated tokens.
    milliseconds : float
        Of the whole batch, for a row of a batch.
    """

    text: str
    tokens: int
    milliseconds: float


def decode_single(
    pipe: KVPressTextGenerationPipeline,
    compressed: Compressed,
    context_length: int,
    question_ids: Tensor,
    max_new_tokens: int,
) -> Answer:
    """kvpress' greedy decoding over one cache, which is left as it was."""
    cache = compressed.cache
    lengths = [cache.get_seq_length(layer) for layer in range(len(cache))]
    device = question_ids.device
    with hidden_entries(compressed.masked), _counted_calls(pipe.model) as calls:
        begin = now(device)
        text = pipe.generate_answer(question_ids, cache, context_length, max_new_tokens)
        elapsed = now(device) - begin
    pipe._remove_answer_from_cache(cache, lengths)
    return Answer(text, len(calls), elapsed)


@contextmanager
def _counted_calls(model: Any) -> Iterator[list[None]]:
    """Grows by one with every forward pass: one per generated token."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


class RowBatch:
    """Compressed copies of one context as rows of one batch.

    Parameters
    ----------
    shared : SharedPrefill
    rows : list of Compressed
        Copied; may be dropped afterwards.
    room : int
        Tokens that will be appended at most: question and answer.
    """

    def __init__(self, shared: SharedPrefill, rows: list[Compressed], room: int):
        self.rows, self.context_length = len(rows), shared.tokens
        compressed = set(shared.prefill.layers)
        self.stores: dict[int, RaggedKV] = {}
        self.dense: dict[int, Any] = {}
        for index in range(len(shared.prefill.cache.layers)):
            if index in compressed:
                self.stores[index] = _stack(shared, rows, index, room)
            else:
                self.dense[index] = shared.prefill.cache.layers[index]

    def cache(self) -> DynamicCache:
        """A cache to append to; caches of one batch share the context's memory and must be used one after the other."""
        cache = DynamicCache()
        for index in range(len(self.stores) + len(self.dense)):
            if index in self.stores:
                store = self.stores[index]
                store = replace(store, length=store.length.clone())
                cache.layers.append(RaggedLayer(store, self.context_length, [0] * self.rows, reads=reads_of(cache)))
            else:
                layer = copy.copy(self.dense[index])
                layer.batch_repeat_interleave(self.rows)
                cache.layers.append(layer)
        return cache


def decode_batch(
    pipe: KVPressTextGenerationPipeline, batch: RowBatch, question_ids: Tensor, max_new_tokens: int
) -> list[Answer]:
    """Greedy answers of all rows to one question [1, n], by the rules of kvpress' ``generate_answer``.

    The end-of-sequence token ends an answer and is part of it; as the first token it ends nothing.
    """
    model = cast(PreTrainedModel, pipe.model)
    eos = model.generation_config.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
    stops = torch.tensor(eos if isinstance(eos, list) else [] if eos is None else [eos], device=question_ids.device)
    begin = now(question_ids.device)
    cache = batch.cache()
    generated: list[list[int]] = [[] for _ in range(batch.rows)]
    active = list(range(batch.rows))
    ids = question_ids.expand(batch.rows, -1)
    position = batch.context_length
    for step in range(max(max_new_tokens, 1)):
        n = ids.shape[1]
        position_ids = torch.arange(position, position + n, device=ids.device).unsqueeze(0)
        logits = model(input_ids=ids, past_key_values=cache, position_ids=position_ids, logits_to_keep=1).logits
        position += n
        tokens = logits[:, -1].argmax(-1)
        for row, token in zip(active, tokens.tolist(), strict=True):
            generated[row].append(token)
        going = ~torch.isin(tokens, stops) if step else torch.ones_like(tokens, dtype=torch.bool)
        if not going.any():
            break
        if not going.all():
            kept = going.nonzero().squeeze(-1)
            _keep_rows(cache, kept)
            active = [active[row] for row in kept.tolist()]
            tokens = tokens[kept]
        ids = tokens.unsqueeze(-1)
    elapsed = now(question_ids.device) - begin
    decode = cast(Any, pipe.tokenizer).decode
    return [Answer(str(decode(tokens, skip_special_tokens=True)), len(tokens), elapsed) for tokens in generated]


def _stack(shared: SharedPrefill, rows: list[Compressed], index: int, room: int) -> RaggedKV:
    """One layer of all rows as one store."""
    segments = [segment for row in rows for segment in _segments(row, index)]
    keys, values, _ = segments[0]
    with torch.inference_mode(False), torch.no_grad():
        store = RaggedKV.empty(keys, values, [len(segment[0]) for segment in segments], len(rows), room)
        for begin, (keys, values, log_w) in zip(store.start.tolist(), segments, strict=True):
            place = slice(begin, begin + len(keys))
            store.keys[place], store.values[place] = keys, values
            store.log_w[place] = 0.0 if log_w is None else log_w
    return store


def _segments(row: Compressed, index: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Keys, values and log-weights that every head of a layer attends to."""
    layer = row.cache.layers[index]
    if isinstance(layer, RaggedLayer):
        for head in range(layer.store.kv_heads):
            yield layer.store.segment(0, head)
        return
    keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
    hidden = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
    for module, indices in row.masked.items():
        if module.layer_idx == index:
            hidden[tuple(part.to(keys.device) for part in indices)] = True
    masked = bool(hidden.any())
    for head in range(keys.shape[1]):
        seen = ~hidden[0, head]
        yield (keys[0, head][seen], values[0, head][seen], None) if masked else (keys[0, head], values[0, head], None)


def _keep_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Drop the other rows; a store's buffers stay where they are."""
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            store = layer.store
            start, length = (part.view(store.batch, -1)[rows].flatten() for part in (store.start, store.length))
            layer.store = replace(store, start=start, length=length, batch=len(rows))
            layer.padding = [0] * len(rows)
        else:
            cast(Any, layer).batch_select_indices(rows)
