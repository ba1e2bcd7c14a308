"""The gate before every measurement: kernels against the float64 reference, on fresh random inputs."""

from copy import deepcopy
from dataclasses import dataclass, replace

import torch

import benchmarks.standalone  # noqa: F401  (before the package)
from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV
from tests.helpers.accuracy import assert_as_accurate
from tests.helpers.stores import in_double, random_store

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 1000]


@dataclass(frozen=True)
class Case:
    """One shape of ``weighted_decode``."""

    dtype: torch.dtype
    lengths: list[int]
    d: int
    dv: int
    group: int
    n: int = 1
    softcap: float | None = None


def decode_cases(smoke: bool) -> list[Case]:
    """bfloat16 is left out under the interpreter, which cannot multiply it."""
    if smoke:
        return [Case(torch.float32, [0, 1, 70], 16, 16, 2), Case(torch.float16, [5, 130], 32, 16, 3, n=2)]
    cases = [Case(dtype, LENGTHS, 64, 64, 4) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    base = replace(cases[-1], d=128, dv=128)
    cases += [replace(base, group=group) for group in (1, 3, 5, 7, 16)]
    cases += [replace(base, d=d, dv=dv) for d, dv in ((16, 16), (80, 80), (96, 64), (256, 256))]
    cases += [replace(base, n=n) for n in (2, 16, 50)]
    cases += [replace(base, softcap=30.0), replace(base, lengths=[10, 30_000, 4_000, 0])]
    cases += [Case(torch.float32, LENGTHS, 256, 256, 2, n=3)]
    return cases


def check_decode(case: Case, device: torch.device) -> None:
    """Output and log-sum-exp, with NaN behind every segment's end."""
    store = random_store(case.lengths, d=case.d, dv=case.dv, dtype=case.dtype, device=str(device))
    query = torch.randn(1, case.group * len(case.lengths), case.n, case.d, device=device).to(case.dtype)
    options = {"scaling": case.d**-0.5, "softcap": case.softcap, "return_lse": True}
    got = weighted_decode(query, store, impl="triton", **options)
    reference = weighted_decode(query, store, impl="reference", **options)
    exact = weighted_decode(query.double(), in_double(store), impl="reference", **options)
    for results, dtype in zip(zip(got, reference, exact, strict=True), (case.dtype, torch.float32), strict=True):
        assert_as_accurate(*results, dtype)  # pyright: ignore[reportArgumentType]  (the lse was asked for)


def check_append(dtype: torch.dtype, device: torch.device) -> None:
    """Bit for bit over the whole buffers."""
    store = random_store([3, 0, 64, 17], batch=2, d=80, dv=48, dtype=dtype, device=str(device), room=20)
    want = deepcopy(store)
    keys, values = (torch.randn(2, 7, 2, width, device=device).to(dtype).transpose(1, 2) for width in (80, 48))
    append(store, keys, values, impl="triton")
    append(want, keys, values, impl="reference")
    for name in ("keys", "values", "log_w", "start", "length"):
        torch.testing.assert_close(getattr(store, name), getattr(want, name), rtol=0, atol=0, equal_nan=True)


def check_mass(dtype: torch.dtype, t: int, d: int, statistic: str, device: torch.device) -> None:
    """With padding, a subset of rows, a scope, a bias, a softcap and the output."""
    rows = torch.arange(t % 3, t, 3, device=device)
    query = torch.randn(2, 6, len(rows), d, device=device).to(dtype)
    keys, values = (torch.randn(2, 2, t, d, device=device).to(dtype) for _ in range(2))
    valid = torch.ones(2, t, dtype=torch.bool, device=device)
    valid[1, : t // 4] = False
    bias = torch.randn(2, 6, t, device=device)
    options = {
        "scaling": d**-0.5,
        "positions": rows,
        "valid": valid,
        "scope": torch.arange(t, device=device) < t // 2,
        "softcap": 30.0,
        "statistic": statistic,
    }
    weights = torch.rand(2, len(rows), device=device) * valid[:, rows]
    inputs = query, keys, weights
    got = attention_mass(*inputs, values=values, column_bias=bias, impl="triton", **options)
    reference = attention_mass(*inputs, values=values, column_bias=bias, impl="reference", **options)
    wide = (tensor.double() for tensor in inputs)
    exact = attention_mass(*wide, values=values.double(), column_bias=bias.double(), impl="reference", **options)
    # A probability is the exponential of a logit minus a log-sum-exp of some ten units, each rounded.
    assert_as_accurate(got[0], reference[0], exact[0], torch.float32, roundings=16)
    assert_as_accurate(got[1], reference[1], exact[1], dtype)  # pyright: ignore[reportArgumentType]  (values were given)


def check_graph(device: torch.device) -> None:
    """A captured step, replayed while lengths advance, against plain calls."""
    store = random_store([100, 5000, 1], d=128, dtype=torch.bfloat16, device=str(device), room=8)
    plain = deepcopy(store)
    query = torch.randn(1, 12, 1, 128, dtype=torch.bfloat16, device=device)
    new = torch.randn(1, 3, 1, 128, dtype=torch.bfloat16, device=device)

    def step(target: RaggedKV) -> torch.Tensor:
        append(target, new, new, impl="triton")
        return weighted_decode(query, target, scaling=0.1, impl="triton")[0]

    step(deepcopy(store))  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(store)
    for _ in range(5):
        query.normal_()
        new.normal_()
        graph.replay()
        torch.testing.assert_close(output, step(plain), rtol=0, atol=0)


def check_all(device: torch.device, smoke: bool) -> int:
    """Raise at the first kernel that is wrong; returns the number of checks."""
    dtypes = [torch.float32, torch.float16] + ([] if smoke else [torch.bfloat16])
    cases = decode_cases(smoke)
    for case in cases:
        check_decode(case, device)
    for dtype in dtypes:
        check_append(dtype, device)
    masses = [
        (dtype, t, d, statistic)
        for statistic in ("mean", "max")
        for dtype, t, d in ([(torch.float16, 40, 16)] if smoke else [(dtype, 500, 128) for dtype in dtypes])
    ]
    for dtype, t, d, statistic in masses:
        check_mass(dtype, t, d, statistic, device)
    if device.type == "cuda":
        check_graph(device)
    return len(cases) + len(dtypes) + len(masses) + (device.type == "cuda")
