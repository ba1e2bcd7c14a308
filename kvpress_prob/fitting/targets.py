"""What a surrogate has to predict of one window: the scores of a reconstruction and of the window's own rows."""

from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob.hf import LayerPrefill, Prefill, decoder_of, watch_prefills
from kvpress_prob.presses import AttentionPress, MinVariancePress
from kvpress_prob.sources import Reconstruction

PREDICTS = {
    "lookup": "the largest attention that a row of a reconstruction gives the entry",
    "reading": "attention of the later rows (harmonic prior) times the value's distance, over its mean",
}
"""Outputs, in order."""
LEAST = 1e-9
"""Smaller attention is as good as none."""


class LayerInputs:
    """Hidden states and reading scores of a window's full-attention layers (a ``PrefillWatcher``)."""

    def __init__(self, layers: set[int] | None):
        self.layers = layers
        self.reading_press = MinVariancePress()
        self.hidden: dict[int, Tensor] = {}  # [n hidden]
        self.reading: dict[int, Tensor] = {}  # [hkv n]
        self.prefill: Prefill

    def layer(self, layer: LayerPrefill) -> None:
        index = cast(int, layer.module.layer_idx)
        if self.layers is None or index in self.layers:
            self.hidden[index] = layer.hidden_states[0]
            arguments: Any = (layer.keys, layer.values, layer.attentions, layer.kwargs)
            self.reading[index] = self.reading_press.score(layer.module, layer.hidden_states, *arguments)[0]

    def end(self, prefill: Prefill) -> None:
        self.prefill = prefill


def read_window(model: PreTrainedModel, ids: Tensor, layers: set[int] | None = None) -> LayerInputs:
    """Prefill one window [n] and keep what its layers got; ``layers`` None keeps all."""
    inputs = LayerInputs(layers)
    with watch_prefills(model, lambda: inputs):
        decoder_of(model)(input_ids=ids.unsqueeze(0).to(model.device), past_key_values=DynamicCache(), use_cache=True)
    return inputs


def targets_of(inputs: LayerInputs) -> dict[int, Tensor]:
    """Targets [n outputs*hkv] of every kept layer, float32: logarithms, in the order of ``PREDICTS``."""
    press = AttentionPress(source=Reconstruction(), statistic="max")
    lookup = dict(zip(inputs.prefill.layers, press.score_context(inputs.prefill), strict=True))
    targets = {}
    for index, reading in inputs.reading.items():
        both = torch.cat((lookup[index][0].float(), reading.float() * reading.shape[-1]))
        targets[index] = both.clamp(min=LEAST).log().mT
    return targets
