"""Lookahead rows: what the model would say next, sampled a few times, is what will be asked of the context.

Short continuations are sampled from the model and read once more in one pass, whose query rows are scored; then they
are discarded (the idea of LORE-KV; its paper's settings are not known here).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf import AttentionInputs, Prefill, Upcoming, continued, next_logits, one_more, repeated, second_pass
from kvpress_prob.maths.arguments import check_flag, check_integer, check_positive, check_seed
from kvpress_prob.sources.query_rows import QueryRows, Visit


@dataclass(frozen=True)
class Lookahead:
    """Query rows of sampled continuations.

    Parameters
    ----------
    n_continuations : int, default=4
        Continuations that are sampled side by side.
    n_tokens : int, default=32
        Tokens of each, at most: a continuation ends with the sequence.
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
            check_integer(name, value, 1)
        check_positive("temperature", self.temperature)
        check_flag("by_likelihood", self.by_likelihood)
        check_seed("seed", self.seed)

    def check(self, upcoming: Upcoming) -> None:
        """Refuse a model that does not generate, and a prefill whose continuations would leave its own table of
        positions."""
        if not upcoming.model.can_generate():
            raise TypeError(f"Lookahead needs a model that generates text, got {type(upcoming.model).__name__}")
        upcoming.check_positions(self.n_tokens)

    def run(self, prefill: Prefill, visit: Visit) -> None:
        """Sample, then read the continuations once; see ``PassSource``."""
        futures = repeated(prefill, self.n_continuations)
        ids, log_likelihood, counts = self._sample(futures)
        length = counts.sum(-1)
        share = torch.full((self.n_continuations,), 1 / self.n_continuations, dtype=torch.float64, device=ids.device)
        if self.by_likelihood:
            share = torch.softmax(log_likelihood.double() / length, 0)
        weights = (share / length).unsqueeze(-1) * counts
        second_pass(futures, ids, partial(_attend, visit, prefill.valid.shape[1], weights))

    def _sample(self, futures: Prefill) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [k, n], the log-likelihoods [k] of the tokens that count, and which [k, n] do.

        Tokens are drawn at the source's temperature; their likelihood is the model's own. A continuation ends before
        its end-of-sequence token, which would not be read either; its first token always counts.
        """
        model: Any = futures.model
        eos = getattr(model.generation_config, "eos_token_id", None)
        stops = torch.tensor(
            eos if isinstance(eos, list) else [] if eos is None else [eos], dtype=torch.int64, device="cpu"
        )
        generator = torch.Generator().manual_seed(int(self.seed))
        cache = continued(futures.cache)
        logits = next_logits(futures)
        stops = stops.to(logits.device)
        drawn, counts, total = [], [], torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
        going = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        for step in range(self.n_tokens):
            chance = torch.softmax((logits.float() - logits.float().amax(-1, keepdim=True)) / self.temperature, -1)
            token = torch.multinomial(chance.cpu(), 1, generator=generator).to(logits.device)
            going = going & ~torch.isin(token.squeeze(-1), stops)
            count = going if step else torch.ones_like(going)
            if not count.any():
                break
            log_p = torch.log_softmax(logits.float(), -1).gather(-1, token).squeeze(-1)
            total = total + torch.where(count, log_p, 0)
            drawn.append(token)
            counts.append(count)
            if step + 1 < self.n_tokens:
                logits = one_more(futures, token, cache, futures.next_position + step)
        return torch.cat(drawn, 1), total, torch.stack(counts, 1)


def _attend(
    visit: Visit, t: int, weights: Tensor, layer: int, inputs: AttentionInputs, keys: Tensor, values: Tensor
) -> Tensor:
    return visit(layer, QueryRows(inputs.query, keys, values, t, weights, inputs.scaling, inputs.softcap))
