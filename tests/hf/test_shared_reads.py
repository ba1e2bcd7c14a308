"""What the layers of a cache ask of the device once for all of them."""

import copy
import pickle

import pytest
import torch

from kvpress_prob.hf.shared_reads import SharedReads


class Counting:
    """Counts how often a tensor was looked at."""

    def __init__(self):
        self.reads, self.looked = SharedReads(), 0

    def ask(self, layer, tensor, *key):
        def read():
            self.looked += 1
            return tensor.tolist()

        return self.reads.once("rows", layer, tensor, key, read)


LAYERS = [object() for _ in range(3)]


def test_one_tensor_is_looked_at_once_a_pass():
    counting, rows = Counting(), torch.tensor([1, 0])
    for step in range(3):
        for layer in LAYERS:
            assert counting.ask(layer, rows) == [1, 0]
        assert counting.looked == step + 1


def test_views_of_one_memory_are_one_tensor():
    counting, mask = Counting(), torch.arange(12).view(3, 4)
    for layer in LAYERS:
        assert counting.ask(layer, mask[1:]) == mask[1:].tolist()
    assert counting.looked == 1
    assert counting.ask(LAYERS[0], mask[:2]) == mask[:2].tolist()
    assert counting.ask(LAYERS[1], mask[1:, 1:]) == mask[1:, 1:].tolist()
    assert counting.looked == 3


def test_values_changed_between_passes_are_seen():
    counting, rows = Counting(), torch.tensor([1, 0])
    counting.ask(LAYERS[0], rows)
    rows[0] = 0
    assert counting.ask(LAYERS[0], rows) == [0, 0]


@pytest.mark.parametrize("inference", [False, True])
def test_another_tensor_at_the_same_address_is_another_tensor(inference):
    """Layers that were handed tensors of their own: the last one's is gone, and the next pass' stands where it was."""
    counting, memory = Counting(), bytearray(3 * 8)
    with torch.inference_mode(inference):
        first = torch.frombuffer(memory, dtype=torch.int64)
        assert counting.ask(LAYERS[2], first) == [0, 0, 0]
        del first
        second = torch.frombuffer(memory, dtype=torch.int64)
        second.fill_(7)
        assert counting.ask(LAYERS[0], second) == [7, 7, 7]


def test_copies_start_empty():
    counting = Counting()
    counting.ask(LAYERS[0], torch.tensor([1]))
    for other in (copy.deepcopy(counting.reads), pickle.loads(pickle.dumps(counting.reads))):
        assert not other._last


def test_repeated_rows_then_selected_ones():
    """Found by the fuzzing machine: every layer makes its own indices when rows are repeated."""
    from tests.helpers.compare import compress, press_of
    from tests.helpers.models import tiny_llama, tokens

    model = tiny_llama(layers=3)
    cache = compress(model, tokens(30, batch=3), press_of())
    for _ in range(20):
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([3, 4, 1, 2, 5, 5])
        cache.batch_select_indices(rows)
        alike = [cache.layers[0].store.length.view(6, -1)[row].tolist() for row in (4, 5)]
        assert alike[0] == alike[1]
        cache.batch_select_indices(torch.tensor([2, 0, 4]))
    lengths = {tuple(layer.padding) for layer in cache.layers}
    assert len(lengths) == 1
