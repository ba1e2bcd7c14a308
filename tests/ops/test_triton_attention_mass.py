"""The Triton kernels of ``attention_mass``."""

import pytest
import torch

from kvpress_prob.ops.attention_mass import attention_mass
from tests.helpers.accuracy import assert_as_accurate

pytestmark = pytest.mark.usefixtures("kernels")
F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16


def check(query, keys, weights, **kwargs):
    values = kwargs.pop("values", None)
    kwargs = {"scaling": query.shape[-1] ** -0.5, **kwargs}
    wide = None if values is None else values.double()
    in_double = {name: value.double() if name == "column_bias" else value for name, value in kwargs.items()}
    mass, output = attention_mass(query, keys, weights, values=values, impl="triton", **kwargs)
    reference, reference_output = attention_mass(query, keys, weights, values=values, impl="reference", **kwargs)
    exact, exact_output = attention_mass(
        query.double(), keys.double(), weights.double(), values=wide, impl="reference", **in_double
    )
    # A probability is the exponential of a logit minus a log-sum-exp of some ten units, each rounded.
    assert_as_accurate(mass, reference, exact, torch.float32, roundings=16)
    if values is None:
        assert output is None
    else:
        assert_as_accurate(output, reference_output, exact_output, query.dtype)
    return mass


def normal(*shape, device, dtype=F32):
    return torch.randn(*shape).to(device, dtype)


@pytest.mark.parametrize("statistic", ["mean", "max"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "t"), [(F32, 16, 2, 40), (F16, 80, 3, 130), (B16, 64, 1, 65), (B16, 256, 2, 20)]
)
def test_equals_the_reference(device, dtype, head_dim, group, t, statistic):
    query, keys = (normal(1, heads, t, head_dim, device=device, dtype=dtype) for heads in (2 * group, 2))
    check(query, keys, torch.rand(1, t, device=device), statistic=statistic)


@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_subset_of_rows_padding_and_output(device, statistic):
    """Rows of weight 0 do not count; a padding row sees itself alone; values may have another width."""
    t, rows = 100, torch.tensor([2, 30, 31, 70, 99], device=device)
    query = normal(2, 4, 5, 32, device=device, dtype=F16)
    keys, values = (normal(2, 2, t, width, device=device, dtype=F16) for width in (32, 48))
    valid = torch.ones(2, t, dtype=torch.bool, device=device)
    valid[1, :40] = False
    weights = torch.rand(2, 5, device=device) * valid[:, rows]
    mass = check(query, keys, weights, positions=rows, valid=valid, values=values, softcap=10.0, statistic=statistic)
    assert not mass[1, :, :40].any()
    assert mass[1, :, 40:].any(-1).all()


@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_scope_and_bias(device, statistic):
    """The statistic is about the entries in scope, the output about all; rows that see none of them count for
    nothing."""
    query, keys = normal(1, 4, 90, 16, device=device), normal(1, 2, 90, 16, device=device)
    scope = (torch.arange(90, device=device) >= 20) & (torch.arange(90, device=device) < 60)
    bias = normal(1, 4, 90, device=device)
    bias[0, :, 30] = -torch.inf
    weights = torch.rand(1, 90, device=device)
    mass = check(query, keys, weights, scope=scope, column_bias=bias, values=keys, statistic=statistic)
    assert not mass[..., ~scope].any()
    assert not mass[..., 30].any()
    if statistic == "mean":
        torch.testing.assert_close(mass.sum(-1), weights[:, 20:].sum(-1, keepdim=True).expand(1, 4))


@pytest.mark.parametrize("dtype", [F32, B16])
def test_one_row(device, dtype):
    query, keys = normal(1, 2, 1, 16, device=device, dtype=dtype), normal(1, 2, 90, 16, device=device, dtype=dtype)
    mass = check(query, keys, torch.ones(1, 1, device=device))
    torch.testing.assert_close(mass.sum(-1), torch.ones(1, 2, device=device))


def test_tensors_need_not_be_contiguous(device):
    query, keys = (
        normal(1, 30, 4, 16, device=device).transpose(1, 2),
        normal(1, 30, 16, 2, device=device).mT.transpose(1, 2),
    )
    assert keys.shape == (1, 2, 30, 16)
    check(query, keys, torch.rand(1, 30, device=device), values=keys)


def test_result_is_the_same_every_time(device):
    query, keys = (normal(1, 2, 200, 16, device=device, dtype=F16) for _ in range(2))
    weights = torch.rand(1, 200, device=device)
    first, second = (attention_mass(query, keys, weights, scaling=0.3, impl="triton")[0] for _ in range(2))
    assert torch.equal(first, second)
