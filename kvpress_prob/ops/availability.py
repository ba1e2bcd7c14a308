"""Where the Triton kernels run: one rule for all operations.

They need the package ``triton``, rows of keys and values of at most 256 elements, and an NVIDIA GPU that computes in
the tensors' dtype: float16 from compute capability 7.0 on, bfloat16 and float32 from 8.0 on. Elsewhere ``impl="auto"``
takes plain torch; on a CUDA device it says so, once for each reason. Under Triton's interpreter (``TRITON_INTERPRET=1``
in the environment before triton is first imported) the kernels run on CPU tensors, as a check: ``auto`` never chooses
that.
"""

import os
import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

MAX_WIDTH = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_ARCH = 90
"""Architecture whose launch configurations the interpreter runs."""
INTERPRETED_MULTIPROCESSORS = 4


def triton_obstacle(*tensors: Tensor) -> str | None:
    """What keeps the Triton kernels from running on these tensors, rows last, or None."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if not triton_installed():
        return "the package triton, which is not installed"
    if any(tensor.dtype != dtype or tensor.device != device for tensor in tensors):
        return f"tensors of one dtype and device, got {[(tensor.dtype, str(tensor.device)) for tensor in tensors]}"
    if dtype not in DTYPES:
        return f"a dtype of {DTYPES}, got {dtype}"
    widths = [tensor.shape[-1] for tensor in tensors]
    if not all(1 <= width <= MAX_WIDTH for width in widths):
        return f"rows of 1 to {MAX_WIDTH} elements, got {widths}"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"tensors on an NVIDIA GPU, got {device}"
    arch = architecture(device)
    if arch < 70 or (arch < 80 and dtype != torch.float16):
        return f"compute capability {'7.0' if dtype == torch.float16 else '8.0'} for {dtype}, got {arch / 10}"
    return None


def prefer_triton(*tensors: Tensor) -> bool:
    """Whether ``impl="auto"`` takes the Triton kernels; warns when a CUDA device has to do without."""
    device = tensors[0].device
    if device.type != "cuda":
        return False
    obstacle = triton_obstacle(*tensors)
    if obstacle:
        _warn_once(f"kvpress_prob runs plain torch on {device}: its Triton kernels need {obstacle}")
    return obstacle is None


def require_triton(*tensors: Tensor) -> None:
    """Raise ``ValueError`` if ``impl="triton"`` cannot run."""
    obstacle = triton_obstacle(*tensors)
    if obstacle:
        raise ValueError(f"impl='triton' needs {obstacle}")


def architecture(device: torch.device) -> int:
    """Compute capability as one number, 90 for 9.0."""
    if device.type == "cpu":
        return INTERPRETED_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU."""
    if device.type == "cpu":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def interpreted() -> bool:
    """Whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def triton_installed() -> bool:
    """Whether ``import triton`` would find the package."""
    return find_spec("triton") is not None


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
