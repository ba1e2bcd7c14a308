"""Compile what an operation launches, without a GPU: ``python -m tests.helpers.compile_kernels OPERATION ARCH``.

A driver that only names its target stands in for the GPU's, and a launch stops after compilation, so argument types,
alignments and constants are those of a real launch. Prints one JSON object a kernel. Must run without
``TRITON_INTERPRET`` and with a fresh ``TRITON_CACHE_DIR``: interpreted functions cannot be compiled, and a warm cache
hides faults.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvpress_prob.ops import availability
from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.attention_mass import launch as mass_launch
from kvpress_prob.ops.launching import shared_memory
from kvpress_prob.ops.weighted_decode import launch as decode_launch
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV

WIDTHS = (32, 64, 128, 256)
"""Every block of keys or values; other widths are padded to these."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


Launch = tuple[dict, Callable[[], object], dict[str, tuple[Any, int]]]
"""A name, the launch, and per kernel its configuration and the bytes that one step of its main loop copies from keys,
values or queries."""


def weighted_decode_launches(arch: int) -> Iterator[Launch]:
    cases = [(dtype, width, width, rows, None) for dtype in DTYPES for width in WIDTHS for rows in (4, 64)]
    cases += [(torch.bfloat16, width, width, 4, None) for width in (16, 80, 96)]
    cases += [
        (torch.bfloat16, 128, 64, 4, None),
        (torch.bfloat16, 256, 256, 64, 50.0),
        (torch.float32, 64, 64, 3, 30.0),
    ]
    for dtype, d, dv, rows, softcap in cases:
        config = decode_launch.launch_config(rows, d, dv, dtype, arch)
        store = RaggedKV.empty(torch.empty(0, d, dtype=dtype), torch.empty(0, dv, dtype=dtype), [100, 100], 1, 28)
        query = torch.empty(1, 2 * rows, 1, d, dtype=dtype)
        copied = config.block_n * (config.block_d + config.block_dv) * dtype.itemsize
        yield (
            {"dtype": str(dtype), "d": d, "dv": dv, "rows": rows, "softcap": softcap},
            lambda q=query, s=store, c=softcap: weighted_decode(q, s, scaling=0.1, softcap=c, impl="triton"),
            {"decode_tile_kernel": (config, copied)},
        )


def attention_mass_launches(arch: int) -> Iterator[Launch]:
    cases = [
        (dtype, width, n, values, "mean", None)
        for dtype in DTYPES
        for width in WIDTHS
        for n in ((512, 2048) if dtype != torch.float32 else (512,))
        for values in (False, True)
    ]
    # With everything switched on.
    cases += [(torch.bfloat16, d, 512, True, "max", 30.0) for d in (80, 256)] + [
        (torch.bfloat16, 128, 2048, True, "max", 30.0)
    ]
    for dtype, d, n, has_values, statistic, softcap in cases:
        config = mass_launch.launch_config(n, d, d if has_values else 1, dtype, arch)
        query, keys = torch.empty(1, 4, n, d, dtype=dtype), torch.empty(1, 2, n, d, dtype=dtype)
        block = config.block_n * config.block_d * dtype.itemsize
        yield (
            {"dtype": str(dtype), "d": d, "n": n, "values": has_values, "statistic": statistic, "softcap": softcap},
            lambda q=query, k=keys, v=has_values, c=softcap, s=statistic: attention_mass(
                q,
                k,
                torch.empty(1, q.shape[2]),
                scaling=0.1,
                values=k if v else None,
                valid=None if c is None else torch.ones(1, q.shape[2], dtype=torch.bool),
                scope=None if c is None else torch.ones(q.shape[2], dtype=torch.bool),
                column_bias=None if c is None else torch.zeros(1, 4, q.shape[2]),
                softcap=c,
                statistic=s,
                impl="triton",
            ),
            {
                "row_lse_kernel": (config, 2 * block if has_values else block),
                "column_mass_kernel": (config, config.block_m * config.block_d * dtype.itemsize),
            },
        )


def append_launches(arch: int) -> Iterator[Launch]:
    for dtype in DTYPES:
        for width in (16, 80, 256):
            for n in (1, 40):
                like = torch.empty(0, width, dtype=dtype)
                store = RaggedKV.empty(like, like, [100, 100], 1, 50)
                new = torch.empty(1, 2, n, width, dtype=dtype)
                yield (
                    {"dtype": str(dtype), "d": width, "n": n},
                    lambda s=store, x=new: append(s, x, x, impl="triton"),
                    {},
                )


LAUNCHES = {
    "append": append_launches,
    "attention_mass": attention_mass_launches,
    "weighted_decode": weighted_decode_launches,
}


def resources(kernel) -> dict:
    """What the cubin and the PTX of a compiled kernel say."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return {
        "registers": numbers["reg"],
        "stack": numbers["stack"],
        "local": numbers["local"],
        "shared": numbers["shared"] + kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "copies": [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, (\w+)", ptx)],
    }


def main(operation: str, arch: int) -> None:
    target = GPUTarget("cuda", arch, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    compiled = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: compiled.append(
        (self.fn.__name__, run(self, *args, **{**kwargs, "warmup": True}))
    )
    availability.triton_obstacle = lambda *tensors: None
    import_module(f"kvpress_prob.ops.{operation}.triton_kernel").architecture = lambda device: arch
    done = set()
    for name, launch, loops in LAUNCHES[operation](arch):
        compiled.clear()
        launch()
        for kernel_name, kernel in compiled:
            if kernel.hash in done:
                continue
            done.add(kernel.hash)
            row = {"kernel": kernel_name, **name, "limit": shared_memory(arch), **resources(kernel)}
            if kernel_name in loops:
                config, copied = loops[kernel_name]
                row["want_wide_copies"] = config.num_stages * copied // (16 * 32 * config.num_warps)
            print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
