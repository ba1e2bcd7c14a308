"""Lookahead rows: what the model would say next, sampled a few times, is what will be asked of the context.

Short continuations are sampled from the model and read once more in one pass, whose query rows are scored; then they
are discarded (the idea of LORE-KV).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf import AttentionInputs, Prefill, repeated, scratch_copy, second_pass
from kvpress_prob.sources.rows import QueryRows, Visit


@dataclass(frozen=True)
class Lookahead:
    """Query rows of sampled continuations.

    Parameters
    ----------
    n_continuations : int, default=4
        Continuations that are sampled side by side.
    n_tokens : int, default=32
        Tokens of each.
    temperature : float, default=1.0
        Sampling temperature.
    by_likelihood : bool, default=False
        Weight a continuation by its likelihood per token under the model instead of equally.
    seed : int, default=0
        Seed of the sampling.
    """

    n_continuations: int = 4
    n_tokens: int = 32
    temperature: float = 1.0
    by_likelihood: bool = False
    seed: int = 0

    def __post_init__(self):
        for name, value in (("n_continuations", self.n_continuations), ("n_tokens", self.n_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not isinstance(self.temperature, (int, float)) or not self.temperature > 0:
            raise ValueError(f"temperature must be a number > 0, got {self.temperature!r}")

    def run(self, prefill: Prefill, visit: Visit) -> None:
        """Sample, then read the continuations once; see ``PassSource``."""
        futures = repeated(prefill, self.n_continuations)
        ids, log_likelihood = self._sample(futures)
        share = torch.full((self.n_continuations,), 1 / self.n_continuations, dtype=torch.float64, device=ids.device)
        if self.by_likelihood:
            share = torch.softmax(log_likelihood.double() / self.n_tokens, 0)
        second_pass(futures, ids, partial(_attend, visit, prefill.valid.shape[1], share))

    def _sample(self, futures: Prefill) -> tuple[Tensor, Tensor]:
        """Token ids [k, n_tokens] and their log-likelihoods [k]."""
        model: Any = futures.model
        generator = torch.Generator().manual_seed(self.seed)
        cache = scratch_copy(futures.cache)
        logits = model.get_output_embeddings()(futures.last_hidden_state)
        position = futures.next_position.unsqueeze(-1)
        drawn, total = [], torch.zeros(len(logits), device=logits.device)
        for step in range(self.n_tokens):
            log_p = torch.log_softmax(logits.float() / self.temperature, -1)
            token = torch.multinomial(log_p.exp().cpu(), 1, generator=generator).to(logits.device)
            total = total + log_p.gather(-1, token).squeeze(-1)
            drawn.append(token)
            if step + 1 < self.n_tokens:
                logits = model(token, past_key_values=cache, position_ids=position + step).logits[:, -1]
        return torch.cat(drawn, 1), total


def _attend(
    visit: Visit, t: int, share: Tensor, layer: int, inputs: AttentionInputs, keys: Tensor, values: Tensor
) -> Tensor:
    n = inputs.query.shape[2]
    weights = (share / n).unsqueeze(-1).expand(-1, n)
    return visit(layer, QueryRows(inputs.query, keys, values, t, weights, inputs.scaling, inputs.softcap))
