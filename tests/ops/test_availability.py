"""The rule for where the Triton kernels run, and what ``impl`` does with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpress_prob.ops import availability
from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.weighted_decode import weighted_decode
from tests.helpers.stores import random_store

ROOT = Path(__file__).parents[2]


class _OnGPU:
    """What the rule reads of a tensor."""

    def __init__(self, dtype=torch.float16, width=64):
        self.dtype, self.device, self.shape = dtype, torch.device("cuda", 0), torch.Size((1, width))


@pytest.fixture
def gpu(monkeypatch):
    """Sets the compute capability of a GPU that is not there."""
    monkeypatch.setattr(availability, "_warn_once", availability._warn_once.__wrapped__)

    def set_capability(major, minor=0):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    set_capability(9)
    return set_capability


@pytest.mark.parametrize(
    ("capability", "dtype", "wanted"),
    [
        ((6, 1), torch.float16, "compute capability 7.0 for torch.float16, got 6.1"),
        ((7, 5), torch.bfloat16, "compute capability 8.0 for torch.bfloat16, got 7.5"),
        ((7, 5), torch.float32, "compute capability 8.0 for torch.float32, got 7.5"),
        ((9, 0), torch.float64, "got torch.float64"),
        ((7, 0), torch.float16, None),
        ((8, 0), torch.bfloat16, None),
        ((9, 0), torch.float32, None),
    ],
)
def test_rule_by_chip_and_dtype(gpu, capability, dtype, wanted):
    gpu(*capability)
    obstacle = availability.triton_obstacle(_OnGPU(dtype))
    if wanted is None:
        assert obstacle is None
        assert availability.prefer_triton(_OnGPU(dtype))
    else:
        assert wanted in obstacle
        with pytest.warns(RuntimeWarning, match="runs plain torch on cuda:0"):
            assert not availability.prefer_triton(_OnGPU(dtype))


def test_rule_by_width_and_mixture(gpu):
    assert "rows of 1 to 256 elements, got [64, 320]" in availability.triton_obstacle(_OnGPU(), _OnGPU(width=320))
    assert "one dtype and device" in availability.triton_obstacle(_OnGPU(), _OnGPU(torch.bfloat16))


def test_without_triton(gpu, monkeypatch):
    monkeypatch.setattr(availability, "triton_installed", lambda: False)
    assert availability.triton_obstacle(_OnGPU()) == "the package triton, which is not installed"
    with pytest.warns(RuntimeWarning, match="need the package triton, which is not installed"):
        assert not availability.prefer_triton(_OnGPU())


def test_one_warning_for_each_reason():
    availability._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="a reason"):
        availability._warn_once("a reason")
    availability._warn_once("a reason")  # a second warning would be an error
    with pytest.warns(RuntimeWarning, match="another reason"):
        availability._warn_once("another reason")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the refusal of CPU tensors")
def test_explicit_choice_that_cannot_run_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    store = random_store([4, 4], d=16)
    query, new = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match="impl='triton' needs tensors on an NVIDIA GPU, got cpu"):
        weighted_decode(query, store, scaling=1.0, impl="triton")
    with pytest.raises(ValueError, match="impl='triton' needs tensors on an NVIDIA GPU, got cpu"):
        append(store, new, new, impl="triton")
    assert store.room == 5
    with pytest.raises(ValueError, match="impl='triton' needs tensors on an NVIDIA GPU, got cpu"):
        attention_mass(query, new, torch.ones(1, 1), scaling=1.0, impl="triton")


def test_unknown_choice_raises():
    store = random_store([4, 4], d=16)
    query, new = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match=r"impl must be one of .*'triton'.*, got 'cuda'"):
        weighted_decode(query, store, scaling=1.0, impl="cuda")
    with pytest.raises(ValueError, match=r"impl must be one of .*'triton'.*, got 'cuda'"):
        append(store, new, new, impl="cuda")
    with pytest.raises(ValueError, match=r"impl must be one of .*'triton'.*, got 'cuda'"):
        attention_mass(query, new, torch.ones(1, 1), scaling=1.0, impl="cuda")


def test_auto_never_interprets(monkeypatch):
    """On the CPU the kernels are for checks only."""
    monkeypatch.setattr(availability, "triton_obstacle", lambda *tensors: pytest.fail("auto asked about Triton"))
    store = random_store([4, 4], d=16)
    weighted_decode(torch.randn(1, 4, 1, 16), store, scaling=1.0)
    append(store, torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))


@pytest.mark.usefixtures("kernels")
def test_kernels_run_under_their_tensors_device(device, monkeypatch):
    """Scenario S29: a launch goes to torch's current device, which need not be the tensors'."""
    under = []

    class Recorded(torch.cuda.device_of):
        def __init__(self, tensor):
            super().__init__(tensor)
            under.append(tensor.device.type)

    monkeypatch.setattr(torch.cuda, "device_of", Recorded)
    store = random_store([40, 4], d=16, device=device)
    query, new = torch.randn(1, 4, 1, 16, device=device), torch.randn(1, 2, 1, 16, device=device)
    append(store, new, new, impl="triton")
    weighted_decode(query, store, scaling=1.0, impl="triton")
    attention_mass(query, new, torch.ones(1, 1, device=device), scaling=1.0, impl="triton")
    assert under == [device] * 3


SCRIPT = """
import sys
for name in ("triton", "triton.language"):
    sys.modules[name] = None
import torch
from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV

dense = torch.randn(1, 2, 8, 16)
store = RaggedKV.pack(dense, dense, torch.ones(1, 2, 8, dtype=torch.bool), torch.zeros(1, 2, 8))
append(store, dense[:, :, :1], dense[:, :, :1])
output, _ = weighted_decode(torch.randn(1, 4, 1, 16), store, scaling=0.25)
mass, _ = attention_mass(dense, dense, torch.ones(1, 8), scaling=0.25)
assert output.isfinite().all() and mass.isfinite().all()
try:
    weighted_decode(torch.randn(1, 4, 1, 16), store, scaling=0.25, impl="triton")
except ValueError as error:
    print(error)
"""


def test_package_works_without_triton():
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "impl='triton' needs the package triton, which is not installed"
