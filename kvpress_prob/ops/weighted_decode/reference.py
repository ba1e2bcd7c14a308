r"""``weighted_decode`` in plain torch: the specification.

For segment ``s`` with entries ``(k_i, v_i, log w_i)``, ``i = 1..L``, and query rows ``q_r``, ``r = 1..n``, the newest
``n`` entries being the queries' own::

    a_ri = scaling q_r.k_i,  then softcap tanh(a_ri / softcap) if there is a softcap,  then + log w_i
    a_ri = -inf                                                             for i > L - n + r
    lse_r = log sum_i exp(a_ri),   o_r = sum_i exp(a_ri - lse_r) v_i

An empty sum gives ``lse = -inf`` and ``o = 0``.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

BLOCK_ELEMENTS = 2**21
"""Elements of a block of logits: rows are taken as many at a time."""


def weighted_decode_reference(
    query: Float[Tensor, "b hq n d"],
    keys: Float[Tensor, "c d"],
    values: Float[Tensor, "c dv"],
    log_w: Float[Tensor, " c"],
    start: Int64[Tensor, " s"],
    length: Int64[Tensor, " s"],
    scaling: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "b hq n dv"], Float[Tensor, "b hq n"]]:
    """See ``weighted_decode``. Computes in float32, or in float64 when the query is float64."""
    b, hq, n, d = query.shape
    kv_heads = len(start) // b
    group = hq // kv_heads
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(wide).reshape(len(start), group, n, d)
    rows_per_block = max(BLOCK_ELEMENTS // max(group * int(length.max()), 1), 1)
    outputs, lses = [], []
    for segment, (begin, size) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        key, value = keys[begin : begin + size].to(wide), values[begin : begin + size].to(wide)
        for first in range(0, n, rows_per_block):
            block = rows[segment, :, first : first + rows_per_block]
            logits = scaling * block @ key.mT  # [g rows L]
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits + log_w[begin : begin + size]
            row = torch.arange(first, first + block.shape[1], device=query.device).unsqueeze(-1)
            seen = torch.arange(size, device=query.device) < size - n + 1 + row
            logits = logits.masked_fill(~seen, -torch.inf)
            lse = torch.logsumexp(logits, -1) if size else logits.new_full(logits.shape[:-1], -torch.inf)
            probability = torch.exp(logits - torch.where(lse > -torch.inf, lse, 0).unsqueeze(-1))
            outputs.append(probability @ value)
            lses.append(lse)
    blocks = -(-n // rows_per_block)

    def whole(parts: list[Tensor]) -> Tensor:
        """Blocks of rows [g rows ...] of every segment as [s g n ...]."""
        return torch.stack([torch.cat(parts[at : at + blocks], 1) for at in range(0, len(parts), blocks)])

    return whole(outputs).view(b, hq, n, -1).to(query.dtype), whole(lses).view(b, hq, n)
