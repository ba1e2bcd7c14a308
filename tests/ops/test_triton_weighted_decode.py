"""The Triton kernels of ``weighted_decode``: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch

from kvpress_prob.ops import availability
from kvpress_prob.ops.append import append
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV
from tests.helpers.accuracy import assert_as_accurate
from tests.helpers.stores import in_double, random_store

pytestmark = pytest.mark.usefixtures("kernels")
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 1000]
F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16


def check(query, store, **kwargs):
    """Output and lse against float64, no worse than the reference; returns both."""
    kwargs = {"scaling": query.shape[-1] ** -0.5, "return_lse": True, **kwargs}
    output, lse = weighted_decode(query, store, impl="triton", **kwargs)
    reference, reference_lse = weighted_decode(query, store, impl="reference", **kwargs)
    exact, exact_lse = weighted_decode(query.double(), in_double(store), impl="reference", **kwargs)
    assert_as_accurate(output, reference, exact, query.dtype)
    assert_as_accurate(lse, reference_lse, exact_lse, torch.float32)
    return output, lse


def query_for(store, group, n, head_dim):
    return torch.randn(store.batch, group * store.kv_heads, n, head_dim).to(store.keys)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "group", "n"),
    [
        (F32, 16, 16, 1, 1),
        (F32, 80, 80, 3, 1),
        (F32, 128, 64, 4, 1),
        (F32, 64, 64, 2, 9),
        (F16, 48, 48, 5, 1),
        (F16, 96, 96, 6, 1),
        (F16, 128, 128, 16, 1),
        (F16, 64, 128, 7, 5),
        (F16, 256, 256, 1, 1),
        (B16, 64, 64, 4, 1),
        (B16, 128, 128, 8, 1),
        (B16, 80, 80, 3, 3),
        (B16, 20, 36, 4, 16),
        (B16, 256, 256, 2, 9),
    ],
)
def test_equals_the_reference(device, dtype, head_dim, value_dim, group, n):
    store = random_store(LENGTHS, d=head_dim, dv=value_dim, dtype=dtype, device=device)
    check(query_for(store, group, n, head_dim), store)


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_few_long_tiles_or_more_tiles_than_blocks(device, dtype, multiprocessors, monkeypatch):
    monkeypatch.setattr(availability, "INTERPRETED_MULTIPROCESSORS", multiprocessors)
    store = random_store([300, 0, 17, 1], d=32, batch=2, dtype=dtype, device=device)
    check(query_for(store, 2, 1, 32), store)


@pytest.mark.parametrize("n", [1, 3])
def test_softcap(device, n):
    store = random_store([5, 200], d=64, device=device)
    query = 6 * query_for(store, 2, n, 64)
    check(query, store, scaling=1.0, softcap=20.0)


def test_more_rows_than_a_block(device):
    """64 rows fill the largest block; further rows are further programs."""
    store = random_store([150, 70], d=32, dtype=F16, device=device)
    check(query_for(store, 2, 50, 32), store)


def test_rows_before_the_first_entry_see_nothing(device):
    store = random_store([2, 0, 40], d=16, device=device)
    output, lse = check(query_for(store, 1, 4, 16), store)
    assert torch.equal(lse.isinf(), torch.tensor([[[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]], device=device).bool())
    assert not output[lse.isinf()].any()


def test_entries_of_weight_zero(device):
    """log_w = -inf hides an entry, a block of entries, or a whole segment."""
    store = random_store([70, 300, 40, 10], d=16, device=device)
    first, second, third, _ = store.start.tolist()
    store.log_w[first + 5] = -torch.inf
    store.log_w[second : second + 200] = -torch.inf
    store.log_w[third : third + 40] = -torch.inf
    output, lse = check(query_for(store, 2, 1, 16), store)
    assert lse.isinf()[0, 4:6].all()
    assert not output[0, 4:6].any()


@pytest.mark.parametrize("dtype", [F16, B16])
def test_large_logits_and_weights(device, dtype):
    """Queries and keys scaled by 30, weights from 0.01 to 10,000: the bias is scaled by log2(e) exactly once."""
    store = random_store([129, 64], d=64, dtype=dtype, device=device)
    store.keys.mul_(30)
    store.log_w.copy_(torch.linspace(-4.6, 9.2, len(store.log_w)))
    output, _ = check(30 * query_for(store, 4, 1, 64), store)
    assert output.isfinite().all()


def test_equal_logits_weigh_by_importance(device):
    store = random_store([3], d=16, device=device)
    store.keys.zero_()
    store.log_w[:3] = torch.tensor([0.01, 1.0, 100.0]).log()
    output, lse = weighted_decode(query_for(store, 1, 1, 16), store, scaling=1.0, return_lse=True, impl="triton")
    weights = torch.tensor([0.01, 1.0, 100.0], device=device)
    torch.testing.assert_close(output.flatten(), weights / weights.sum() @ store.values[:3])
    torch.testing.assert_close(lse.flatten(), weights.sum().log().unsqueeze(0))


def test_query_need_not_be_contiguous(device):
    store = random_store([30, 50], d=16, batch=2, device=device)
    query = torch.randn(2, 16, 3, 2, device=device).permute(0, 3, 2, 1)
    assert query.stride(-1) != 1
    check(query, store)


def test_result_is_the_same_every_time(device):
    store = random_store([500, 100], d=32, dtype=F16, device=device)
    query = query_for(store, 4, 1, 32)
    first, second = (weighted_decode(query, store, scaling=0.2, impl="triton")[0] for _ in range(2))
    assert torch.equal(first, second)


def test_buffer_of_more_than_2_31_elements(device):
    """Only the pages of the last segment are ever touched."""
    torch.use_deterministic_algorithms(False)
    d, dv, size = 256, 16, 100
    capacity = 2**31 // d + 2 * size
    options = {"dtype": F16, "device": device}
    store = RaggedKV(
        torch.empty(capacity, d, **options),
        torch.empty(capacity, dv, **options),
        torch.empty(capacity, device=device),
        start=torch.tensor([capacity - 2 * size], device=device),
        length=torch.tensor([0], device=device),
        batch=1,
        room=2 * size,
    )
    keys, values = torch.randn(1, 1, size, d).to(**options), torch.randn(1, 1, size, dv).to(**options)
    append(store, keys, values, impl="triton")
    kept, log_w = torch.ones(1, 1, size, dtype=torch.bool, device=device), torch.zeros(1, 1, size, device=device)
    small = RaggedKV.pack(keys, values, kept, log_w)
    query = query_for(store, 2, 1, d)
    got, want = (weighted_decode(query, s, scaling=0.1, impl="triton")[0] for s in (store, small))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_step_asks_the_device_for_nothing(device, monkeypatch):
    """So it can be captured in a CUDA graph."""
    store = random_store([40, 100], d=16, dtype=F16, device=device)
    query, new = query_for(store, 2, 1, 16), torch.randn(1, 2, 1, 16, device=device).half()

    def fail(*_):
        raise AssertionError("a tensor's value was read on the host")

    for name in ("tolist", "item", "__int__", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, fail)
    append(store, new, new, impl="triton")
    weighted_decode(query, store, scaling=0.25, impl="triton")
    with pytest.raises(AssertionError, match="read on the host"):
        weighted_decode(query, store, scaling=0.25, impl="reference")
