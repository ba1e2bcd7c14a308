r"""``attention_mass`` in plain torch with the whole rows-by-entries matrix: the specification.

With ``p_j = softmax_i(a_ji)``, ``a_ji = scaling q_j.k_i`` (softcapped if asked) ``+ bias_i`` over the valid entries
``i <= position_j``, and ``p_j`` divided by its sum over the entries in scope where there is a scope::

    mean   sum_j h_j p_j(i)
    max    max_{j: h_j > 0} p_j(i)
    output o_j = sum_i p_j(i) v_i
    output_change   sum_j h_j p_j(i) / (1 - p_j(i)) |o_j - v_i|

The last is what deleting entry ``i`` does to the rows' outputs (without a scope); ``1 - p`` is at least ``LEAST_REST``,
below which a float32 probability says nothing of it. A row always sees its own position, so padding rows are defined;
they carry ``h_j = 0``.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST_REST = 1e-4


def attention_mass_reference(
    query: Float[Tensor, "b hq n d"],
    keys: Float[Tensor, "b hkv t d"],
    row_weights: Float[Tensor, "b n"],
    positions: Int[Tensor, " n"],
    valid: Bool[Tensor, "b t"] | None,
    scope: Bool[Tensor, " t"] | None,
    column_bias: Float[Tensor, "b hq t"] | None,
    values: Float[Tensor, "b hkv t dv"] | None,
    scaling: float,
    softcap: float | None,
    statistic: str,
) -> tuple[Float[Tensor, "b hq t"], Float[Tensor, "b hq n dv"] | None]:
    """See ``attention_mass``. Computes in float32, or in float64 when the query is float64."""
    group = query.shape[1] // keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = scaling * query.to(wide) @ keys.to(wide).repeat_interleave(group, 1).mT  # [b hq n t]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if column_bias is not None:
        logits = logits + column_bias.to(wide).unsqueeze(2)
    column, row = torch.arange(keys.shape[2], device=keys.device), positions.unsqueeze(-1)
    seen = (column <= row).expand(query.shape[0], 1, -1, -1)
    if valid is not None:
        seen = seen & (valid[:, None, None, :] | (column == row))
    probability = torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)
    output = change = None
    if values is not None:
        repeated = values.to(wide).repeat_interleave(group, 1)
        output = probability @ repeated
        change = probability / (1 - probability).clamp(min=LEAST_REST)
        change = change * torch.cdist(output, repeated, compute_mode="donot_use_mm_for_euclid_dist")
        output = output.to(query.dtype)
    if scope is not None:
        probability = probability * scope
        inside = probability.sum(-1, keepdim=True)
        probability = probability / torch.where(inside > 0, inside, 1)
    weight = row_weights.to(wide)[:, None, :, None]
    if statistic == "mean":
        mass = (weight * probability).sum(2)
    elif statistic == "max":
        mass = torch.where(weight > 0, probability, 0).amax(2)
    elif change is not None:
        mass = (weight * change).sum(2)
    else:
        raise ValueError("statistic='output_change' needs values")
    return mass, output
