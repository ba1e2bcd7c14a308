"""``attention_mass``: the reference against a loop, the blocked path against the reference, and what it allocates."""

import math

import pytest
import torch

from kvpress_prob.maths.proposals import row_prior
from kvpress_prob.maths.rows import sample_rows
from kvpress_prob.ops.attention_mass import STATISTICS, attention_mass


def inputs(b=1, hq=4, hkv=2, n=12, t=12, d=8, dv=8, dtype=torch.float64):
    query, keys = torch.randn(b, hq, n, d, dtype=dtype), torch.randn(b, hkv, t, d, dtype=dtype)
    weights = torch.rand(b, n, dtype=torch.float64)
    return query, keys, torch.randn(b, hkv, t, dv, dtype=dtype), weights / weights.sum(-1, keepdim=True)


def test_reference_is_its_equation():
    query, keys, values, weights = inputs(n=3, t=5)
    mass, output = attention_mass(query, keys, weights, scaling=0.3, values=values, softcap=1.5, impl="reference")
    for head in range(4):
        want = [0.0] * 5
        for row in range(3):
            seen = 5 - 3 + row + 1
            logits = [
                1.5 * math.tanh(0.3 * float(query[0, head, row] @ keys[0, head // 2, i]) / 1.5) for i in range(seen)
            ]
            total = sum(map(math.exp, logits))
            probability = [math.exp(logit) / total for logit in logits]
            want = [w + float(weights[0, row]) * p for w, p in zip(want, probability + [0.0] * (5 - seen), strict=True)]
            mean = sum(p * values[0, head // 2, i] for i, p in enumerate(probability))
            torch.testing.assert_close(output[0, head, row], mean)
        torch.testing.assert_close(mass[0, head], torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("hq", "hkv"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("n", "t"), [(1, 1), (1, 40), (300, 300), (257, 300)])
def test_blocked_equals_the_reference(statistic, softcap, hq, hkv, n, t):
    query, keys, values, weights = inputs(b=2, hq=hq, hkv=hkv, n=n, t=t, dv=5)
    kwargs = {"scaling": 0.5, "values": values, "softcap": softcap, "statistic": statistic}
    got = attention_mass(query, keys, weights, impl="blocked", **kwargs)
    want = attention_mass(query, keys, weights, impl="reference", **kwargs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_output_change_is_what_deleting_an_entry_does():
    query, keys, values, weights = inputs(hq=2, n=3, t=6)
    change, output = attention_mass(query, keys, weights, scaling=0.5, values=values, statistic="output_change")
    for head in range(2):
        for entry in range(6):
            want = 0.0
            for row in range(3):
                seen = [i for i in range(6 - 3 + row + 1) if i != entry]
                logits = 0.5 * keys[0, head, seen] @ query[0, head, row]
                without = torch.softmax(logits, 0) @ values[0, head, seen]
                want += float(weights[0, row] * (output[0, head, row] - without).norm())
            assert change[0, head, entry].item() == pytest.approx(want)


@pytest.mark.parametrize("statistic", [statistic for statistic in STATISTICS if statistic != "output_change"])
def test_scope_and_column_bias_equal_the_reference(statistic):
    query, keys, values, weights = inputs(b=2, hq=6, n=150, t=200)
    scope = torch.rand(200) < 0.5
    kwargs = {"scaling": 0.5, "statistic": statistic, "values": values, "scope": scope}
    kwargs["column_bias"] = torch.randn(2, 6, 200, dtype=torch.float64)
    got = attention_mass(query, keys, weights, impl="blocked", **kwargs)
    want = attention_mass(query, keys, weights, impl="reference", **kwargs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert (got[0][..., ~scope] == 0).all()


def test_scope_is_the_same_as_leaving_the_other_entries_out():
    query, keys, _, weights = inputs(n=5, t=60)
    scope = torch.zeros(60, dtype=torch.bool)
    scope[20:55] = True
    got, _ = attention_mass(query, keys, weights, scaling=0.5, scope=scope)
    want, _ = attention_mass(query, keys[:, :, 20:55], weights, scaling=0.5, positions=torch.full((5,), 34))
    torch.testing.assert_close(got[..., 20:55], want)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_padding_receives_nothing_and_changes_nothing(impl):
    query, keys, values, weights = inputs(b=2, n=40, t=40)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[1, :15] = False
    weights = row_prior("harmonic", valid)
    mass, output = attention_mass(query, keys, weights, scaling=0.5, valid=valid, values=values, impl=impl)
    assert (mass[1, :, :15] == 0).all()
    alone, alone_output = attention_mass(
        query[1:, :, 15:], keys[1:, :, 15:], weights[1:, 15:], scaling=0.5, values=values[1:, :, 15:], impl=impl
    )
    torch.testing.assert_close(mass[1:, :, 15:], alone)
    torch.testing.assert_close(output[1:, :, 15:], alone_output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_are_computed_in_float32(dtype):
    query, keys, _, weights = inputs(n=200, t=200, dtype=dtype)
    got, _ = attention_mass(query, keys, weights, scaling=0.5)
    want, _ = attention_mass(query.double(), keys.double(), weights, scaling=0.5, impl="reference")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.sum(-1), torch.ones(1, 4))


def test_chosen_rows_equal_the_same_rows_of_the_whole():
    query, keys, _, weights = inputs(n=100, t=100)
    rows, row_weights = sample_rows(weights, 20)
    got, _ = attention_mass(query[:, :, rows], keys, row_weights, scaling=0.5, positions=rows)
    masked = torch.zeros_like(weights)
    masked[:, rows] = row_weights
    want, _ = attention_mass(query, keys, masked, scaling=0.5, impl="reference")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("max_rows", "lengths"), [(64, (4096, 8192)), (None, (1024, 2048))])
def test_no_rows_by_entries_tensor_is_allocated(max_rows, lengths):
    """Scenario S23: 32 heads; the largest allocation grows linearly in t, of a few rows and of all rows."""
    largest = []
    for t in lengths:
        query, keys = torch.randn(1, 32, t, 8), torch.randn(1, 8, t, 8)
        weights = row_prior("harmonic", torch.ones(1, t, dtype=torch.bool))
        rows, row_weights = sample_rows(weights, max_rows) if max_rows else (torch.arange(t), weights)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            attention_mass(query[:, :, rows], keys, row_weights, scaling=0.3, positions=rows)
        largest.append(max(abs(event.self_cpu_memory_usage) for event in profile.events()))
    assert largest[1] < 32 * lengths[1] ** 2 * 4 / 4
    assert largest[1] <= 2.1 * largest[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(1, 3, 12, 8)}, r"keys must have shape \(1, a divisor of 4, t, 8\), got \(1, 3, 12, 8\)"),
        ({"row_weights": torch.ones(1, 5)}, r"row_weights must have shape \(1, 12\), got \(1, 5\)"),
        ({"valid": torch.ones(2, 12).bool()}, r"valid must have shape \(1, 12\), got \(2, 12\)"),
        ({"values": torch.randn(1, 2, 5, 8)}, r"values must have shape \(1, 2, 12\) x dv, got \(1, 2, 5, 8\)"),
        ({"scope": torch.ones(3).bool()}, r"scope must have shape \(12,\), got \(3,\)"),
        ({"column_bias": torch.zeros(1, 4, 3)}, r"column_bias must have shape \(1, 4, 12\), got \(1, 4, 3\)"),
        ({"statistic": "output_change"}, "statistic='output_change' needs values and no scope"),
        ({"statistic": "median"}, "statistic must be one of .*got 'median'"),
        ({"positions": torch.arange(3)}, r"positions must have shape \(12,\), got \(3,\)"),
        (
            {"keys": torch.randn(1, 2, 5, 8)},
            "positions must be given when there are more rows than entries, got 12 rows",
        ),
        (
            {"impl": "triton", "statistic": "output_change", "values": torch.randn(1, 2, 12, 8)},
            "impl='triton' has no statistic='output_change'",
        ),
        ({"impl": "fast"}, "impl must be one of .*got 'fast'"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    query, keys, _, weights = inputs(dtype=torch.float32)
    arguments = {"query": query, "keys": keys, "row_weights": weights, "scaling": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        attention_mass(**arguments)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_rows_without_weight_do_not_count_for_a_maximum(impl, generator):
    """Whatever they attend to: the maximum is over the other rows."""
    query = torch.randn(1, 4, 50, 16, generator=generator)
    keys = torch.randn(1, 2, 50, 16, generator=generator)
    weights = torch.ones(1, 50, dtype=torch.float64)
    weights[:, ::2] = 0
    rows = torch.arange(1, 50, 2)
    got, _ = attention_mass(query, keys, weights, scaling=1.0, statistic="max", impl=impl)
    want, _ = attention_mass(
        query[:, :, rows], keys, weights[:, rows], scaling=1.0, statistic="max", positions=rows, impl="reference"
    )
    torch.testing.assert_close(got, want)
