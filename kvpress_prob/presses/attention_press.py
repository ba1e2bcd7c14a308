"""Any statistic over any query source as a kvpress scorer."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
from kvpress import ScorerPress
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvpress_prob.hf import LayerPrefill, Prefill, batch_row
from kvpress_prob.hf.supported import decoder_of
from kvpress_prob.maths.arguments import check_choice, check_flag, check_ratio
from kvpress_prob.maths.projection import projection_factors
from kvpress_prob.maths.proposals import ScoresAre, value_distance
from kvpress_prob.ops.attention_mass import STATISTICS, Statistic
from kvpress_prob.ops.precision import without_autocast
from kvpress_prob.sources import LayerSource, PassSource, PrefillRows, QueryRows

Factor = Literal["none", "norm", "centered"]
FACTORS: tuple[Factor, ...] = ("none", "norm", "centered")
Heads = Literal["group", "layer"]
HEADS: tuple[Heads, ...] = ("group", "layer")


@dataclass
class AttentionPress(ScorerPress):
    """
    A statistic over query rows of the attention that every entry receives.

    ============================  ==============================================================================
    top-k over these scores is    with
    ============================  ==============================================================================
    H2O                           ``PrefillRows("uniform")``, mean (kvpress divides by the rows that see an entry,
                                  ``H2OPress(average=True)``)
    SnapKV without pooling        ``PrefillRows("uniform", window=64)``, mean; the window itself is protected
    TOVA                          ``PrefillRows("last")``, mean, ``heads="layer"``; the last token is protected
    ExpectedAttention             ``ExpectedQueries()``, mean, ``factor="norm"``; sinks are protected
    KVzip                         ``Reconstruction(prompt, skip, n_sink=4)``, max; one budget for all heads
    LORE-KV                       ``Lookahead()``, output_change, ``project=True``
    the paper's ``pi_min(-h)``    ``PrefillRows("last" or "harmonic")``, mean, ``factor="norm"``, normalised per query
                                  head (``MinVariancePress``)
    the paper's ``pi_H2O(-h)``    ``PrefillRows("uniform" or "harmonic")``, mean (``H2OPress``)
    ============================  ==============================================================================

    Parameters
    ----------
    source : LayerSource or PassSource
        Where the query rows come from, see ``kvpress_prob.sources``. Scores of a source that makes a pass of its own
        exist after the prefill only: such a press works inside ``ProbabilisticPress`` (``sampler="top_k"`` for a plain
        top-k), not alone.
    statistic : {"mean", "max", "output_change"}, default="mean"
        Weighted mean over rows, maximum, or the weighted mean of the change of the attention output when the entry is
        left out, ``p_j(i) / (1 - p_j(i)) |o_j - v_i|``. The query heads of a group are reduced in the same way.
    factor : {"none", "norm", "centered"}, default="none"
        Times 1, ``|v_i|``, or ``|v_i - o|`` with ``o`` the mean of the values under the head's statistic.
    project : bool, default=False
        Measure the change of the output (``statistic="output_change"``) behind the layer's output projection,
        ``p_j(i) / (1 - p_j(i)) |W_O^h (o_j - v_i)|``: what deleting the entry does to the layer's output through one
        query head. Needs attention modules with an ``o_proj`` right behind the heads.
    heads : {"group", "layer"}, default="group"
        Reduce each group of query heads to its KV head's scores, or all query heads of a layer to common scores.
    compression_ratio : float, default=0.0
        Fraction of key-value pairs to remove when used as a top-k press.
    """

    scores_are: ClassVar[ScoresAre] = "weights"

    source: LayerSource | PassSource = field(default_factory=PrefillRows)
    statistic: Statistic = "mean"
    factor: Factor = "none"
    heads: Heads = "group"
    compression_ratio: float = field(default=0.0, kw_only=True)
    project: bool = False

    def __post_init__(self):
        if not isinstance(self.source, LayerSource | PassSource):
            raise TypeError(f"source must be a query source with rows() or run(), got {type(self.source).__name__}")
        check_choice("statistic", self.statistic, STATISTICS)
        check_choice("factor", self.factor, FACTORS)
        check_choice("heads", self.heads, HEADS)
        if self.statistic == "output_change" and self.factor != "none":
            raise ValueError(f"statistic='output_change' has its own factor, got factor={self.factor!r}")
        check_flag("project", self.project)
        if self.project and self.statistic != "output_change":
            raise ValueError(f"project=True needs statistic='output_change', got statistic={self.statistic!r}")
        check_ratio(self.compression_ratio)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Refuse a model whose output projection cannot be read, before it runs."""
        if self.project:
            for layer in decoder_of(model).layers:
                _output_projection(layer.self_attn)

    @property
    def needs_pass(self) -> bool:
        """Whether scores exist after the prefill only (``score_context``)."""
        return isinstance(self.source, PassSource)

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        if not isinstance(self.source, LayerSource):
            raise NotImplementedError(
                f"{type(self.source).__name__} makes a pass over the finished prefill: use the press inside "
                "ProbabilisticPress, with sampler='top_k' for a plain top-k"
            )
        rows = self.source.rows(LayerPrefill(module, hidden_states, keys, values, attentions, kwargs))
        if self.project:
            rows = _projected(rows, _factors(module, values.shape[-1]))
        return self._scores(rows.statistic(self.statistic), values)

    def score_context(self, prefill: Prefill) -> list[Tensor]:
        """Scores [b hkv t] of every full-attention layer, each batch row as if it were alone.

        The prefill's cache is read and not changed.
        """
        if not isinstance(self.source, PassSource):
            raise NotImplementedError(f"{type(self.source).__name__} scores one layer at a time: use score()")
        t = prefill.valid.shape[1]
        factors = {}
        if self.project:
            modules = {layer.self_attn.layer_idx: layer.self_attn for layer in decoder_of(prefill.model).layers}
            widths = {layer: cast(Tensor, prefill.cache.layers[layer].values).shape[-1] for layer in prefill.layers}
            factors = {layer: _factors(modules[layer], width) for layer, width in widths.items()}
        rows = []
        for row in range(len(prefill.valid)):
            single = batch_row(prefill, row)
            gathered = _Gathered(self.statistic, factors)
            self.source.run(single, gathered.visit)
            layers = []
            for layer in prefill.layers:
                values = cast(Tensor, single.cache.layers[layer].values)
                scores = self._scores(gathered.mass(layer), values)
                layers.append(pad(scores, (t - scores.shape[-1], 0)))
            rows.append(layers)
        return [torch.cat(layers) for layers in zip(*rows, strict=True)]

    @without_autocast
    def _scores(self, mass: Tensor, values: Tensor) -> Tensor:
        """Statistics [b hq t] of the query heads as scores [b hkv t]."""
        b, hq, t = mass.shape
        kv_heads = values.shape[1]
        grouped = mass.view(b, kv_heads, hq // kv_heads, t)
        if self.factor != "none":
            grouped = grouped * value_distance(grouped, values, centered=self.factor == "centered")
        if self.heads == "layer":
            grouped = grouped.reshape(b, 1, hq, t)
        scores = grouped.amax(2) if self.statistic == "max" else grouped.mean(2)
        return scores.expand(b, kv_heads, t)


class _Gathered:
    """Statistics of every layer over the blocks of rows of a pass."""

    def __init__(self, statistic: Statistic, factors: dict[int, Tensor]):
        self.statistic: Statistic = statistic
        self.factors = factors  # of the layers' output projections, where distances are measured behind them
        self.layers: dict[int, Tensor] = {}  # [hq t]: sums or maxima

    def visit(self, layer: int, rows: QueryRows) -> Tensor:
        """A ``Visit``: batch rows are further rows of the same context."""
        if layer in self.factors:
            mass = _projected(rows, self.factors[layer]).statistic(self.statistic)
            output = rows.statistic_and_output("mean")[1]
        else:
            mass, output = rows.statistic_and_output(self.statistic)
        mass = mass[..., : rows.context]
        if self.statistic == "max":
            mass = mass.amax(0)
            self.layers[layer] = torch.maximum(self.layers.get(layer, mass), mass)
        else:
            self.layers[layer] = self.layers.get(layer, 0) + mass.sum(0)
        return output

    def mass(self, layer: int) -> Tensor:
        """The statistic [1 hq t]."""
        return self.layers[layer].unsqueeze(0)


def _output_projection(module: Any) -> Tensor:
    """The weight [hidden, hq dv] of the projection right behind a module's heads."""
    weight = getattr(getattr(module, "o_proj", None), "weight", None)
    name = type(module).__name__
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"project=True needs attention modules with an o_proj of floating-point weights, got {name}")
    if hasattr(module, "attn_sub_norm"):
        raise ValueError(f"project=True needs o_proj right behind the heads, got {name} with a norm between them")
    return weight


def _factors(module: nn.Module, width: int) -> Tensor:
    """Factors [hq dv dv] of the module's output projection."""
    return projection_factors(_output_projection(module), width)


def _projected(rows: QueryRows, factors: Tensor) -> QueryRows:
    """The rows over values of each query head, in coordinates whose distances are those behind the projection."""
    group = rows.query.shape[1] // rows.keys.shape[1]
    wide = torch.promote_types(rows.values.dtype, torch.float32)
    values = rows.values.to(wide).repeat_interleave(group, 1) @ factors.to(wide)
    return replace(rows, keys=rows.keys.repeat_interleave(group, 1), values=values)
