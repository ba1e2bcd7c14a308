"""``weighted_decode`` in Triton: split-KV flash decoding over the flat store.

Two launches. ``decode_tile_kernel``: one program a tile of a segment and block of query rows, online softmax in base 2,
leaves a normalised partial output and its log-sum-exp. ``merge_tiles_kernel``: one program a segment and query row,
merges the tiles' partials by their log-sum-exp.

The tile list is arithmetic and stored nowhere: see ``launch``. A program finds its segment from the starts of all
segments, and whether its tile holds anything from the segment's length, both on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress_prob.ops.availability import architecture, multiprocessors
from kvpress_prob.ops.weighted_decode.launch import launch_config, merge_config, tile_size, tile_slots

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SEGMENTS_AT_ONCE = 256


@triton.jit
def capped(products, scale, cap, HAS_CAP: tl.constexpr):
    """Base-2 logits: ``scale * products``, or ``cap * tanh(scale * products)``."""
    x = products * scale
    if HAS_CAP:
        # Below 1 Lambert's continued fraction, whose sums do not cancel; from there on the exponential.
        s = x * x
        small = x * (135135.0 + s * (17325.0 + s * (378.0 + s))) / (135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0)))
        large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
        x = cap * tl.where(s < 1.0, small, large)
    return x


@triton.jit
def segment_of(start_ptr, segments, slot, tile_log2, BLOCK_S: tl.constexpr):
    """Index of the last segment whose first slot, ``(start >> tile_log2) + index``, is not beyond ``slot``, or 0."""
    before = 0
    for base in range(0, segments, BLOCK_S):
        index = base + tl.arange(0, BLOCK_S)
        start = tl.load(start_ptr + index, mask=index < segments, other=0)
        first_slot = (start >> tile_log2) + index
        before += tl.sum(((index < segments) & (first_slot <= slot)).to(tl.int32))
    return tl.maximum(before - 1, 0)


@triton.jit
def decode_tile_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    log_w_ptr,
    start_ptr,
    length_ptr,
    partial_ptr,
    partial_lse_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    segments,
    kv_heads,
    group,
    n,
    tile_log2,
    scale,
    cap,
    D: tl.constexpr,
    DV: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    slot = tl.program_id(0)
    segment = segment_of(start_ptr, segments, slot, tile_log2, BLOCK_S)
    start = tl.load(start_ptr + segment)
    length = tl.load(length_ptr + segment)
    split = slot - (start >> tile_log2) - segment  # int64
    begin = split << tile_log2
    if (begin < 0) | (begin >= length):
        return
    size = tl.minimum(length - begin, 1 << tile_log2).to(tl.int32)

    rows = group * n
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    offs_n = tl.arange(0, BLOCK_N)
    head = (segment % kv_heads) * group + m // n
    query_row = m % n
    q = tl.load(
        query_ptr
        + (segment // kv_heads).to(tl.int64) * stride_qb
        + head[:, None].to(tl.int64) * stride_qh
        + query_row[:, None].to(tl.int64) * stride_qn
        + offs_d[None, :] * stride_qd,
        mask=(m < rows)[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    # Row i of n sees the first length - n + 1 + i entries of the segment.
    seen = tl.minimum(length - begin - n + 1 + query_row, size).to(tl.int32)  # [BLOCK_M]

    keys_ptr += (start + begin) * D
    values_ptr += (start + begin) * DV
    log_w_ptr += start + begin
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for offset in range(0, size, BLOCK_N):
        j = offset + offs_n
        inside = j < size
        k = tl.load(
            keys_ptr + j[:, None] * D + offs_d[None, :], mask=inside[:, None] & (offs_d < D)[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_D]
        v = tl.load(
            values_ptr + j[:, None] * DV + offs_dv[None, :], mask=inside[:, None] & (offs_dv < DV)[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_DV]
        log_w = tl.load(log_w_ptr + j, mask=inside, other=float("-inf"))
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)  # [BLOCK_M, BLOCK_N]
        logits = tl.where(j[None, :] < seen[:, None], logits + (log_w * LOG2_E)[None, :], float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(logits - reference[:, None])
        decay = tl.exp2(top - reference)
        total = total * decay + tl.sum(share, 1)
        out = tl.dot(share.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        top = new_top

    place = slot.to(tl.int64) * rows + m
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        partial_ptr + place[:, None] * DV + offs_dv[None, :],
        out / divisor[:, None],
        mask=(m < rows)[:, None] & (offs_dv < DV)[None, :],
    )
    # An empty sum keeps its top, -inf.
    tl.store(partial_lse_ptr + place, top + tl.log2(divisor), mask=m < rows)


@triton.jit
def merge_tiles_kernel(
    partial_ptr,
    partial_lse_ptr,
    start_ptr,
    length_ptr,
    output_ptr,
    lse_ptr,
    rows,
    tile_log2,
    DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    output_row = tl.program_id(0).to(tl.int64)
    segment = output_row // rows
    row = output_row % rows
    length = tl.load(length_ptr + segment)
    tiles = ((length + (1 << tile_log2) - 1) >> tile_log2).to(tl.int32)
    first = (tl.load(start_ptr + segment) >> tile_log2) + segment
    offs_t = tl.arange(0, BLOCK_T)
    offs_dv = tl.arange(0, BLOCK_DV)
    top = float("-inf")
    total = 0.0
    out = tl.zeros([BLOCK_DV], tl.float32)
    for base in range(0, tiles, BLOCK_T):
        tile = base + offs_t
        place = (first + tile) * rows + row  # [BLOCK_T], int64
        lse = tl.load(partial_lse_ptr + place, mask=tile < tiles, other=float("-inf"))
        part = tl.load(
            partial_ptr + place[:, None] * DV + offs_dv[None, :],
            mask=(tile < tiles)[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
        )  # [BLOCK_T, BLOCK_DV]
        new_top = tl.maximum(top, tl.max(lse, 0))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(lse - reference)
        decay = tl.exp2(top - reference)
        total = total * decay + tl.sum(share, 0)
        out = out * decay + tl.sum(share[:, None] * part, 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    out = (out / divisor).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + output_row * DV + offs_dv, out, mask=offs_dv < DV)
    tl.store(lse_ptr + output_row, (top + tl.log2(divisor)) * LN_2)


def logit_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """``scale`` and ``cap`` of ``capped``."""
    if softcap is None:
        return scaling * LOG2_E.value, 1.0
    return scaling / softcap, softcap * LOG2_E.value


def weighted_decode_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_w: Tensor,
    start: Tensor,
    length: Tensor,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """See ``weighted_decode``. Products and sums in float32; shares are rounded to the store's dtype before they meet
    the values, as every flash-attention kernel does."""
    b, hq, n, d = query.shape
    dv = values.shape[1]
    segments = len(start)
    rows = b * hq * n // segments
    config = launch_config(rows, d, dv, query.dtype, architecture(query.device))
    tile = tile_size(config, len(keys), rows, d, dv, query.dtype.itemsize, multiprocessors(query.device))
    slots = tile_slots(len(keys), segments, tile)
    partial = torch.empty(slots, rows, dv, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(slots, rows, dtype=torch.float32, device=query.device)
    output = torch.empty(b, hq, n, dv, dtype=query.dtype, device=query.device)
    lse = torch.empty(b, hq, n, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        decode_tile_kernel[slots, triton.cdiv(rows, config.block_m)](
            query,
            keys,
            values,
            log_w,
            start,
            length,
            partial,
            partial_lse,
            *query.stride(),
            segments,
            segments // b,
            hq * b // segments,
            n,
            tile.bit_length() - 1,
            *logit_factors(scaling, softcap),
            D=d,
            DV=dv,
            HAS_CAP=softcap is not None,
            BLOCK_S=SEGMENTS_AT_ONCE,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=config.block_d,
            BLOCK_DV=config.block_dv,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        merge = merge_config(dv)
        merge_tiles_kernel[(rows * segments,)](
            partial,
            partial_lse,
            start,
            length,
            output,
            lse,
            rows,
            tile.bit_length() - 1,
            DV=dv,
            BLOCK_T=merge.block_t,
            BLOCK_DV=merge.block_dv,
            num_warps=merge.num_warps,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return output, lse
