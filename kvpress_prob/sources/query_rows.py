"""What every query source yields, and the two kinds of source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from kvpress_prob.hf import LayerPrefill, Prefill, Upcoming
from kvpress_prob.ops.attention_mass import Statistic, attention_mass
from kvpress_prob.ops.precision import one_dtype, without_autocast


@dataclass(frozen=True)
class QueryRows:
    """A block of query rows of one layer.

    Attributes
    ----------
    query : Float[Tensor, "b hq n d"]
    keys, values : Float[Tensor, "b hkv s d"], Float[Tensor, "b hkv s dv"]
        Entries that the rows may see; the first ``context`` of them are the prefill's.
    context : int
    weights : Float[Tensor, "b n"]
        Row weights; over all blocks of a layer they sum to 1 for each batch row.
    scaling, softcap
        As in ``attention_mass``.
    positions : Int[Tensor, "n"] or None
        Last entry that each row sees; None for the newest ``n``.
    valid : Bool[Tensor, "b s"] or None
        False for padding.
    scope : Bool[Tensor, "s"] or None
        Entries that the statistic is about.
    column_bias : Float[Tensor, "b hq s"] or None
        Added to the logits.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    context: int
    weights: Tensor
    scaling: float
    softcap: float | None = None
    positions: Tensor | None = None
    valid: Tensor | None = None
    scope: Tensor | None = None
    column_bias: Tensor | None = None

    def statistic(self, statistic: Statistic) -> Tensor:
        """``attention_mass`` [b hq s] of the rows."""
        return self._mass(statistic, self.values if statistic == "output_change" else None)[0]

    def statistic_and_output(self, statistic: Statistic) -> tuple[Tensor, Tensor]:
        """``attention_mass`` [b hq s] of the rows and their attention output [b hq n dv], in one go."""
        mass, output = self._mass(statistic, self.values)
        return mass, cast(Tensor, output)

    @without_autocast
    def _mass(self, statistic: Statistic, values: Tensor | None) -> tuple[Tensor, Tensor | None]:
        query, keys = one_dtype(self.query, self.keys)
        return attention_mass(
            query,
            keys,
            self.weights,
            scaling=self.scaling,
            positions=self.positions,
            valid=self.valid,
            scope=self.scope,
            column_bias=self.column_bias,
            values=None if values is None else values.to(keys.dtype),
            softcap=self.softcap,
            statistic=statistic,
        )


Visit = Callable[[int, QueryRows], Tensor]
"""(layer index, rows) -> the rows' attention output [b hq n dv]. A statistic is gathered on the way."""


@runtime_checkable
class LayerSource(Protocol):
    """A source that reads a layer of the prefill."""

    def rows(self, layer: LayerPrefill) -> QueryRows:
        """The layer's query rows."""
        ...


@runtime_checkable
class PassSource(Protocol):
    """A source that makes a second pass over a finished prefill."""

    def run(self, prefill: Prefill, visit: Visit) -> None:
        """Make the pass; ``visit`` is called for every block of rows of every full-attention layer, layers in order."""
        ...


@runtime_checkable
class CheckedSource(Protocol):
    """A source that can refuse a prefill before the model has run."""

    def check(self, upcoming: Upcoming) -> None:
        """Raise ``ValueError`` for a prefill that the source cannot read."""
        ...
