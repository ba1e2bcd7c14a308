"""``weighted_decode``: the reference against a loop, the CPU path against the float64 reference."""

import math
from importlib import import_module

import pytest
import torch

from kvpress_prob.ops.append import append
from kvpress_prob.ops.weighted_decode import weighted_decode
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


@pytest.mark.parametrize("n", [2, 600, 1100])
@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_many_rows_in_blocks(threads, impl, n, monkeypatch):
    """Segments as long as the rows, longer, and shorter (whose first rows see nothing); the whole matrix at once in
    float64 is what to compare with."""
    store = random_store([n, n + 700, 2 * n, n // 2, 0, n + 1], batch=2, d=16)
    query = torch.randn(2, 6, n, 16)
    got = weighted_decode(query, store, scaling=0.3, return_lse=True, impl=impl)
    monkeypatch.setattr(import_module("kvpress_prob.ops.weighted_decode.reference"), "BLOCK_ELEMENTS", 2**40)
    want = weighted_decode(query.double(), in_double(store), scaling=0.3, return_lse=True, impl="reference")
    torch.testing.assert_close(got[0].double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-4, rtol=1e-5)
    assert (want[1] == -torch.inf).any()


@pytest.mark.parametrize("n", [5, 520])
def test_many_rows_with_hidden_entries(threads, n):
    """Padding of a batch of questions: rows that see the context but not each other, and a row that sees nothing."""
    store = random_store([900, n, 800, 2 * n], d=16, batch=2)
    for segment in range(4):
        log_w = store.segment(*divmod(segment, 2))[2]
        log_w[-n : -n + 3] = -torch.inf
        log_w[:100:2] = -torch.inf
    query = torch.randn(2, 4, n, 16)
    (output, lse), (want, want_lse) = both(query, store, scaling=0.25)
    torch.testing.assert_close(output.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-5)
    assert (want_lse[0, 2:, :3] == -torch.inf).all()
    assert torch.isfinite(want_lse[0, 2:, 3:]).all()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("n", [1, 5, 520])
def test_a_store_in_the_middle_of_larger_buffers(impl, n):
    """Scenario S52: offsets are added; a transposed buffer is refused."""
    store = random_store([700, 600], d=16)
    big = [torch.full((len(it) + 80, *it.shape[1:]), torch.nan) for it in (store.keys, store.values, store.log_w)]
    views = [it[50 : 50 + len(store.log_w)] for it in big]
    for view, it in zip(views, (store.keys, store.values, store.log_w), strict=True):
        view.copy_(it)
    inner = RaggedKV(*views, store.start, store.length.clone(), batch=1, room=store.room)
    query = torch.randn(1, 4, n, 16)
    want = weighted_decode(query, store, scaling=0.25, return_lse=True, impl=impl)
    got = weighted_decode(query, inner, scaling=0.25, return_lse=True, impl=impl)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    new = torch.randn(2, 1, 2, 3, 16)
    for it in (store, inner):
        append(it, new[0], new[1])
    torch.testing.assert_close(inner.keys, store.keys, equal_nan=True)
    assert all(it[:50].isnan().all() and it[50 + len(store.log_w) :].isnan().all() for it in big)
    transposed = RaggedKV(store.keys.T.contiguous().T, *views[1:], store.start, store.length, batch=1, room=store.room)
    with pytest.raises(ValueError, match=r"the store's keys must be contiguous, got strides \(1, \d+\)"):
        weighted_decode(query, transposed, scaling=0.25, impl=impl)
    with pytest.raises(ValueError, match="the store's keys must be contiguous"):
        append(transposed, new[0][:, :, :1], new[1][:, :, :1])


@pytest.mark.parametrize(("impl", "softcap"), [("cpu", None), ("reference", None), ("reference", 5.0)])
def test_a_long_question_makes_no_rows_by_entries_tensor(impl, softcap):
    """Scenario S41: 1,024 rows over 8,192 entries, 4 query heads a KV head: no tensor of rows by entries."""
    n, entries, d = 1024, 8192, 32
    store = random_store([entries] * 2, d=d)
    query = torch.randn(1, 8, n, d)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        weighted_decode(query, store, scaling=d**-0.5, softcap=softcap, impl=impl)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 10 * 2**20  # rows by entries in float32, of one segment: 128 MiB


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
