"""The operations as torch operators: schemas, fake kernels, and models that are compiled around them."""

import pytest
import torch
from torch.library import opcheck
from transformers import DynamicCache

from kvpress_prob import MinVariancePress, ProbabilisticPress
from tests.helpers.models import tiny_llama, tokens
from tests.helpers.stores import random_store

OPERATORS = torch.ops.kvpress_prob
CHECKS = ("test_schema", "test_faketensor")


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_weighted_decode_operator(return_lse, softcap):
    store = random_store([4, 0, 9, 30], batch=2, d=16, dv=8)
    tensors = (torch.randn(2, 6, 3, 16), store.keys, store.values, store.log_w, store.start, store.length)
    opcheck(OPERATORS.weighted_decode, (*tensors, 0.25, softcap, return_lse, "auto"), test_utils=CHECKS)


def test_append_operator():
    """What it writes to is in its schema: nothing else changes, and nothing is returned."""
    store = random_store([4, 0, 9, 30], batch=2, d=16, dv=8)
    for buffer in (store.keys, store.values, store.log_w):
        buffer.nan_to_num_()  # opcheck compares before and after
    new = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 8)
    buffers = (store.keys, store.values, store.log_w, store.start, store.length)
    opcheck(OPERATORS.append, (*buffers, *new, "auto"), test_utils=CHECKS)


@pytest.mark.parametrize("with_values", [True, False])
def test_attention_mass_operator(with_values):
    query, keys, weights = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16), torch.rand(1, 5)
    values = torch.randn(1, 2, 9, 8) if with_values else None
    arguments = (query, keys, weights, torch.arange(4, 9), None, None, None, values, 0.25, None, "mean", "auto")
    opcheck(OPERATORS.attention_mass, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(("attn", "backend"), [("sdpa", "eager"), ("eager", "aot_eager")])
def test_decoding_compiles_to_one_graph_that_is_reused(attn, backend):
    """The whole model, no graph break. The first step is compiled for its sizes, the second for any size. Growth
    compiles once for a step that makes room and once for the larger buffers."""
    torch._dynamo.reset()
    model = tiny_llama(attn=attn)
    caches = DynamicCache(), DynamicCache()
    for cache in caches:
        with ProbabilisticPress(MinVariancePress(), 0.5, seed=0)(model):
            model(tokens(60), past_key_values=cache)
    graphs = 0

    def counting(graph, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model.forward, backend=counting, fullgraph=True)
    counts = []
    room = caches[0].layers[0].store.room
    for step in range(room + 6):
        ids, position = tokens(1, seed=step), torch.tensor([[60 + step]])
        got = compiled(ids, past_key_values=caches[0], position_ids=position).logits
        want = model(ids, past_key_values=caches[1], position_ids=position).logits
        torch.testing.assert_close(got, want)
        counts.append(graphs)
    assert counts[:room] == [1] + [2] * (room - 1)
    assert counts[-1] <= 4
    torch._dynamo.reset()
