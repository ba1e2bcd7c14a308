"""What the operations' launch configurations share: limits of the chips and rounding."""

import torch

KIB = 1024
SHARED_MEMORY = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory that one block of threads can have, in KiB, by architecture (CUDA C programming guide, table of
technical specifications per compute capability)."""
UNKNOWN_SHARED_MEMORY = 99
"""The least of all chips from 8.0 on."""


def shared_memory(arch: int) -> int:
    """Bytes of shared memory that one block of threads can have."""
    return SHARED_MEMORY.get(arch, UNKNOWN_SHARED_MEMORY) * KIB


def has_tensor_cores(dtype: torch.dtype, arch: int) -> bool:
    """Whether Triton multiplies this dtype on tensor cores without losing digits; float32 and chips before 8.0 use
    plain multiply-adds, which need smaller blocks."""
    return arch >= 80 and dtype != torch.float32


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def previous_power_of_two(n: int) -> int:
    """Largest power of two <= n, for n >= 1."""
    return 1 << (n.bit_length() - 1)


def head_block(dim: int) -> int:
    """Block that holds a row of keys or values: a power of two, at least 32, so that no block of rows is too small for
    16-byte loads by every thread."""
    return max(next_power_of_two(dim), 32)
