"""Asking a scorer for one layer: each batch row as it would be alone, and what is protected in it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.maths.proposals import is_negative, log_proposal, take_all_stratum
from kvpress_prob.presses.component import Component


@dataclass(frozen=True)
class LayerScores:
    """Scores of one layer and what is protected.

    Attributes
    ----------
    scores : Num[Tensor, "b hkv t"]
        0 at padding.
    protected : Bool[Tensor, "b hkv t"]
        The take-all stratum of the scorer.
    """

    scores: Tensor
    protected: Tensor


def score_layer(component: Component, layer: LayerPrefill, padding: list[int], ratios: Sequence[float]) -> LayerScores:
    """Scores of every batch row, without its padding and without the others.

    Many scorers look at the whole batch (its largest score, its mean) and at padding. A row's scores must not depend on
    its company, so each row is scored alone. Random numbers that a scorer takes from the global state are those that it
    would take for one row.

    Parameters
    ----------
    component : Component
    layer : LayerPrefill
    padding : list of int
        Left padding of every batch row.
    ratios : sequence of float
        What the scorer is told of every row: some (StreamingLLM, CriticalKV) score differently at different ratios.

    Raises
    ------
    ValueError
        For scores that are not [1, hkv, t] real numbers.
    """
    rows = []
    for index, (drop, ratio) in enumerate(zip(padding, ratios, strict=True)):
        component.press.compression_ratio = ratio
        row = layer if len(padding) == 1 and not drop else _row(layer, index, drop)
        devices = [layer.keys.device] if layer.keys.is_cuda else []
        with torch.random.fork_rng(devices) if index + 1 < len(padding) else nullcontext():
            scores = component.press.score(
                row.module,
                row.hidden_states,
                row.keys,
                row.values,
                row.attentions,  # pyright: ignore[reportArgumentType]  (None unless eager, as documented)
                row.kwargs,
            )
        rows.append(scores)
    return layer_scores(component, rows, padding, layer.keys)


def layer_scores(component: Component, rows: list[Tensor], padding: list[int], keys: Tensor) -> LayerScores:
    """Scores [1 hkv t] of every batch row of one layer, put together again, and what they protect.

    Parameters
    ----------
    component : Component
    rows : list of Num[Tensor, "1 hkv t"]
        Each row without its padding.
    padding : list of int
    keys : Float[Tensor, "b hkv t d"]
        The layer's keys.
    """
    name = type(component.press).__name__
    scores, protected = [], []
    for drop, row in zip(padding, rows, strict=True):
        wanted = (1, keys.shape[1], keys.shape[2] - drop)
        if not isinstance(row, Tensor) or tuple(row.shape) != wanted or row.dtype.is_complex:
            got = f"{tuple(row.shape)} of {row.dtype}" if isinstance(row, Tensor) else type(row).__name__
            raise ValueError(f"scores of {name} must be real numbers of shape {wanted}, got {got}")
        row = row.detach().to(keys.device)
        scores.append(pad(row, (drop, 0)))
        protected.append(pad(_protected(component, row), (drop, 0)))
    return LayerScores(torch.cat(scores), torch.cat(protected))


def log_weights(component: Component, scores: Tensor, drawable: Tensor, uniform_mix: float) -> tuple[Tensor, Tensor]:
    """Log-weights [b hkv t] of the entries that may be drawn, and flags [3] that say what is wrong with the scores:
    NaN, infinite, negative where they must not be. The flags stay on the device."""
    scores_are = component.rule.scores_are
    log_a = log_proposal(
        scores, drawable, scores_are, temperature=component.proposal_temperature, uniform_mix=uniform_mix
    )
    must_not_be_negative = scores_are == "weights" or (scores_are is None and component.budget_weighting == "score")
    negative = is_negative(scores, drawable).any() & must_not_be_negative
    return log_a, torch.stack([scores.isnan().any(), scores.isinf().any(), negative])


def check_flags(components: Sequence[Component], layers: list[int], flags: list[list[Tensor]]) -> None:
    """Raise ``ValueError`` for what ``log_weights`` found; asks the device once.

    Parameters
    ----------
    components : sequence of Component
    layers : list of int
        Indices of the layers.
    flags : list of list of Bool[Tensor, "3"]
        For each component those of every layer.
    """
    device = flags[0][0].device
    read = torch.stack([torch.stack([it.to(device) for it in layer]) for layer in flags]).tolist()
    for component, of_layers in zip(components, read, strict=True):
        name = type(component.press).__name__
        for layer, (nan, infinite, negative) in zip(layers, of_layers, strict=True):
            if nan or infinite:
                kind = "NaN" if nan else "infinite values"
                raise ValueError(f"scores of layer {layer} must be finite, got {kind} from {name}")
            if negative and component.rule.scores_are is None:
                raise ValueError(
                    f"budget_weighting='score' needs scores with one scale for all heads: scores of layer {layer} must "
                    f"be >= 0, got negative ones from {name}, which does not declare what its scores are"
                )
            if negative:
                raise ValueError(
                    f"scores of layer {layer} must be >= 0, got negative ones from {name}, whose scores are weights: "
                    "give the Component scores_are='logits' or 'log_weights'"
                )


def _protected(component: Component, scores: Tensor) -> Tensor:
    """What the scorer protects in one batch row's scores [1 hkv t]."""
    rule, t = component.rule, scores.shape[-1]
    if rule.ends is None:
        return take_all_stratum(scores)
    first, last = rule.ends(component.press, t)
    place = torch.arange(t, device=scores.device)
    ends = (place < first) | (place >= t - last)
    limit = torch.finfo(scores.dtype) if scores.dtype.is_floating_point else None
    return (ends | (scores == limit.max)) if limit else ends.expand_as(scores)


def _row(layer: LayerPrefill, row: int, padding: int) -> LayerPrefill:
    """One batch row of a layer as if it had been alone, without its padding; its tensors are views."""
    tokens = slice(padding, None)
    rows = slice(row, row + 1)
    kwargs = {name: _row_of_argument(name, value, row, padding) for name, value in layer.kwargs.items()}
    kwargs.pop("valid", None)
    if "attention_inputs" in kwargs:
        inputs = kwargs["attention_inputs"]
        kwargs["attention_inputs"] = replace(inputs, query=inputs.query[rows, :, tokens])
    return replace(
        layer,
        hidden_states=layer.hidden_states[rows, tokens],
        keys=layer.keys[rows, :, tokens],
        values=layer.values[rows, :, tokens],
        attentions=None if layer.attentions is None else layer.attentions[rows, :, tokens, tokens],
        kwargs=kwargs,
    )


def _row_of_argument(name: str, value: Any, row: int, padding: int) -> Any:
    """A batch row of what a layer was called with. One that serves all rows has a batch of one."""
    if name == "position_embeddings" and isinstance(value, tuple):
        return tuple(_row_of_argument(name, it, row, padding) for it in value)
    if not isinstance(value, Tensor):
        return value
    if name == "cache_position":
        return value[padding:]
    if name == "attention_mask":  # [b or 1, heads, t, t] or [b, t]
        value = value[row : row + 1] if len(value) > 1 else value
        return value[..., padding:, padding:] if value.ndim == 4 else value[..., padding:]
    if name in ("position_ids", "position_embeddings"):  # [..., b or 1, t], [..., b or 1, t, d]
        length = value.ndim - (1 if name == "position_ids" else 2)
        if length and value.shape[length - 1] > 1:
            value = value.narrow(length - 1, row, 1)
        return value.narrow(length, padding, value.shape[length] - padding)
    return value
