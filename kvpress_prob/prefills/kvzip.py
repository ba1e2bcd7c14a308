"""kvpress' KVzip on copies of a shared prefill."""

from typing import Any, cast

import torch
from kvpress import KVgradPress, KVzipPress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob.prefills.shared_prefill import Compressed, Costs, SharedPrefill, copied, measured, take_masked


class KVzipCompressor:
    """kvpress' KVzip: reconstructs the context on its cache after the prefill, then masks.

    Its reconstruction passes run once; its own selection runs again for every ratio.
    """

    def __init__(self, press: KVzipPress, shared: SharedPrefill):
        self.press, self.shared = press, shared
        self.known_ms = 0.0
        self.scores: Tensor | None = None

    def compress(self, ratio: float, seed: int | None) -> Compressed:
        costs = Costs()
        if not ratio:
            return measured(self.shared, self.shared.copy_cache(), {}, costs)
        if self.scores is None:
            self._reconstruct(costs)
        costs.score_ms = self.known_ms
        with costs.clock("compress_ms", self.shared.device):
            self.press.compression_ratio = ratio
            self.press.score_val = cast(Tensor, self.scores).clone()  # pyright: ignore[reportAttributeAccessIssue]
            self.press.compress_post(self.shared.prefill.model)
        return measured(self.shared, copied(self.reconstructed), take_masked(self.shared.layers), costs)

    def _reconstruct(self, costs: Costs) -> None:
        """Run the press' block as if the prefill had just happened inside it, and keep its scores."""
        press, prefill = self.press, self.shared.prefill
        self.reconstructed = self.shared.copy_cache()
        if isinstance(press, KVgradPress):
            _leave_inference_mode(self.reconstructed)
        press.compression_ratio = 0.5  # any ratio > 0 makes it score
        press.compress_post = self._keep_scores  # pyright: ignore[reportAttributeAccessIssue]
        with (
            costs.clock("spent_ms", self.shared.device),
            self.shared.rotary(),
            press(prefill.model),
        ):
            # What its wrapper around the model's forward notes during a prefill.
            ids = cast(Tensor, prefill.input_ids)
            cast(Any, press)._context_ids, cast(Any, press)._cache = ids.clone(), self.reconstructed
        del press.compress_post
        if self.scores is None:
            raise RuntimeError("kvpress' KVzipPress did not score: its internals have changed")
        self.known_ms = costs.spent_ms

    def _keep_scores(self, model: PreTrainedModel) -> None:
        self.scores = self.press.score_val


def _leave_inference_mode(cache: DynamicCache) -> None:
    """Give a cache tensors that autograd may save."""
    with torch.inference_mode(False):
        for layer in cache.layers:
            layer.keys, layer.values = cast(Tensor, layer.keys).clone(), cast(Tensor, layer.values).clone()
