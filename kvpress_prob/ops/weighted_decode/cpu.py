"""``weighted_decode`` on the CPU: torch's fused CPU attention, segment by segment, on views of the store.

Query rows are taken in blocks of ``BLOCK_ROWS``. All rows of a block see a segment's older entries, so these are one
head with ``group * rows`` rows: nothing is repeated, nothing of the store is copied, and the only bias is the view of
their log-weights. The entries of the block's own tokens, ``rows`` of them, get a triangle of -inf, the largest bias
there is. torch parallelises over batch rows, heads and blocks of query rows only, so the older entries of a block of
few rows are viewed as one batch row per thread (split-KV): parts of equal size, ``size // threads`` entries apart.
Where that does not divide evenly a part ends with the first entries of the next one, and a bias of -inf hides them. All
parts of a block are merged by their log-sum-exp.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_ROWS = 512
"""Query rows of a block: its triangle takes a megabyte."""
ROWS_PER_TASK = 32
"""Fewest query rows that torch gives a thread of their own."""

Segments = list[tuple[int, int]]
"""First place and number of entries of every segment."""


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
    rows = query.reshape(len(start), -1, n, d)  # [s g n d]
    segments = list(zip(start.tolist(), length.tolist(), strict=True))
    attention = _Attention(keys, values, log_w, scaling)
    if n == 1:
        output, lse = _merged(*attention.seen_by_all(rows, segments))
    else:
        blocks = []
        for first in range(0, n, BLOCK_ROWS):
            block = rows[:, :, first : first + BLOCK_ROWS]
            # Of a segment's entries, the newest n - first are this block's own and later ones.
            older = [(begin, max(size - n + first, 0)) for begin, size in segments]
            parts, lses = attention.seen_by_all(block, older)
            # A store of fewer than n entries has no own entry for its first rows.
            own, own_lse = attention.triangle(block, [(begin, size - n + first) for begin, size in segments])
            blocks.append(_merged(torch.cat((parts, own), 1), torch.cat((lses, own_lse), 1)))
        output, lse = (torch.cat(it, 2) for it in zip(*blocks, strict=True))
    return output.to(query.dtype).view(b, hq, n, d), lse.view(b, hq, n) if return_lse else None


class _Attention:
    """The store's buffers and how to attend to stretches of them."""

    def __init__(self, keys: Tensor, values: Tensor, log_w: Tensor, scaling: float):
        self.keys, self.values, self.log_w, self.scaling = keys, values, log_w, scaling

    def seen_by_all(self, rows: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Outputs [s splits g r d] and log-sum-exps [s splits g r] of rows [s g r d] that see all given entries."""
        s, g, r, d = rows.shape
        threads = torch.get_num_threads()
        splits = 1 if g * r >= ROWS_PER_TASK * threads else threads
        # torch's bfloat16 kernel takes 2.5 x as long for one row as for two.
        computed = 2 if g * r == 1 and rows.dtype is torch.bfloat16 else g * r
        heads = rows.reshape(s, 1, 1, g * r, d).expand(-1, splits, -1, computed, -1).contiguous()
        parts, lses, biases = [], [], []
        for segment, (begin, size) in enumerate(segments):
            if size == 0:
                parts.append(rows.new_zeros(splits, 1, g * r, d))
                lses.append(self.log_w.new_full((splits, 1, g * r), -torch.inf))
                continue
            step, extra = divmod(size, splits)
            bias = _view(self.log_w, (splits, 1, 1, step + extra), (step, 0, 0, 1), begin)
            if extra:
                bias = bias.clone()
                bias[:-1, :, :, step:] = -torch.inf
            part, lse = self._attend(heads[segment], (splits, 1, step + extra), (step, 0, 1), begin, bias)
            parts.append(part[:, :, : g * r])
            lses.append(lse[:, :, : g * r])
            biases.append((lses[-1], bias))
        _mark_hidden(biases)
        return torch.stack(parts).view(s, splits, g, r, d), torch.stack(lses).view(s, splits, g, r)

    def triangle(self, rows: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Outputs [s 1 g r d] and log-sum-exps [s 1 g r] of rows [s g r d]: row ``i`` sees ``i + 1`` entries from the
        given place on. With a negative number instead of a place's, the first rows have no entry of their own."""
        s, g, r, d = rows.shape
        later = torch.ones(r, r, dtype=torch.bool, device=rows.device).triu(1)
        parts, lses, biases = rows.new_zeros(s, 1, g, r, d), self.log_w.new_full((s, 1, g, r), -torch.inf), []
        for segment, (begin, older) in enumerate(segments):
            missing, place = min(max(-older, 0), r), begin + max(older, 0)
            width = r - missing
            if width:
                bias = self.log_w[place : place + width].masked_fill(later[:width, :width], -torch.inf)[None, None]
                seeing = rows[segment : segment + 1, :, missing:]
                part, lse = self._attend(seeing, (1, g, width), (0, 0, 1), place, bias)
                parts[segment, :, :, missing:] = part
                lses[segment, :, :, missing:] = lse
                biases.append((lses[segment, :, :, missing:], bias))
        _mark_hidden(biases)
        return parts, lses

    def _attend(
        self, rows: Tensor, shape: tuple[int, ...], steps: tuple[int, ...], place: int, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """torch's fused attention over the entries of a view of the store."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows,
            _view(self.keys, shape, steps, place),
            _view(self.values, shape, steps, place),
            attn_mask=bias,
            scale=self.scaling,
        )


def _view(buffer: Tensor, shape: tuple[int, ...], steps: tuple[int, ...], place: int) -> Tensor:
    """Entries from ``place`` on as ``shape``, ``steps`` entries apart along each axis."""
    entry = buffer.stride(0)
    strides = tuple(step * entry for step in steps)
    return buffer.as_strided(
        (*shape, *buffer.shape[1:]), (*strides, *buffer.stride()[1:]), buffer.storage_offset() + place * entry
    )


def _mark_hidden(parts: list[tuple[Tensor, Tensor]]) -> None:
    """torch reports 0 for a row whose every entry is hidden; make its log-sum-exp -inf, in place.

    ``parts`` holds log-sum-exps and the bias that they were computed with.
    """
    if parts and torch.stack([(lse == 0).any() for lse, _ in parts]).any():
        for lse, bias in parts:
            lse.masked_fill_((bias.amax(-1) == -torch.inf).expand_as(lse), -torch.inf)


def _merged(parts: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [s p g r d] and their log-sum-exps [s p g r] as one: output [s g r d], log-sum-exp [s g r]."""
    share = torch.softmax(lse, 1).nan_to_num(0)
    return (parts.float() * share.unsqueeze(-1)).sum(1), torch.logsumexp(lse, 1)
