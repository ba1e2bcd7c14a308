"""``weighted_decode``: the reference against a loop, the CPU path against the float64 reference."""

import math

import pytest
import torch

from kvpress_prob.ops import append, weighted_decode
from kvpress_prob.ragged import RaggedKV
from tests.helpers.stores import in_double, random_store


def both(query, store, **kwargs):
    """The CPU path's result and the float64 reference's."""
    got = weighted_decode(query, store, return_lse=True, impl="cpu", **kwargs)
    want = weighted_decode(query.double(), in_double(store), return_lse=True, impl="reference", **kwargs)
    return got, want


def test_reference_is_its_equation():
    store = random_store([4, 6], d=3, dv=2)
    query = torch.randn(1, 4, 2, 3)
    output, lse = weighted_decode(query, store, scaling=0.7, softcap=2.0, return_lse=True, impl="reference")
    for head in range(4):
        keys, values, log_w = store.segment(0, head // 2)
        for row in range(2):
            total, mean = 0.0, torch.zeros(2)
            for i in range(len(keys) - (1 - row)):
                logit = 0.7 * float(query[0, head, row] @ keys[i])
                weight = math.exp(2.0 * math.tanh(logit / 2.0) + float(log_w[i]))
                total, mean = total + weight, mean + weight * values[i]
            torch.testing.assert_close(output[0, head, row], mean / total)
            assert lse[0, head, row].item() == pytest.approx(math.log(total), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("n", [1, 7])
def test_cpu_path_equals_the_reference(dtype, d, group, n):
    lengths = [length for length in (0, 1, 15, 64, 65, 1000, 301, 2) if n == 1 or length >= n] or [n]
    lengths = lengths[: len(lengths) // 2 * 2]
    store = random_store(lengths, batch=2, d=d, dtype=dtype)
    query = torch.randn(2, len(lengths) // 2 * group, n, d, dtype=dtype)
    (output, lse), (want, want_lse) = both(query, store, scaling=d**-0.5)
    assert output.dtype == dtype
    tolerance = (20 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 7])
def test_cpu_path_splits_segments_over_threads(threads, n):
    store = random_store([max(length, n) for length in (0, 1, 2, 15, 64, 65, 301, 1000)], batch=2, d=48)
    (output, lse), (want, want_lse) = both(torch.randn(2, 12, n, 48), store, scaling=0.2)
    torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)


def test_empty_segments_give_zero_and_minus_infinity(threads):
    """Scenario S8."""
    store = random_store([0, 3, 0, 300], batch=2, d=16)
    query = torch.randn(2, 4, 1, 16)
    for impl in ("cpu", "reference"):
        output, lse = weighted_decode(query, store, scaling=0.25, return_lse=True, impl=impl)
        for row in range(2):
            assert (output[row, :2] == 0).all()
            assert (lse[row, :2] == -torch.inf).all()
        assert torch.isfinite(output).all()
        assert torch.isfinite(lse[:, 2:]).all()


@pytest.mark.parametrize("length", [3, 40, 1000])
@pytest.mark.parametrize("hidden", ["newest", "all", "half"])
def test_weights_of_zero_hide_entries(threads, length, hidden):
    store = random_store([length, length], d=16)
    log_w = store.segment(0, 1)[2]
    log_w[{"newest": slice(-2, None), "all": slice(None), "half": slice(0, None, 2)}[hidden]] = -torch.inf
    (output, lse), (want, want_lse) = both(torch.randn(1, 2, 1, 16), store, scaling=0.25)
    torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(output).all()
    assert (lse[0, 1] == -torch.inf).all() == (hidden == "all")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_logits_and_weights_stay_finite(dtype):
    """Scenario S5: q and k scaled by 30, weights from 1 to 1e4."""
    store = random_store([500, 37], d=64, dtype=dtype, scale=30.0)
    for head in range(2):
        log_w = store.segment(0, head)[2]
        log_w.copy_(torch.linspace(0, math.log(1e4), len(log_w)))
    query = 30 * torch.randn(1, 4, 1, 64, dtype=dtype)
    (output, _), (want, _) = both(query, store, scaling=0.125)
    assert torch.isfinite(output).all()
    torch.testing.assert_close(output.double(), want, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
def test_the_bias_counts_once(weight):
    """Scenario S10: a weight w on one entry is the same as w copies of it."""
    store = random_store([2], d=16)
    store.log_w[:2] = torch.tensor([math.log(weight), 0.0])
    query = torch.randn(1, 1, 1, 16)
    logits = 0.25 * query[0, 0] @ store.keys[:2].T
    share = weight * logits[0, 0].exp() / (weight * logits[0, 0].exp() + logits[0, 1].exp())
    want = share * store.values[0] + (1 - share) * store.values[1]
    for impl in ("cpu", "reference"):
        got, lse = weighted_decode(query, store, scaling=0.25, return_lse=True, impl=impl)
        torch.testing.assert_close(got[0, 0, 0], want)
        natural = torch.log(weight * logits[0, 0].exp() + logits[0, 1].exp())
        torch.testing.assert_close(lse[0, 0, 0], natural)


def test_queries_need_not_be_contiguous():
    store = random_store([50, 60], d=16)
    query = torch.randn(1, 3, 4, 16).transpose(1, 2)
    got = weighted_decode(query, store, scaling=0.25)[0]
    torch.testing.assert_close(got, weighted_decode(query.contiguous(), store, scaling=0.25)[0])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_buffer_of_more_than_2_31_elements(impl):
    """Scenario S28: the last segment ends with the buffer; only its pages are ever touched."""
    d, size = 256, 50
    capacity = 2**31 // d + 2 * size
    buffers = [torch.empty(capacity, *width, dtype=torch.float16) for width in ((d,), (d,))]
    begin, length = torch.tensor([capacity - size]), torch.tensor([size - 1])
    store = RaggedKV(*buffers, torch.empty(capacity), start=begin, length=length, batch=1, room=1)
    small = random_store([size - 1], d=d, dtype=torch.float16)
    for view, source in zip(store.segment(0, 0), small.segment(0, 0), strict=True):
        view.copy_(source)
    new, query = torch.randn(2, 1, 1, 1, d).half(), torch.randn(1, 3, 1, d).half()
    for it in (store, small):
        append(it, new[0], new[1])
    got, want = (weighted_decode(query, it, scaling=0.1, impl=impl)[0] for it in (store, small))
    assert torch.equal(got, want)


def test_cpu_path_copies_nothing_of_the_store():
    store = random_store([20_000] * 4, d=64)
    query = torch.randn(1, 8, 1, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        weighted_decode(query, store, scaling=0.125)
    largest = max(event.cpu_memory_usage for event in profile.key_averages())
    assert largest < store.nbytes / 20


@pytest.mark.parametrize(
    ("query", "kwargs", "message"),
    [
        (torch.randn(2, 4, 1, 16), {}, r"query must have shape \(1, a multiple of 2, n, 16\), got \(2, 4, 1, 16\)"),
        (torch.randn(1, 3, 1, 16), {}, r"query must have shape \(1, a multiple of 2, n, 16\), got \(1, 3, 1, 16\)"),
        (torch.randn(1, 4, 1, 16).half(), {}, "query must be torch.float32 on cpu, got torch.float16"),
        (torch.randn(1, 4, 1, 16), {"impl": "gpu"}, "impl must be one of .*got 'gpu'"),
        (torch.randn(1, 4, 1, 16), {"impl": "cpu", "softcap": 3.0}, "impl='cpu' needs softcap=None, got 3.0"),
    ],
)
def test_refuses_what_does_not_fit(query, kwargs, message):
    with pytest.raises(ValueError, match=message):
        weighted_decode(query, random_store([4, 4], d=16), scaling=0.25, **kwargs)


def test_values_of_another_width_take_the_reference():
    store = random_store([40, 30], d=16, dv=8)
    query = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match="impl='cpu' needs keys and values of one width, got 16 and 8"):
        weighted_decode(query, store, scaling=0.25, impl="cpu")
    assert weighted_decode(query, store, scaling=0.25)[0].shape == (1, 2, 1, 8)
