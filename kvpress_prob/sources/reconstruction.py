"""Reconstruction rows: the model reads its context once more, chunk by chunk, with the context in its cache.

Repeating a text, a model looks up what it is about to write, so every fact of the context is asked for by some row
(KVzip, https://arxiv.org/abs/2505.23416). The rows' own keys and values are dropped after each chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from kvpress_prob.hf import AttentionInputs, Prefill, Upcoming, second_pass
from kvpress_prob.maths.arguments import check_integer, is_number
from kvpress_prob.maths.sampling import systematic_sample
from kvpress_prob.sources.query_rows import QueryRows, Visit

STRETCH = 64
"""Tokens that are repeated or left out together when ``fraction`` is below 1."""

Prompt = Callable[[Tensor, int], Tensor]
"""(context ids [1, t], first token of the chunk) -> ids [1, p] that come before the repeated chunk."""


@dataclass(frozen=True)
class Reconstruction:
    """Query rows of a pass that repeats the context.

    Parameters
    ----------
    chunk_size : int, default=2048
        Tokens that are repeated at a time.
    fraction : float, default=1.0
        Share of the context that is repeated, in (0, 1]: an evenly spread sample of stretches of 64 tokens, for
        proportionally less time. Entries that no repeated row looks up get low scores.
    prompt : callable or "kvzip", optional, default=None
        What is said before a chunk is repeated. "kvzip" is KVzip's request, and its ``skip``, by the tokenizer that the
        model was loaded beside (``kvzip_prompt``). None says nothing: a text that begins again is repeated without
        being asked.
    skip : int, default=0
        First tokens of the context, a chat template's, that are not repeated.
    n_sink : int, optional, default=None
        KVzip's scope: attention is renormalised over the first ``n_sink`` entries, the chunk and the repeated tokens.
        None scores every entry by its full attention.
    """

    chunk_size: int = 2048
    fraction: float = 1.0
    prompt: Prompt | Literal["kvzip"] | None = None
    skip: int = 0
    n_sink: int | None = None

    def __post_init__(self):
        check_integer("chunk_size", self.chunk_size, 1)
        if not is_number(self.fraction) or not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be a number in (0, 1], got {self.fraction!r}")
        check_integer("skip", self.skip, 0)
        if self.n_sink is not None:
            check_integer("n_sink", self.n_sink, 0)
        if self.prompt == "kvzip" and self.skip:
            raise ValueError(f"skip must be 0 with prompt='kvzip', which has its own, got {self.skip}")
        if self.prompt is not None and self.prompt != "kvzip" and not callable(self.prompt):
            raise ValueError(f"prompt must be None, 'kvzip' or callable, got {self.prompt!r}")

    def check(self, upcoming: Upcoming) -> None:
        """Refuse a prefill that cannot be repeated: of embeddings, or past the model's own table of positions."""
        if upcoming.input_ids is None:
            raise ValueError("input_ids must be given to the model for a reconstruction, got inputs_embeds")
        spoken = self._spoken(upcoming.model)
        if upcoming.table is not None:
            rows = zip(upcoming.input_ids, upcoming.valid, strict=True)
            fed = [chunk for ids, valid in rows for _, chunk in spoken._chunks(ids[valid].unsqueeze(0))]
            upcoming.check_positions(max(chunk.shape[1] for chunk in fed))

    def run(self, prefill: Prefill, visit: Visit) -> None:
        """Repeat the context; see ``PassSource``.

        Raises
        ------
        ValueError
            If the model was called with embeddings: there are no tokens to repeat.
        """
        ids = prefill.input_ids
        if ids is None:
            raise ValueError("input_ids must be given to the model for a reconstruction, got inputs_embeds")
        t, chunks = ids.shape[1], self._spoken(prefill.model)._chunks(ids)
        total = sum(chunk.shape[1] for _, chunk in chunks)
        for start, chunk in chunks:
            scope = self._scope(start, t, chunk.shape[1], ids.device)
            second_pass(prefill, chunk, partial(_attend, visit, t, total, scope))

    def _spoken(self, model: PreTrainedModel) -> "Reconstruction":
        """With the prompt that is found beside the model."""
        if self.prompt != "kvzip":
            return self
        prompt, skip = _prompt_of(model.config.name_or_path)
        return replace(self, prompt=prompt, skip=skip)

    def _chunks(self, ids: Tensor) -> list[tuple[int, Tensor]]:
        """First token of every chunk, and what is fed for it."""
        t = ids.shape[1]
        return [(start, self._fed(ids, start)) for start in range(min(self.skip, t - 1), t, self.chunk_size)]

    def _fed(self, ids: Tensor, start: int) -> Tensor:
        """The prompt and the tokens of a chunk that are repeated."""
        chunk = ids[:, start : start + self.chunk_size]
        if self.fraction < 1:
            stretches = -(-chunk.shape[1] // STRETCH)
            q = torch.full((1, stretches), self.fraction, dtype=torch.float64, device="cpu")
            chosen = systematic_sample(q, torch.tensor([0.5], dtype=torch.float64, device="cpu")).squeeze(0)
            chosen[0] |= not chosen.any()
            chunk = chunk[:, chosen.repeat_interleave(STRETCH)[: chunk.shape[1]].to(ids.device)]
        if not callable(self.prompt):
            return chunk
        return torch.cat((self.prompt(ids, start).to(ids.device), chunk), 1)

    def _scope(self, start: int, t: int, new: int, device: torch.device) -> Tensor | None:
        if self.n_sink is None:
            return None
        entry = torch.arange(t + new, device=device)
        return (entry < min(self.n_sink, start)) | ((entry >= start) & (entry < start + self.chunk_size)) | (entry >= t)


def _attend(
    visit: Visit,
    t: int,
    total: int,
    scope: Tensor | None,
    layer: int,
    inputs: AttentionInputs,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    weights = keys.new_full((keys.shape[0], inputs.query.shape[2]), 1 / total, dtype=torch.float64)
    rows = QueryRows(inputs.query, keys, values, t, weights, inputs.scaling, inputs.softcap, scope=scope)
    return visit(layer, rows)


@lru_cache(maxsize=8)
def _prompt_of(model: str) -> tuple[Prompt, int]:
    """``kvzip_prompt`` of a model's tokenizer, which is where the model is, as KVzip finds it."""
    try:
        return kvzip_prompt(AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"prompt='kvzip' needs a tokenizer beside the model {model!r}, got none") from error


def kvzip_prompt(tokenizer: Any) -> tuple[Prompt, int]:
    """KVzip's request to repeat, and how many tokens of the chat template come before the context.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's; its chat template is used if it has one.

    Returns
    -------
    prompt : callable
        For ``Reconstruction.prompt``.
    skip : int
        For ``Reconstruction.skip``.
    """

    def encode(text: str) -> Tensor:
        return tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)

    before, after = "", "\n"
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": "context\n#######"}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, enable_thinking=False)
        text, after = text.split("\n#######")
        before = text.split("context")[0]
    first, later = (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
    )
    skip = encode(before).shape[1]

    def prompt(ids: Tensor, start: int) -> Tensor:
        if start == skip:
            return torch.cat((encode(first), encode(after)), 1)
        return torch.cat((encode(later), ids[:, start - 8 : start].cpu(), encode(after)), 1)

    return prompt, skip
