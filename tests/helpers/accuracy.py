"""One bound for kernels of any dtype: as good as plain torch in that dtype."""

import torch
from torch import Tensor


def assert_as_accurate(
    got: Tensor, reference: Tensor, exact: Tensor, dtype: torch.dtype, *, roundings: int = 4
) -> None:
    """``got`` errs no more than ``reference`` does, both against ``exact``, plus a few roundings.

    Parameters
    ----------
    got : Tensor
        What is tested.
    reference : Tensor
        The reference implementation on the same inputs, in the same dtype.
    exact : Tensor
        The reference implementation on the same inputs, in float64. Infinities must be met exactly.
    dtype : torch.dtype
        The precision that ``got`` may round to.
    roundings : int
        Further rounding steps that the kernel may take, in units of the dtype's eps at the largest exact value.
    """
    assert got.shape == reference.shape == exact.shape
    assert got.dtype == reference.dtype
    got, reference, exact = got.double().cpu(), reference.double().cpu(), exact.double().cpu()
    finite = exact.isfinite()
    assert torch.equal(got[~finite], exact[~finite])
    got, reference, exact = got[finite], reference[finite], exact[finite]
    if exact.numel() == 0:
        return
    error, own = (got - exact).abs().max(), (reference - exact).abs().max()
    bound = own + roundings * torch.finfo(dtype).eps * exact.abs().max()
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g} (reference {own:.3g})"
