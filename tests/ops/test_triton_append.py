"""The Triton kernel of ``append``."""

import pytest
import torch

from kvpress_prob.ops.append import append
from tests.helpers.stores import random_store

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "head_dim", "value_dim"), [(1, 16, 16), (2, 80, 48), (17, 24, 64)])
def test_writes_what_the_reference_writes_and_nothing_else(device, dtype, n, head_dim, value_dim):
    """Bit for bit over the whole buffers, NaN slack included."""
    stores = []
    for impl in ("triton", "reference"):
        torch.manual_seed(1)
        store = random_store([0, 3, 64, 17], d=head_dim, dv=value_dim, batch=2, dtype=dtype, device=device, room=20)
        keys = torch.randn(2, n, 2, head_dim, device=device).to(dtype).transpose(1, 2)
        values = torch.randn(2, 2, value_dim, n, device=device).to(dtype).mT
        append(store, keys, values, impl=impl)
        stores.append(store)
    got, want = stores
    assert got.room == want.room == 20 - n
    for name in ("keys", "values", "log_w", "start", "length"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0, equal_nan=True)
