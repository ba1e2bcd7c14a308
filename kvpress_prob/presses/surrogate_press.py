"""A surrogate's scores as a kvpress scorer."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from kvpress import ScorerPress
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpress_prob.hf import decoder_of
from kvpress_prob.maths.arguments import check_choice, check_ratio, is_number
from kvpress_prob.maths.proposals import ScoresAre
from kvpress_prob.sources import OUTPUTS, Output, Surrogate, find_surrogate, load_surrogate

_FOUND: WeakKeyDictionary[nn.Module, Surrogate] = WeakKeyDictionary()
"""Surrogates of attention modules whose model was asked for its own."""


@dataclass
class SurrogatePress(ScorerPress):
    """
    A score that a linear read-out of the hidden states predicts: one matrix product a layer, no pass, no other row.

    The score of an entry depends on its own token alone, so it is the same in any batch row, chunk by chunk, whole, and
    while decoding (kvpress' ``DMSPress``), and it never changes.

    Based on KVzap (https://arxiv.org/abs/2601.07891). kvpress' ``KVzapPress`` has published weights for some models;
    ``kvpress-prob fit`` makes a surrogate for any.

    Parameters
    ----------
    compression_ratio : float, default=0.0
        Fraction of key-value pairs to remove when used as a top-k press.
    surrogate : Surrogate, str or Path, optional, default=None
        The surrogate or its file. None takes the one that was fitted to the model (``kvpress-prob fit``).
    output : {"lookup", "reading"}, default="lookup"
        What a question may look up (the largest attention of a reconstruction), or what keeps a text fluent (the
        attention of the text's own later rows).
    recency : float, default=0.0
        Scores times ``age ** -recency``, the newest entry having age 1: what later rows attend to falls with the
        distance, which no hidden state knows. With it, scores change as tokens come in.
    """

    scores_are: ClassVar[ScoresAre] = "weights"

    compression_ratio: float = 0.0
    surrogate: Surrogate | str | Path | None = None
    output: Output = "lookup"
    recency: float = 0.0

    @property
    def scores_never_change(self) -> bool:
        """Whether an entry's score is the same however many entries follow."""
        return self.recency == 0

    def __post_init__(self):
        check_ratio(self.compression_ratio)
        check_choice("output", self.output, OUTPUTS)
        if not is_number(self.recency) or not 0 <= self.recency < math.inf:
            raise ValueError(f"recency must be a finite number >= 0, got {self.recency!r}")
        if not isinstance(self.surrogate, Surrogate | str | Path | None):
            raise TypeError(f"surrogate must be a Surrogate, a path or None, got {type(self.surrogate).__name__}")

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Load what has to be loaded, and refuse a surrogate of another model."""
        if isinstance(self.surrogate, str | Path):
            self.surrogate = load_surrogate(self.surrogate, model=model)
        elif isinstance(self.surrogate, Surrogate):
            self.surrogate.check_model(model)
        else:
            found = find_surrogate(model)
            for layer in decoder_of(model).layers:
                _FOUND[layer.self_attn] = found

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        """Positive scores [b hkv t], float32: the exponential of what the read-out predicts."""
        if hidden_states.shape[1] != keys.shape[2]:
            raise ValueError(
                f"hidden_states must be those of all {keys.shape[2]} entries that are scored, got "
                f"{hidden_states.shape[1]} tokens: while decoding, use kvpress' DMSPress, which keeps earlier scores"
            )
        surrogate = _FOUND.get(module) if self.surrogate is None else self.surrogate
        if not isinstance(surrogate, Surrogate):
            raise ValueError("surrogate must be loaded before scoring: use the press as `with press(model)`")
        log_scores = surrogate.log_scores(cast(int, module.layer_idx), hidden_states, self.output)
        if self.recency:
            age = torch.arange(log_scores.shape[-1], 0, -1, device=log_scores.device)
            log_scores = log_scores - self.recency * age.log()
        return log_scores.exp()
