"""``attention_mass`` in Triton, in two passes over tiles.

``row_lse_kernel``: one program a block of query rows, online softmax over the entries they see; leaves each row's
log-sum-exp, and the attention output when it is wanted. ``column_mass_kernel``: one program a block of entries, which
meets the rows that see it in order and reduces their probabilities. Nothing of size rows by entries is ever stored,
and every sum has one fixed order (no atomics), so results are the same in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress_prob.ops.attention_mass.launch import launch_config
from kvpress_prob.ops.availability import architecture
from kvpress_prob.ops.weighted_decode.triton_kernel import LOG2_E, capped, logit_factors


@triton.jit
def row_lse_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    position_ptr,
    valid_ptr,
    scope_ptr,
    bias_ptr,
    lse_ptr,
    output_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_vd,
    heads,
    group,
    n,
    t,
    scale,
    cap,
    D: tl.constexpr,
    DV: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_SCOPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    row = place // heads
    head = place % heads
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    position = tl.load(position_ptr + m, mask=m < n, other=0).to(tl.int32)  # [BLOCK_M]
    q = tl.load(
        query_ptr
        + row * stride_qb
        + head * stride_qh
        + m[:, None].to(tl.int64) * stride_qn
        + offs_d[None, :] * stride_qd,
        mask=(m < n)[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )  # [BLOCK_M, BLOCK_D]
    keys_ptr += row * stride_kb + (head // group) * stride_kh
    if HAS_OUTPUT:
        values_ptr += row * stride_vb + (head // group) * stride_vh
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    inside = tl.zeros([BLOCK_M], tl.float32)  # the part of `total` that is in scope
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for offset in range(0, tl.minimum(tl.max(position, 0) + 1, t), BLOCK_N):
        j = offset + offs_n
        far = j[:, None].to(tl.int64)
        k = tl.load(
            keys_ptr + far * stride_kt + offs_d[None, :] * stride_kd,
            mask=(j < t)[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_D]
        logits = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, HAS_CAP)  # [BLOCK_M, BLOCK_N]
        if HAS_BIAS:
            logits += (tl.load(bias_ptr + place * t + j, mask=j < t, other=0.0) * LOG2_E)[None, :]
        seen = (j[None, :] <= position[:, None]) & (j < t)[None, :]
        if HAS_VALID:
            valid = tl.load(valid_ptr + row * t + j, mask=j < t, other=0) != 0
            seen = seen & (valid[None, :] | (j[None, :] == position[:, None]))
        logits = tl.where(seen, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(logits - reference[:, None])
        decay = tl.exp2(top - reference)
        total = total * decay + tl.sum(share, 1)
        if HAS_SCOPE:
            scope = tl.load(scope_ptr + j, mask=j < t, other=0) != 0
            inside = inside * decay + tl.sum(tl.where(scope[None, :], share, 0.0), 1)
        if HAS_OUTPUT:
            v = tl.load(
                values_ptr + far * stride_vt + offs_dv[None, :] * stride_vd,
                mask=(j < t)[:, None] & (offs_dv < DV)[None, :],
                other=0.0,
            )  # [BLOCK_N, BLOCK_DV]
            out = tl.dot(share.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        top = new_top
    # The log-sum-exp of what the statistic is about; a row that sees nothing of it counts for nothing.
    if not HAS_SCOPE:
        inside = total
    lse = tl.where(inside > 0, top + tl.log2(tl.where(inside > 0, inside, 1.0)), float("inf"))
    tl.store(lse_ptr + place * n + m, lse, mask=m < n)
    if HAS_OUTPUT:
        far = place * n + m
        tl.store(
            output_ptr + far[:, None] * DV + offs_dv[None, :],
            (out / total[:, None]).to(output_ptr.dtype.element_ty),
            mask=(m < n)[:, None] & (offs_dv < DV)[None, :],
        )


@triton.jit
def column_mass_kernel(
    query_ptr,
    keys_ptr,
    weight_ptr,
    position_ptr,
    first_row_ptr,
    valid_ptr,
    scope_ptr,
    bias_ptr,
    lse_ptr,
    mass_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_kd,
    heads,
    group,
    n,
    t,
    scale,
    cap,
    D: tl.constexpr,
    STATISTIC: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_SCOPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    row = place // heads
    head = place % heads
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    k = tl.load(
        keys_ptr
        + row * stride_kb
        + (head // group) * stride_kh
        + j[:, None].to(tl.int64) * stride_kt
        + offs_d[None, :] * stride_kd,
        mask=(j < t)[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )  # [BLOCK_N, BLOCK_D]
    if HAS_VALID:
        valid = tl.load(valid_ptr + row * t + j, mask=j < t, other=0) != 0
    if HAS_SCOPE:
        scope = tl.load(scope_ptr + j, mask=j < t, other=0) != 0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + place * t + j, mask=j < t, other=0.0) * LOG2_E
    query_ptr += row * stride_qb + head * stride_qh
    mass = tl.zeros([BLOCK_N], tl.float32)
    for offset in range(tl.load(first_row_ptr + tl.program_id(0)), n, BLOCK_M):
        m = offset + offs_m
        q = tl.load(
            query_ptr + m[:, None].to(tl.int64) * stride_qn + offs_d[None, :] * stride_qd,
            mask=(m < n)[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )  # [BLOCK_M, BLOCK_D]
        position = tl.load(position_ptr + m, mask=m < n, other=-1).to(tl.int32)
        weight = tl.load(weight_ptr + row * n + m, mask=m < n, other=0.0)
        lse = tl.load(lse_ptr + place * n + m, mask=m < n, other=0.0)
        logits = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), scale, cap, HAS_CAP)  # [BLOCK_N, BLOCK_M]
        if HAS_BIAS:
            logits += bias[:, None]
        seen = j[:, None] <= position[None, :]
        if HAS_VALID:
            seen = seen & (valid[:, None] | (j[:, None] == position[None, :]))
        if HAS_SCOPE:
            seen = seen & scope[:, None]
        probability = tl.where(seen, tl.exp2(logits - lse[None, :]), 0.0)
        if STATISTIC == "mean":
            mass += tl.sum(probability * weight[None, :], 1)
        else:
            mass = tl.maximum(mass, tl.max(tl.where(weight[None, :] > 0, probability, 0.0), 1))
    tl.store(mass_ptr + place * t + j, mass, mask=j < t)


def attention_mass_triton(
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
) -> tuple[Tensor, Tensor | None]:
    """See ``attention_mass``. Products and sums in float32."""
    b, hq, n, d = query.shape
    hkv, t = keys.shape[1:3]
    dv = 0 if values is None else values.shape[-1]
    device = query.device
    config = launch_config(n, d, max(dv, 1), query.dtype, architecture(device))
    lse = torch.empty(b, hq, n, dtype=torch.float32, device=device)
    mass = torch.empty(b, hq, t, dtype=torch.float32, device=device)
    output = None if values is None else torch.empty(b, hq, n, dv, dtype=query.dtype, device=device)
    weight = row_weights.float().contiguous()
    blocks = torch.arange(0, t, config.block_n, device=device)
    first_row = torch.searchsorted(positions, blocks, out_int32=True)
    bias = None if column_bias is None else column_bias.float().contiguous()
    masks = [None if mask is None else mask.contiguous().view(torch.uint8) for mask in (valid, scope)]
    shared = (hq, hq // hkv, n, t, *logit_factors(scaling, softcap))
    with torch.cuda.device_of(query):
        row_lse_kernel[triton.cdiv(n, config.block_m), b * hq](
            query,
            keys,
            values,
            positions,
            *masks,
            bias,
            lse,
            output,
            *query.stride(),
            *keys.stride(),
            *((0, 0, 0, 0) if values is None else values.stride()),
            *shared,
            D=d,
            DV=dv,
            HAS_CAP=softcap is not None,
            HAS_VALID=valid is not None,
            HAS_SCOPE=scope is not None,
            HAS_BIAS=bias is not None,
            HAS_OUTPUT=values is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=config.block_d,
            BLOCK_DV=config.block_dv,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        column_mass_kernel[triton.cdiv(t, config.block_n), b * hq](
            query,
            keys,
            weight,
            positions,
            first_row,
            *masks,
            bias,
            lse,
            mass,
            *query.stride(),
            *keys.stride(),
            *shared,
            D=d,
            STATISTIC=statistic,
            HAS_CAP=softcap is not None,
            HAS_VALID=valid is not None,
            HAS_SCOPE=scope is not None,
            HAS_BIAS=bias is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_D=config.block_d,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
    return mass, output
