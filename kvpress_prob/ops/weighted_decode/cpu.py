"""``weighted_decode`` on the CPU: one call of torch's fused CPU attention per segment, on views of the store.

The query rows of a group share their keys, so a segment is one head with ``group * n`` rows: nothing is repeated and
nothing of the store is copied. torch parallelises over batch rows and heads only, so a segment is viewed as one batch
row per thread (split-KV): parts of equal size, ``size // threads`` entries apart. Where that does not divide evenly a
part ends with the first entries of the next one, and a bias of -inf hides them. The parts of all segments are merged by
their log-sum-exp at the end.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weighted_decode_cpu(
    query: Float[Tensor, "b hq n d"],
    keys: Float[Tensor, "c d"],
    values: Float[Tensor, "c d"],
    log_w: Float[Tensor, " c"],
    start: Int64[Tensor, " s"],
    length: Int64[Tensor, " s"],
    scaling: float,
    return_lse: bool,
) -> tuple[Float[Tensor, "b hq n d"], Float[Tensor, "b hq n"] | None]:
    """See ``weighted_decode``. Products accumulate in float32; parts are merged in float32."""
    b, hq, n, d = query.shape
    splits = torch.get_num_threads()
    rows = query.reshape(len(start), 1, 1, -1, d)
    r = rows.shape[3]
    # torch's bfloat16 kernel takes 2.5 x as long for one row as for two.
    computed = 2 if r == 1 and query.dtype is torch.bfloat16 else r
    rows = rows.expand(-1, splits, -1, computed, -1).contiguous()
    parts, lses, biases = [], [], []
    for segment, (begin, size) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        if size == 0:
            parts.append(query.new_zeros(splits, 1, r, d))
            lses.append(log_w.new_full((splits, 1, r), -torch.inf))
            continue
        step, extra = divmod(size, splits)
        shape, strides = (splits, 1, step + extra, d), (step * d, d, d, 1)
        bias = log_w.as_strided((splits, 1, 1, step + extra), (step, 1, 1, 1), begin)
        if extra or n > 1:
            bias = _masked(bias, size, n, r)
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows[segment],
            keys.as_strided(shape, strides, begin * d),
            values.as_strided(shape, strides, begin * d),
            attn_mask=bias,
            scale=scaling,
        )
        parts.append(part[:, :, :r])
        lses.append(lse[:, :, :r])
        biases.append(bias)

    lse = torch.stack(lses).squeeze(2)  # [s splits r]
    if len(biases) < len(lses) or (lse == 0).any():
        lse = _with_hidden_rows(lse, length, biases)
        share = torch.softmax(lse, 1).nan_to_num(0)
    else:
        share = torch.softmax(lse, 1)
    output = (torch.stack(parts).squeeze(2).float() * share.unsqueeze(-1)).sum(1)
    return output.to(query.dtype).view(b, hq, n, d), torch.logsumexp(lse, 1).view(b, hq, n) if return_lse else None


def _masked(bias: Tensor, size: int, n: int, rows: int) -> Tensor:
    """The parts' bias [splits 1 1 c] with what a part must not see at -inf: entries of the next part, later rows'
    entries."""
    splits, _, _, width = bias.shape
    step = size // splits
    bias = bias.clone()
    bias[:-1, :, :, step:] = -torch.inf
    if n == 1:
        return bias
    # Row i of n sees the first `size - n + 1 + i` entries of the segment.
    entry = torch.arange(width) + step * torch.arange(splits).view(-1, 1, 1, 1)  # [splits 1 1 c]
    seen = entry < size - n + 1 + torch.arange(n).unsqueeze(-1)  # [splits 1 n c]
    return torch.where(seen, bias, -torch.inf).repeat(1, 1, rows // n, 1)


def _with_hidden_rows(lse: Tensor, length: Tensor, biases: list[Tensor]) -> Tensor:
    """torch reports 0 for a row whose every entry is hidden; its log-sum-exp is -inf."""
    lse = lse.clone()
    for segment, bias in zip(length.nonzero().squeeze(-1).tolist(), biases, strict=True):
        hidden = (bias.amax(-1) == -torch.inf).squeeze(1).expand_as(lse[segment])
        lse[segment].masked_fill_(hidden, -torch.inf)
    return lse
