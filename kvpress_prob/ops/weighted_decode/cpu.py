"""``weighted_decode`` on the CPU: torch's fused CPU attention, segment by segment, on views of the store.

Query rows are taken in blocks of ``BLOCK_ROWS``. All rows of a block see a segment's older entries, so these are one
head with ``group * rows`` rows: nothing is repeated, nothing of the store is copied, and the only bias is the view of
their log-weights. The entries of the block's own tokens, ``rows`` of them, are attended to causally; where some of them
are hidden, by a triangle of -inf, the largest bias there is. torch parallelises over batch rows, heads and blocks of
query rows only, so the older entries of a block of few rows are viewed as one batch row per thread (split-KV): parts of
equal size, ``size // threads`` entries apart. Where that does not divide evenly a part ends with the first entries of
the next one, and a bias of -inf hides them. All parts of a block are merged by their log-sum-exp.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import pad

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
    outputs, lses = [], []
    for parts, lse in _blocks(_Attention(keys, values, log_w, scaling), rows, segments):
        share = torch.softmax(lse, 1).nan_to_num(0)
        outputs.append((parts.float() * share.unsqueeze(-1)).sum(1))
        if return_lse:
            lses.append(torch.logsumexp(lse, 1))
    output = torch.cat(outputs, 2).to(query.dtype).view(b, hq, n, d)
    return output, torch.cat(lses, 2).view(b, hq, n) if return_lse else None


def _blocks(attention: "_Attention", rows: Tensor, segments: Segments) -> Iterator[tuple[Tensor, Tensor]]:
    """For every block of query rows [s g r d], its parts [s p g r d] and their log-sum-exps [s p g r]."""
    n = rows.shape[2]
    if n == 1:
        yield attention.seen_by_all(rows, segments)
        return
    for first in range(0, n, BLOCK_ROWS):
        block = rows[:, :, first : first + BLOCK_ROWS]
        # Of a segment's entries, the newest n - first are this block's own and later ones.
        older = [(begin, max(size - n + first, 0)) for begin, size in segments]
        parts, lses = attention.seen_by_all(block, older)
        # A store of fewer than n entries has no own entry for its first rows.
        own, own_lse = attention.triangle(block, [(begin, size - n + first) for begin, size in segments])
        yield torch.cat((parts, own), 1), torch.cat((lses, own_lse), 1)


class _Attention:
    """The store's buffers, each entry behind the other, and how to attend to stretches of them."""

    def __init__(self, keys: Tensor, values: Tensor, log_w: Tensor, scaling: float):
        self.entries = [(buffer, buffer.storage_offset(), buffer.shape[1]) for buffer in (keys, values)]
        self.log_w, self.scaling = log_w, scaling

    def seen_by_all(self, rows: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Outputs [s splits g r d] and log-sum-exps [s splits g r] of rows [s g r d] that see all given entries."""
        s, g, r, d = rows.shape
        threads = torch.get_num_threads()
        splits = 1 if g * r >= ROWS_PER_TASK * threads else threads
        # torch's bfloat16 kernel takes 2.5 x as long for one row as for two.
        computed = 2 if g * r == 1 and rows.dtype is torch.bfloat16 else g * r
        heads = rows.reshape(s, 1, 1, g * r, d).expand(-1, splits, -1, computed, -1).contiguous()
        parts, lses, biases, first = [], [], [], self.log_w.storage_offset()
        for segment, (begin, size) in enumerate(segments):
            if size == 0:
                parts.append(heads.new_zeros(splits, 1, computed, d))
                lses.append(self.log_w.new_full((splits, 1, computed), -torch.inf))
                biases.append(self.log_w.new_full((splits, 1, 1, 1), -torch.inf))
                continue
            step, extra = divmod(size, splits)
            bias = self.log_w.as_strided((splits, 1, 1, step + extra), (step, 0, 0, 1), first + begin)
            if extra:
                bias = bias.clone()
                bias[:-1, :, :, step:] = -torch.inf
            part, lse = self._attend(heads[segment], begin, step, step + extra, bias)
            parts.append(part)
            lses.append(lse)
            biases.append(bias)
        lse = _with_hidden(torch.stack(lses), biases)[:, :, :, : g * r].reshape(s, splits, g, r)
        return torch.stack(parts)[:, :, :, : g * r].reshape(s, splits, g, r, d), lse

    def triangle(self, rows: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """Outputs [s 1 g r d] and log-sum-exps [s 1 g r] of rows [s g r d]: row ``i`` sees ``i + 1`` entries from the
        given place on. With a negative number instead of a place's, the first rows have no entry of their own."""
        s, g, r, d = rows.shape
        later = torch.ones(r, r, dtype=torch.bool, device=rows.device).triu(1)
        parts, lses = rows.new_zeros(s, 1, g, r, d), self.log_w.new_full((s, 1, g, r), -torch.inf)
        biases = []
        for segment, (begin, older) in enumerate(segments):
            missing, place = min(max(-older, 0), r), begin + max(older, 0)
            width = r - missing
            log_w, bias = self.log_w[place : place + width], None
            if log_w.any():  # padding of a question is hidden by a weight of 0
                bias = log_w.masked_fill(later[:width, :width], -torch.inf)[None, None]
            biases.append(None if bias is None else pad(bias, (0, 0, missing, 0), value=-torch.inf))
            if width:
                seeing = rows[segment : segment + 1, :, missing:]
                part, lse = self._attend(seeing, place, 0, width, bias)
                parts[segment, :, :, missing:] = part
                lses[segment, :, :, missing:] = lse
        return parts, _with_hidden(lses, biases)

    def _attend(self, rows: Tensor, place: int, step: int, size: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """torch's fused attention of rows [p g r d] to ``size`` entries, the next batch row's ``step`` entries further
        on, with a bias [p or 1, 1, r or 1, size]; None is causal attention of as many rows, which computes half."""
        shape = (*rows.shape[:2], size)
        keys, values = (
            buffer.as_strided((*shape, width), (step * width, 0, width, 1), first + place * width)
            for buffer, first, width in self.entries
        )
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, is_causal=bias is None, attn_mask=bias, scale=self.scaling
        )


def _with_hidden(lse: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """torch reports 0 for a row whose every entry is hidden; its log-sum-exp is -inf.

    ``lse`` [s p g r] was computed with the biases, a segment's each, that spread over [p g r c]; None hides no row.
    """
    if (lse == 0).any():
        for segment, bias in zip(lse, biases, strict=True):
            if bias is not None:
                segment.masked_fill_((bias == -torch.inf).all(-1).expand_as(segment), -torch.inf)
    return lse
