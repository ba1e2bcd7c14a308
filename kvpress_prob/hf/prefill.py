"""A prefill as its watchers see it: one full-attention layer after the other, then the whole."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from kvpress_prob.hf.observing import AttentionInputs, attention_inputs
from kvpress_prob.hf.rotary import RotaryState


@dataclass(frozen=True)
class LayerPrefill:
    """One full-attention layer of a prefill: the arguments of kvpress' ``ScorerPress.score``.

    ``kwargs`` holds the layer's ``AttentionInputs`` as ``"attention_inputs"``, the validity [b, t] of its tokens as
    ``"valid"`` and, where entries have weights already, their logarithms [b, t] as ``"column_bias"``.
    """

    module: nn.Module
    hidden_states: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor | None
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> AttentionInputs:
        """What the module handed to its attention function."""
        return attention_inputs(self.module, self.hidden_states, self.kwargs)

    @property
    def valid(self) -> Tensor | None:
        """Validity [b, t] of the tokens; None when nothing is padding."""
        return self.kwargs.get("valid")

    @property
    def column_bias(self) -> Tensor | None:
        """Log-weights [b, t] of the entries; None when all are 0."""
        return self.kwargs.get("column_bias")


@dataclass(frozen=True)
class Prefill:
    """A finished prefill.

    Attributes
    ----------
    model : PreTrainedModel
    cache : Cache
        Dense, as the model left it.
    layers : list of int
        Indices of the full-attention layers.
    valid : Bool[Tensor, "b t"]
        False for left padding.
    next_position : Int[Tensor, "b"]
        Position of the token after the context.
    input_ids : Int[Tensor, "b t"] or None
        None when the model was called with embeddings.
    last_hidden_state : Float[Tensor, "b hidden"]
        The decoder's output for the last token of the context.
    rotary : RotaryState
        Frequencies that the context's keys were turned with.
    """

    model: PreTrainedModel
    cache: Cache
    layers: list[int]
    valid: Tensor
    next_position: Tensor
    input_ids: Tensor | None
    last_hidden_state: Tensor
    rotary: RotaryState


@dataclass(frozen=True)
class Upcoming:
    """A prefill that has not begun.

    Attributes
    ----------
    decoder : Module
        The part of the model that has layers.
    model, valid, next_position, input_ids
        As in ``Prefill``.
    """

    model: PreTrainedModel
    decoder: nn.Module
    valid: Tensor
    next_position: Tensor
    input_ids: Tensor | None

    def check_positions(self, n: int) -> None:
        """Raise ``ValueError`` if the ``n`` positions after the context are past a model's own table of positions."""
        table = self.table
        if table is not None and (last := int(self.next_position.max()) + n) > table:
            raise ValueError(
                f"a second pass of {n} tokens after this context needs {last} positions, got a model with a table of "
                f"{table}: use a shorter context, a smaller chunk or fewer tokens"
            )

    @property
    def table(self) -> int | None:
        """How many positions the decoder has embeddings for; None where positions are computed."""
        embeddings = getattr(self.decoder, "embed_positions", None)
        if not isinstance(embeddings, nn.Embedding):
            return None
        return embeddings.num_embeddings - getattr(embeddings, "offset", 0)


@runtime_checkable
class PrefillChecker(Protocol):
    """A watcher that can refuse a prefill before the model has run."""

    def begin(self, upcoming: Upcoming) -> None: ...


class PrefillWatcher(Protocol):
    """State of one prefill."""

    def layer(self, layer: LayerPrefill) -> None: ...

    def end(self, prefill: Prefill) -> None: ...
