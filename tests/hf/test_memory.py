"""What a prefill needs beside the dense cache: the tensors of one layer, whatever the depth of the model."""

from collections.abc import Callable

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob import (
    AttentionPress,
    ExpectedQueries,
    Lookahead,
    MinVariancePress,
    ProbabilisticPress,
    Reconstruction,
    make_press,
)
from tests.helpers.models import build, tiny_llama, tokens

T = 400


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {storage: n for storage, n in self.alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def qwen3(layers: int) -> PreTrainedModel:
    return build("Qwen3ForCausalLM", "sdpa", num_hidden_layers=layers)


def llama(layers: int) -> PreTrainedModel:
    return tiny_llama(layers=layers)


def peak(model: PreTrainedModel, press: ProbabilisticPress) -> int:
    """Bytes at the fullest moment of a prefill, in the model's own weights' absence."""
    ids, counted = tokens(T), Storages()
    with torch.inference_mode(), counted, press(model):
        model(ids, past_key_values=DynamicCache())
    return counted.peak


def by(source, **settings) -> Callable[[], ProbabilisticPress]:
    return lambda: ProbabilisticPress(AttentionPress(source=source, **settings), compression_ratio=0.5)


PRESSES = {
    "every row": lambda: ProbabilisticPress(MinVariancePress(), compression_ratio=0.5),
    "expected queries": by(ExpectedQueries(), factor="norm"),
    "reconstruction": by(Reconstruction(), statistic="max"),
    "reconstruction in chunks": by(Reconstruction(chunk_size=64), statistic="max"),
    "reconstruction as KVzip": by(Reconstruction(chunk_size=64, n_sink=4), statistic="max"),
    "lookahead": by(Lookahead(n_continuations=8, n_tokens=6)),
    "prob_best": lambda: make_press("prob_best", compression_ratio=0.5),
}


@pytest.mark.parametrize("model", [llama, qwen3])
@pytest.mark.parametrize("name", PRESSES)
def test_a_layer_more_costs_its_dense_cache_and_its_scores(model, name):
    few, many = model(2), model(6)
    dense = 2 * many.config.num_key_value_heads * T * many.config.head_dim * 4
    scores = 4 * many.config.num_key_value_heads * T * 4
    each = (peak(many, PRESSES[name]()) - peak(few, PRESSES[name]())) / 4
    assert dense <= each <= dense + scores
