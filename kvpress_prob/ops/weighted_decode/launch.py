r"""How the ``weighted_decode`` kernels are launched: pure functions of shape, dtype and architecture.

*Tiles.* The segments' entries are cut into tiles of ``T`` entries, a power of two, and tile ``k`` of segment ``s`` gets
the slot::

    slot(s, k) = start_s // T + s + k,    k < ceil(length_s / T)

Segments are disjoint and in increasing order, so slots are, too: ``slot(s + 1, 0) - slot(s, 0)`` is at least
``ceil(capacity_s / T)``. Nothing has to be counted, summed or stored when lengths change. All slots lie below
``capacity // T + segments``, which only the growth of a buffer changes: the host launches that many programs without
asking the device for a length, a CUDA graph of a step stays valid while the store has room, and a slot without entries
costs one program that returns at once. So the work is that of the sum of the lengths, not of the longest head.

*Size of a tile.* A tile leaves a partial result that is written once and read once. ``T`` is large enough that this
costs at most ``PARTIAL_TRAFFIC`` of the tile's own bytes, and small enough for ``PROGRAMS_PER_MULTIPROCESSOR`` programs
on each multiprocessor, so that the last ones to finish do not leave the others idle for long; where the two disagree,
the first yields until every multiprocessor has one program.
"""

from dataclasses import dataclass

import torch

from kvpress_prob.ops.launching import (
    has_tensor_cores,
    head_block,
    next_power_of_two,
    previous_power_of_two,
    shared_memory,
)

PARTIAL_TRAFFIC = 0.05
PROGRAMS_PER_MULTIPROCESSOR = 8
MAX_TILE = 2**20
"""Keeps offsets within a tile in 32 bits."""


@dataclass(frozen=True)
class LaunchConfig:
    """Blocks of ``decode_tile_kernel``.

    Attributes
    ----------
    block_m : int
        Query rows of a program. More rows than this get further programs, which read the tile again.
    block_n : int
        Entries of one step of the online softmax.
    block_d, block_dv : int
        Widths of keys and values, rounded up to a power of two.
    num_warps, num_stages : int
        ``num_stages`` 3 keeps two blocks of keys and values in shared memory, one in use and one on its way.
    """

    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class MergeConfig:
    """Blocks of ``merge_tiles_kernel``: ``block_t`` partial results at a time."""

    block_t: int
    block_dv: int
    num_warps: int


def launch_config(rows: int, head_dim: int, value_dim: int, dtype: torch.dtype, arch: int) -> LaunchConfig:
    """Configuration for ``rows`` = group times query length rows a segment.

    Tensor cores take 16 rows or 64. Plain multiply-adds (float32, chips before 8.0) hold more in registers and get 16
    rows and 16 entries.
    """
    d, dv = head_block(head_dim), head_block(value_dim)
    wide = max(d, dv)
    if not has_tensor_cores(dtype, arch):
        return LaunchConfig(block_m=16, block_n=16, block_d=d, block_dv=dv, num_warps=4, num_stages=2)
    if rows <= 16:
        block_m, block_n, num_warps = 16, 64 if wide <= 128 else 32, 4
    else:
        block_m, block_n, num_warps = 64, 64 if wide <= 64 else 32, 4 if wide <= 128 else 8
    held = 3 * block_n * (d + dv) + block_m * d
    num_stages = 3 if held * dtype.itemsize < shared_memory(arch) else 2
    return LaunchConfig(block_m, block_n, d, dv, num_warps, num_stages)


def merge_config(value_dim: int) -> MergeConfig:
    """Configuration of the merge: 16 KiB of partial results at a time, and at most 64 of them."""
    dv = head_block(value_dim)
    return MergeConfig(block_t=min(4096 // dv, 64), block_dv=dv, num_warps=4)


def tile_size(
    config: LaunchConfig,
    capacity: int,
    rows: int,
    head_dim: int,
    value_dim: int,
    itemsize: int,
    multiprocessors: int,
) -> int:
    """Entries of a tile, a power of two and at least ``config.block_n``, for a store of ``capacity`` places."""
    entry_bytes = (head_dim + value_dim) * itemsize + 4
    partial_bytes = 2 * 4 * (value_dim + 1) * rows
    cheap = next_power_of_two(max(int(partial_bytes / (PARTIAL_TRAFFIC * entry_bytes)), 1))
    share = max(capacity * -(-rows // config.block_m) // multiprocessors, 1)
    even = previous_power_of_two(max(share // PROGRAMS_PER_MULTIPROCESSOR, 1))
    tile = min(max(cheap, even), previous_power_of_two(share))
    return min(max(tile, config.block_n), MAX_TILE)


def tile_slots(capacity: int, segments: int, tile: int) -> int:
    """Number of slots of all segments: a bound that holds for any lengths within the capacity."""
    return capacity // tile + segments
