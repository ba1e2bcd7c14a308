"""Every kernel, compiled ahead of time for sm_80 and sm_90: what it needs of the chip and how it loads."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SHARED_PER_MULTIPROCESSOR = {80: 164 * 1024, 90: 228 * 1024}
REGISTERS_PER_MULTIPROCESSOR = 65536


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("operation", ["weighted_decode", "attention_mass", "append"])
def test_resources(operation, arch, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", operation, str(arch)],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    assert kernels
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["shared"] <= kernel["limit"], kernel
        if "want_wide_copies" in kernel:
            sizes = Counter(kernel["copies"])
            # Keys, values and queries in 16 bytes a thread; the rest is one number an entry or row.
            assert sizes[16] == kernel["want_wide_copies"] > 0, kernel
            assert set(sizes) <= {4, 8, 16}, kernel
    if operation == "weighted_decode":
        (kernel,) = (
            kernel
            for kernel in kernels
            if kernel["kernel"] == "decode_tile_kernel"
            and (kernel["dtype"], kernel["d"], kernel["dv"], kernel["rows"]) == ("torch.bfloat16", 128, 128, 4)
        )
        by_registers = REGISTERS_PER_MULTIPROCESSOR // (kernel["registers"] * 32 * kernel["warps"])
        by_shared = SHARED_PER_MULTIPROCESSOR[arch] // (kernel["shared"] + 1024 * (arch == 80))
        # What the note on bandwidth in weighted_decode's docstring counts on.
        assert min(by_registers, by_shared) >= {80: 2, 90: 3}[arch], kernel
