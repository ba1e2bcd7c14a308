"""What the kernel tests share: the device, a bf16 product for the interpreter, poisoned memory."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: a GPU, or the CPU by Triton's interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def _bfloat16_products() -> Iterator[None]:
    """Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those (triton#11584, open in triton 3.9).

    Products of bfloat16 numbers are exact in float32, so widening the operands is what a GPU computes.
    """
    if torch.cuda.is_available():
        yield
        return
    triton = pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widen(operand):
        if operand.dtype.scalar != triton.language.bfloat16:
            return operand
        data = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return TensorHandle(data, triton.language.float32)

    create_dot = InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *rest: create_dot(self, widen(a), widen(b), *rest),
        )
        yield


@pytest.fixture
def kernels(_bfloat16_products) -> Iterator[None]:
    """For tests that run kernels: fresh memory holds NaN, so an output that is not written fails."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
