"""Waiting for the host: what is counted, and that it stays where it is."""

import pytest
import torch

from benchmarks.host_waits import PRESSES, counted, decoding, prefill, reordering
from kvpress_prob.ragged import RaggedKV
from tests.helpers.stores import random_store

BEFORE = {("sdpa", 1, 0): 4, ("eager", 1, 0): 35, ("sdpa", 2, 5): 29, ("eager", 2, 5): 35}
"""Operations a layer and token when a mask was checked in every layer."""
LAYERS = 3


def a_layer(few, many, at="running"):
    """Reads and operations that each further layer adds."""
    return (many.reads[at] - few.reads[at]) / LAYERS, (many.operations[at] - few.operations[at]) / LAYERS


def test_reads_of_the_package_are_seen():
    """One that is an operator, one that never becomes one, one on the host's own tensors, one of somebody else."""
    store, kept = random_store([5, 6]), torch.ones(1, 2, 4, dtype=torch.bool)
    with counted() as counts:
        store.aligned()  # int(length.max())
    assert (sum(counts.reads.values()), len(counts.where)) == (1, 1)
    with counted() as counts:
        RaggedKV.pack(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 3), kept, torch.zeros(1, 2, 4))  # .tolist()
    assert sum(counts.reads.values()) == 1
    with counted() as counts:
        RaggedKV.pack(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 3), kept, torch.zeros(1, 2, 4), lengths=[4, 4])
        kept.all().item()
        kept.nonzero()
    assert sum(counts.reads.values()) == 0
    assert sum(counts.operations.values()) > 5
    with counted() as counts:
        store.entries()  # repeat_interleave without a size
    assert sum(counts.reads.values()) == 1


@pytest.mark.parametrize("way", BEFORE, ids=str)
def test_a_token_waits_for_nothing_in_any_layer(way):
    """A mask is read once a forward pass, and a layer is two operators."""
    few, many = decoding(LAYERS, *way), decoding(2 * LAYERS, *way)
    assert few.reads["running"] <= 1
    reads, operations = a_layer(few, many)
    assert reads == 0
    assert operations <= BEFORE[way] / 2


@pytest.mark.parametrize("padded", [0, 7])
@pytest.mark.parametrize("name", PRESSES)
def test_a_prefill_waits_in_no_layer_and_a_dozen_times_at_its_end(name, padded):
    batch = 2 if padded else 1
    prefill(LAYERS, PRESSES[name], batch=batch, padded=padded)  # rows of this length are chosen once
    few, many = (prefill(n, PRESSES[name], batch=batch, padded=padded) for n in (LAYERS, 2 * LAYERS))
    assert a_layer(few, many)[0] == 0
    after = "after the prefill"
    assert few.reads[after] == many.reads[after] <= 12


def test_few_rows_cost_a_layer_no_more_operations_than_all():
    counts = {}
    for name in ("all rows", "max_rows=64"):
        prefill(LAYERS, PRESSES[name])
        counts[name] = a_layer(prefill(LAYERS, PRESSES[name]), prefill(2 * LAYERS, PRESSES[name]))[1]
    assert counts["max_rows=64"] <= counts["all rows"] + 2


def test_beams_are_read_once_and_gathered():
    few, many = reordering(LAYERS), reordering(2 * LAYERS)
    assert few.reads["running"] == many.reads["running"] == 1
    assert a_layer(few, many)[1] <= 20
