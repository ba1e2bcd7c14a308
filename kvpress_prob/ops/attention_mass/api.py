"""Public entry of ``attention_mass``: checks and dispatch."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpress_prob.ops.attention_mass.blocked import attention_mass_blocked
from kvpress_prob.ops.attention_mass.reference import attention_mass_reference
from kvpress_prob.ops.availability import prefer_triton, require_triton
from kvpress_prob.ops.library import operator

Impl = Literal["auto", "reference", "blocked", "triton"]
IMPLS: tuple[Impl, ...] = ("auto", "reference", "blocked", "triton")
Statistic = Literal["mean", "max", "output_change"]
STATISTICS: tuple[Statistic, ...] = ("mean", "max", "output_change")


def attention_mass(
    query: Float[Tensor, "b hq n d"],
    keys: Float[Tensor, "b hkv t d"],
    row_weights: Float[Tensor, "b n"],
    *,
    scaling: float,
    positions: Int[Tensor, " n"] | None = None,
    valid: Bool[Tensor, "b t"] | None = None,
    scope: Bool[Tensor, " t"] | None = None,
    column_bias: Float[Tensor, "b hq t"] | None = None,
    values: Float[Tensor, "b hkv t dv"] | None = None,
    softcap: float | None = None,
    statistic: Statistic = "mean",
    impl: Impl = "auto",
) -> tuple[Float[Tensor, "b hq t"], Float[Tensor, "b hq n dv"] | None]:
    """Statistic over causal query rows of the attention that each entry receives, per query head.

    Parameters
    ----------
    query : Float[Tensor, "b hq n d"]
        Query rows as the model's attention function gets them (after rotary embedding and norms).
    keys : Float[Tensor, "b hkv t d"]
        ``hkv`` divides ``hq``.
    row_weights : Float[Tensor, "b n"]
        ``h_j >= 0``; 0 for rows that do not count, padding among them.
    scaling : float
        Factor of the logits.
    positions : Int[Tensor, "n"], optional
        Last entry that each row sees, non-decreasing. Default: the rows are the newest ``n`` of ``t``.
    valid : Bool[Tensor, "b t"], optional
        False for padding, which receives nothing.
    scope : Bool[Tensor, "t"], optional
        Entries that the statistic is about: ``p_j`` is renormalised over them, others receive nothing. Outputs are not
        affected.
    column_bias : Float[Tensor, "b hq t"], optional
        Added to every row's logits, after the softcap.
    values : Float[Tensor, "b hkv t dv"], optional
        When given, the rows' attention output is returned too.
    softcap : float, optional
        As in ``weighted_decode``.
    statistic : "mean", "max" or "output_change"
        ``sum_j h_j p_j(i)``, the maximum of ``p_j(i)`` over rows with positive weight, or
        ``sum_j h_j p_j(i) / (1 - p_j(i)) |o_j - v_i|``, which needs ``values`` and has no scope.
    impl : "auto", "reference", "blocked" or "triton"
        "auto" takes "triton" on a GPU that can run it (``ops.availability``), else "blocked"; the memory of both is
        linear in ``t``. An explicit choice that cannot run raises. "output_change" has no Triton kernel.

    Returns
    -------
    mass : Float[Tensor, "b hq t"]
        float32 (float64 for float64 queries).
    output : Float[Tensor, "b hq n dv"] or None
        In the query's dtype.

    Raises
    ------
    ValueError
        If shapes, ``statistic`` or ``impl`` do not fit.
    """
    b, hq, n, d = query.shape
    hkv, t = keys.shape[1:3]
    if keys.shape != (b, hkv, t, d) or hq % hkv:
        raise ValueError(f"keys must have shape ({b}, a divisor of {hq}, t, {d}), got {tuple(keys.shape)}")
    if row_weights.shape != (b, n):
        raise ValueError(f"row_weights must have shape ({b}, {n}), got {tuple(row_weights.shape)}")
    if valid is not None and valid.shape != (b, t):
        raise ValueError(f"valid must have shape ({b}, {t}), got {tuple(valid.shape)}")
    if scope is not None and scope.shape != (t,):
        raise ValueError(f"scope must have shape ({t},), got {tuple(scope.shape)}")
    if column_bias is not None and column_bias.shape != (b, hq, t):
        raise ValueError(f"column_bias must have shape ({b}, {hq}, {t}), got {tuple(column_bias.shape)}")
    if values is not None and values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values must have shape {tuple(keys.shape[:3])} x dv, got {tuple(values.shape)}")
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {STATISTICS}, got {statistic!r}")
    if statistic == "output_change" and (values is None or scope is not None):
        raise ValueError("statistic='output_change' needs values and no scope")
    if positions is None:
        if n > t:
            raise ValueError(
                f"positions must be given when there are more rows than entries, got {n} rows and {t} entries"
            )
        positions = torch.arange(t - n, t, device=keys.device)
    elif positions.shape != (n,):
        raise ValueError(f"positions must have shape ({n},), got {tuple(positions.shape)}")
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
    if impl == "triton" and statistic == "output_change":
        raise ValueError("impl='triton' has no statistic='output_change'")
    mass, output = _OPERATOR(
        query, keys, row_weights, positions, valid, scope, column_bias, values, scaling, softcap, statistic, impl
    )
    return mass, None if values is None else output


def _attention_mass(
    query: Tensor,
    keys: Tensor,
    row_weights: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    scope: Tensor | None,
    column_bias: Tensor | None,
    values: Tensor | None,
    scaling: float,
    softcap: float | None,
    statistic: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The operator's body. An operator returns tensors only: without values the output is empty."""
    arguments = (query, keys, row_weights, positions, valid, scope, column_bias, values, scaling, softcap, statistic)
    tensors = (query, keys) if values is None else (query, keys, values)
    if impl == "triton":
        require_triton(*tensors)
    if impl == "triton" or (impl == "auto" and statistic != "output_change" and prefer_triton(*tensors)):
        from kvpress_prob.ops.attention_mass.triton_kernel import attention_mass_triton

        mass, output = attention_mass_triton(*arguments)
    elif impl == "reference":
        mass, output = attention_mass_reference(*arguments)
    else:
        mass, output = attention_mass_blocked(*arguments)
    return mass, query.new_empty(0) if output is None else output


def _fake(
    query: Tensor,
    keys: Tensor,
    row_weights: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    scope: Tensor | None,
    column_bias: Tensor | None,
    values: Tensor | None,
    scaling: float,
    softcap: float | None,
    statistic: str,
    impl: str,
) -> tuple[Tensor, Tensor]:
    b, hq, n, _ = query.shape
    mass = query.new_empty(b, hq, keys.shape[2], dtype=torch.promote_types(query.dtype, torch.float32))
    return mass, query.new_empty(0) if values is None else query.new_empty(b, hq, n, values.shape[-1])


_OPERATOR = operator("attention_mass", _attention_mass, _fake)
