"""``attention_mass`` by blocks of query rows: the largest tensor has a fixed number of elements, and blocks end at the
diagonal."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpress_prob.ops.attention_mass.reference import LEAST_REST

BLOCK_ELEMENTS = {"cpu": 2**21}
"""Elements of a block of logits: what fits a CPU's cache; elsewhere what keeps a GPU busy."""
BLOCK_ELEMENTS_ELSEWHERE = 2**26
MIN_ROWS, MAX_ROWS = 16, 256


def rows_per_block(heads: int, t: int, device: str) -> int:
    """Rows of a block for ``heads`` = batch rows times query heads: a power of two between 16 and 256."""
    rows = BLOCK_ELEMENTS.get(device, BLOCK_ELEMENTS_ELSEWHERE) // (heads * t)
    return min(max(1 << max(rows.bit_length() - 1, 0), MIN_ROWS), MAX_ROWS)


def attention_mass_blocked(
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
    """See ``attention_mass``. ``positions`` is non-decreasing. Computes in float32, or float64 for float64 queries."""
    b, hq, n, d = query.shape
    hkv, t = keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = keys.to(wide).reshape(b * hkv, t, d)
    query = query.reshape(b * hkv, hq // hkv, n, d)
    weights = row_weights.to(wide).repeat_interleave(hq, 0).unsqueeze(1)  # [b*hq 1 n]
    inside = None if scope is None else scope.to(wide)
    mass = keys.new_zeros(b * hq, 1, t)
    output = None
    if values is not None:
        values = values.to(wide).reshape(b * hkv, t, -1)
        output = query.new_empty(b, hq, n, values.shape[-1])

    block = rows_per_block(b * hq, t, query.device.type)
    ends = (positions + 1).tolist()
    all_count = bool((row_weights > 0).all())
    buffers = keys.new_empty(2, b * hq * min(block, n) * (ends[-1] if ends else 0))
    column = torch.arange(t, device=keys.device)
    for begin in range(0, n, block):
        rows = slice(begin, min(begin + block, n))
        size, end = rows.stop - begin, ends[rows.stop - 1]
        logits, probability = (buffer[: b * hq * size * end].view(b * hq, size, end) for buffer in buffers)
        # The scaling goes on the queries: a pass over rows by d instead of rows by t.
        scaled = query[:, :, rows].to(wide).mul(scaling).reshape(b * hkv, -1, d)
        torch.bmm(scaled, keys[:, :end].mT, out=logits.view(b * hkv, -1, end))
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if column_bias is not None:
            logits.add_(column_bias.to(wide).reshape(b * hq, 1, t)[..., :end])
        position = positions[rows].unsqueeze(-1)
        first = ends[begin]
        if first < end:
            logits[..., first:].masked_fill_(column[first:end] > position, -torch.inf)
        if valid is not None:
            hidden = ~valid[:, None, :end] & (column[:end] != position)  # [b size end]
            logits.view(b, hq, size, end).masked_fill_(hidden.unsqueeze(1), -torch.inf)
        torch.softmax(logits, -1, out=probability)
        if output is not None and values is not None:
            part = probability.view(b * hkv, -1, end) @ values[:, :end]
            output[:, :, rows] = part.view(b, hq, size, -1)
            if statistic == "output_change":
                odds = probability.div_((1 - probability).clamp_(min=LEAST_REST))
                distance = torch.cdist(part, values[:, :end], compute_mode="donot_use_mm_for_euclid_dist")
                odds.view(b * hkv, -1, end).mul_(distance)
        row_weight = weights[..., rows]  # [b*hq 1 size]
        if statistic == "max":
            row_weight = (row_weight > 0).to(wide)
        if inside is not None:
            row_scale = torch.mv(probability.view(-1, end), inside[:end]).view_as(row_weight)
            row_scale = torch.where(row_scale > 0, 1 / row_scale, 0)
            row_weight = row_weight * row_scale
        if statistic == "max":
            if inside is not None or not all_count:
                probability.mul_(row_weight.mT)
            best = probability.amax(1, keepdim=True)
            torch.maximum(mass[..., :end], best, out=mass[..., :end])
        else:
            mass[..., :end].baddbmm_(row_weight, probability)
    if inside is not None:
        mass.mul_(inside)
    return mass.view(b, hq, t), output
