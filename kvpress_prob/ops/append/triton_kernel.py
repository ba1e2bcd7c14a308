"""``append`` in Triton: one launch, one program a segment."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpress_prob.ops.append.launch import launch_config


@triton.jit
def append_kernel(
    keys_ptr,
    values_ptr,
    log_w_ptr,
    start_ptr,
    length_ptr,
    new_keys_ptr,
    new_values_ptr,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    kv_heads,
    n,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    segment = tl.program_id(0).to(tl.int64)
    row = segment // kv_heads
    head = segment % kv_heads
    length = tl.load(length_ptr + segment)
    first = tl.load(start_ptr + segment) + length
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    new_keys_ptr += row * stride_kb + head * stride_kh
    new_values_ptr += row * stride_vb + head * stride_vh
    for base in range(0, n, BLOCK_N):
        j = (base + tl.arange(0, BLOCK_N)).to(tl.int64)
        place = first + j
        mask_k = (j < n)[:, None] & (offs_d < D)[None, :]
        mask_v = (j < n)[:, None] & (offs_dv < DV)[None, :]
        k = tl.load(new_keys_ptr + j[:, None] * stride_kn + offs_d[None, :] * stride_kd, mask=mask_k, other=0.0)
        v = tl.load(new_values_ptr + j[:, None] * stride_vn + offs_dv[None, :] * stride_vd, mask=mask_v, other=0.0)
        tl.store(keys_ptr + place[:, None] * D + offs_d[None, :], k, mask=mask_k)
        tl.store(values_ptr + place[:, None] * DV + offs_dv[None, :], v, mask=mask_v)
        tl.store(log_w_ptr + place, tl.zeros([BLOCK_N], tl.float32), mask=j < n)
    # Every warp of the program has read the length before one of them writes it.
    tl.debug_barrier()
    tl.store(length_ptr + segment, length + n)


def append_triton(
    keys: Tensor, values: Tensor, log_w: Tensor, start: Tensor, length: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    """See ``append``; arguments are already checked."""
    n, d, dv = new_keys.shape[2], keys.shape[1], values.shape[1]
    config = launch_config(n, d, dv)
    with torch.cuda.device_of(keys):
        append_kernel[(len(start),)](
            keys,
            values,
            log_w,
            start,
            length,
            new_keys,
            new_values,
            *new_keys.stride(),
            *new_values.stride(),
            new_keys.shape[1],
            n,
            D=d,
            DV=dv,
            BLOCK_N=config.block_n,
            BLOCK_D=config.block_d,
            BLOCK_DV=config.block_dv,
            num_warps=config.num_warps,
            enable_fp_fusion=True,
        )
