"""Running a model over a compressed cache and beside it."""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob import MinVariancePress, ProbabilisticPress
from tests.helpers.oracle import biases_of, oracle_attention


def press_of(ratio: float = 0.5, **kwargs) -> ProbabilisticPress:
    return ProbabilisticPress(MinVariancePress(), ratio, **{"seed": 0, **kwargs})


def compress(model: PreTrainedModel, ids: Tensor, press: ProbabilisticPress, **kwargs) -> DynamicCache:
    """A cache of the context ``ids``, compressed by ``press``."""
    cache = DynamicCache()
    with press(model):
        model(ids, past_key_values=cache, **kwargs)
    return cache


def dense(model: PreTrainedModel, ids: Tensor, **kwargs) -> DynamicCache:
    cache = DynamicCache()
    model(ids, past_key_values=cache, **kwargs)
    return cache


def greedy(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, steps: int) -> Tensor:
    """Tokens [b, steps] of the plain loop that feeds ``ids`` and then its own choices."""
    chosen = []
    for _ in range(steps):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        chosen.append(ids)
    return torch.cat(chosen, 1)


def assert_equals_oracle(model: PreTrainedModel, cache: DynamicCache, full: DynamicCache, steps: list[Tensor]) -> None:
    """Feed ``steps`` to the compressed cache and, with the oracle's attention, to the dense one: equal logits."""
    biases = biases_of(cache, full)
    for step in steps:
        got = model(step, past_key_values=cache).logits
        with oracle_attention(model, biases):
            want = model(step, past_key_values=full).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
