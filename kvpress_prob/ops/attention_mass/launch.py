"""How the ``attention_mass`` kernels are launched: pure functions of shape, dtype and architecture."""

from dataclasses import dataclass

import torch

from kvpress_prob.ops.launching import has_tensor_cores, head_block, shared_memory

FEW_ROWS = 1024
"""Up to here smaller blocks of rows, so that a subset of a long prefill's rows still keeps every multiprocessor
busy."""


@dataclass(frozen=True)
class LaunchConfig:
    """Blocks of both passes.

    Attributes
    ----------
    block_m : int
        Query rows of a block.
    block_n : int
        Entries of a block.
    block_d, block_dv : int
        Widths of keys and values, rounded up to a power of two.
    num_warps, num_stages : int
    """

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int


def launch_config(n: int, head_dim: int, value_dim: int, dtype: torch.dtype, arch: int) -> LaunchConfig:
    """Configuration for ``n`` query rows; plain multiply-adds (float32, chips before 8.0) hold more in registers and
    get the smallest blocks."""
    d, dv = head_block(head_dim), head_block(value_dim)
    if not has_tensor_cores(dtype, arch):
        return LaunchConfig(block_m=16, block_n=16, block_d=d, block_dv=dv, num_warps=4, num_stages=2)
    if dv > 64:  # a wide output and its rows fill the registers
        block_m, num_warps = 64, 8
    else:
        block_m, num_warps = (64, 4) if n <= FEW_ROWS else (128, 8)
    block_n = 64 if dv <= 128 else 32
    held = 3 * block_n * (d + dv) + block_m * d
    num_stages = 3 if held * dtype.itemsize < shared_memory(arch) else 2
    return LaunchConfig(block_m, block_n, d, dv, num_warps, num_stages)
