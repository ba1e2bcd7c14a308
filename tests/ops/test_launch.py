"""Launch configurations and the tile arithmetic of ``weighted_decode``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.ops.launching import SHARED_MEMORY, shared_memory
from kvpress_prob.ops.weighted_decode.launch import launch_config, tile_size, tile_slots

B16 = torch.bfloat16


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), min_size=1, max_size=20),
    st.sampled_from([16, 32, 64, 256]),
)
def test_slots_of_segments_are_disjoint_and_bounded(segments, tile):
    """slot(s, k) = start // tile + s + k, for any lengths within the segments' capacities."""
    used, start = [], 0
    for index, (length, room) in enumerate(segments):
        used += [start // tile + index + k for k in range(-(-length // tile))]
        start += length + room
    assert used == sorted(set(used))
    assert all(slot < tile_slots(start, len(segments), tile) for slot in used)


def tile_of(capacity, rows=4, multiprocessors=132, dtype=B16):
    config = launch_config(rows, 128, 128, dtype, 90)
    return tile_size(config, capacity, rows, 128, 128, dtype.itemsize, multiprocessors)


@given(st.integers(1, 10**9), st.integers(1, 4096), st.integers(1, 200))
def test_tile_sizes_are_powers_of_two_of_whole_blocks(capacity, rows, multiprocessors):
    tile = tile_of(capacity, rows, multiprocessors)
    assert tile & (tile - 1) == 0
    assert tile % launch_config(rows, 128, 128, B16, 90).block_n == 0
    assert tile <= 2**20


@pytest.mark.parametrize(("megabytes", "most"), [(13, 0.07), (30, 0.05), (500, 0.02), (2000, 0.005), (3.4, 0.14)])
def test_bytes_of_partial_results(megabytes, most):
    """What the note on bytes in the operation's docstring says."""
    capacity = int(megabytes * 1e6 / 516)
    assert tile_slots(capacity, 8, tile_of(capacity)) * 4 * 129 * 4 * 2 <= most * capacity * 516


@pytest.mark.parametrize("capacity", [8 * 2**14, 64 * 2**14, 64 * 2**16])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_tiles_of_a_large_store(capacity, rows):
    """Every multiprocessor has a program, and partial results cost at most the stated share of the store's bytes
    unless that would leave one idle."""
    tile = tile_of(capacity, rows)
    assert capacity // tile >= 132
    partials = (capacity // tile) * rows * 129 * 4 * 2
    assert partials <= 0.05 * capacity * 516 or capacity // (2 * tile) < 132


def test_small_stores_are_cut_into_single_blocks():
    assert tile_of(64) == tile_of(6000) == 64


@pytest.mark.parametrize("arch", [*SHARED_MEMORY, 999])
def test_every_architecture_has_a_configuration(arch):
    dtype = torch.float16 if arch < 80 else B16
    for width in (16, 64, 128, 256):
        for rows in (1, 16, 17, 4096):
            config = launch_config(rows, width, width, dtype, arch)
            # One stage of keys and values and the queries have to fit at the very least.
            held = config.block_n * (config.block_d + config.block_dv) + config.block_m * config.block_d
            assert held * dtype.itemsize < shared_memory(arch)
