"""Surrogates of random weights, for models that nobody has fitted one to."""

import torch
import transformers
from transformers import PreTrainedModel

from kvpress_prob.fitting.targets import PREDICTS, read_window
from kvpress_prob.hf.saving import fingerprint
from kvpress_prob.sources import Surrogate, SurrogateHeader, find_surrogate


def random_surrogate(model: PreTrainedModel, seed: int = 0) -> Surrogate:
    """Read-outs whose scores differ by some powers of e; 0.3 apart from the mean at a standardised input."""
    inputs = read_window(model, torch.tensor([3, 4, 5, 6]))
    layers = inputs.prefill.layers
    hidden = next(iter(inputs.hidden.values())).shape[-1] if layers else 1
    heads = len(next(iter(inputs.reading.values()))) if layers else 1
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(layers) or 1, len(PREDICTS), hidden, heads, generator=generator) * 2 / hidden**0.5
    header = SurrogateHeader(
        architecture=type(model).__name__,
        fingerprint=fingerprint(model),
        hidden_size=hidden,
        kv_heads=heads,
        layers=layers or [0],
        predicts=dict(PREDICTS),
        transformers=transformers.__version__,
        fitted_on={"texts": "none: random weights"},
        held_out={},
    )
    scale = torch.full((len(weight), hidden), 1.5)
    return Surrogate(header, scale, weight.half(), torch.full((len(weight), len(PREDICTS), heads), -6.0))


def find_or_make_surrogate(model: PreTrainedModel) -> Surrogate:
    """The model's own surrogate, or a random one."""
    try:
        return find_surrogate(model)
    except ValueError:
        return random_surrogate(model)
