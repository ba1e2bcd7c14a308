"""The GPU script, at toy sizes in Triton's interpreter, on a machine that has torch and triton and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
WITHOUT = ("kvpress", "transformers", "jaxtyping", "flash_attn", "flashinfer")
SCRIPT = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({WITHOUT}))
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_smoke(tmp_path):
    output = tmp_path / "rows.jsonl"
    process = run("--device", "cpu", "--smoke", "--output", str(output))
    assert process.returncode == 0, process.stderr
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert {row["case"] for row in rows} == {"decode", "mass", "model"}
    for row in rows:
        assert row["bytes"] > 0
        assert row["floor"] > 0
        assert row["torch"]
        assert "interpreter" in row["gpu"]
        if row["impl"] in ("flash-attn", "FlashInfer") or "graph" in row["impl"]:
            assert row["seconds"] == "not measured"
            assert row["reason"]
        else:
            assert len(row["seconds"]) == 3
    assert "toy sizes: the times below mean nothing" in process.stdout
    assert "not measured: CUDA graphs need a GPU" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--device", "cpu"), "--device cpu needs --smoke"), ((), "no GPU found: nothing can be measured here")],
)
def test_refuses_to_measure_without_a_gpu(arguments, message):
    process = run(*arguments)
    assert process.returncode == 2
    assert message in process.stderr
