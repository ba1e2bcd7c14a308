"""Speed of the GPU path: ``python -m benchmarks.gpu``. Needs torch, triton, one GPU and under four minutes.

First every kernel is checked against float64 (``benchmarks.checks``); a wrong kernel ends the run. Then, with the
floor of each case (the bytes it cannot avoid over the bandwidth of a device-to-device copy in the same run) beside its
measurement:

* ``decode``: one step of ``weighted_decode``, 8 KV heads x group 4 x head dimension 128, head lengths drawn from what a
  real run kept (``data/kept_counts.json``), against dense attention over the whole context: torch's flash kernel, the
  same after ``DynamicCache`` has appended a token as transformers does (a copy of the cache by ``torch.cat``), and a
  varlen kernel (flash-attn, FlashInfer) over the same number of entries at equal lengths, where one is installed;
* ``mass``: ``attention_mass`` against a flash-attention prefill of the same shape;
* ``model``: a whole decode step of a random-weight model of Llama-3.2-3B's sizes, eager and replayed as a CUDA graph.

Rows go to a JSON-lines file as they are measured, a table is printed last. What could not be measured says so and why.
``TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --smoke`` runs the same code at toy sizes in Triton's
interpreter; its times mean nothing.
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import benchmarks.standalone  # noqa: F401  (before the package)
from benchmarks.checks import check_all
from benchmarks.decoder import Decoder, Shape
from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.availability import interpreted
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV

ROOT = Path(__file__).parents[1]
KEPT = json.loads((ROOT / "benchmarks/data/kept_counts.json").read_text())["kept_fraction"]
KV_HEADS, GROUP, D = 8, 4, 128
NOT_MEASURED = "not measured"


class Bench:
    """Device, sizes, the measured copy bandwidth, and the rows so far."""

    def __init__(self, device: str, smoke: bool, output: Path):
        self.device = torch.device(device)
        self.smoke = smoke
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float16
        self.rows: list[dict[str, Any]] = []
        self.output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("")
        self.bandwidth = self.copy_bandwidth()
        self.environment = environment(self.device, self.bandwidth)

    def seconds(self, function: Callable[[], object]) -> list[float]:
        """20th, 50th and 80th percentile of the time of a call."""
        if self.cuda:
            from triton.testing import do_bench

            times = do_bench(function, warmup=20, rep=80, quantiles=[0.2, 0.5, 0.8])
            return [milliseconds / 1e3 for milliseconds in times]  # pyright: ignore[reportOptionalIterable]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
        return [min(times), statistics.median(times), max(times)]

    def row(self, case: dict[str, Any], implementation: str, minimum: int, run: Callable[[], object] | str) -> None:
        """Measure ``run`` and record it; a string is the reason why it cannot be measured.

        ``minimum`` is the number of bytes that the case cannot avoid.
        """
        record = {**case, "impl": implementation, "bytes": minimum, "floor": minimum / self.bandwidth}
        if isinstance(run, str):
            record["seconds"], record["reason"] = NOT_MEASURED, run
        else:
            try:
                record["seconds"] = self.seconds(run)
            except RuntimeError as error:  # a backend that refuses a shape, or memory that does not suffice
                record["seconds"], record["reason"] = NOT_MEASURED, str(error).splitlines()[0]
        self.rows.append(record)
        with self.output.open("a") as file:
            file.write(json.dumps({**record, **self.environment}) + "\n")

    def copy_bandwidth(self) -> float:
        """Bytes read plus bytes written a second by a large copy, the yardstick of all floors."""
        size = 2**20 if self.smoke else 2**31
        source, target = (torch.empty(size, dtype=torch.uint8, device=self.device).random_() for _ in range(2))
        return 2 * size / self.seconds(lambda: target.copy_(source))[1]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def environment(device: torch.device, bandwidth: float) -> dict[str, str | float]:
    """What a figure depends on besides the code."""
    import triton

    try:
        git = partial(subprocess.check_output, cwd=ROOT, text=True, stderr=subprocess.DEVNULL)
        commit = git(["git", "rev-parse", "HEAD"]).strip()
        commit += "+changes" if git(["git", "status", "--porcelain"]) else ""
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none, Triton's interpreter on the CPU"
    return {
        "gpu": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": bandwidth,
        "commit": commit,
    }


def kept_lengths(heads: int, context: int, ratio: float, seed: int = 0) -> list[int]:
    """Entries of ``heads`` heads: drawn from the kept fractions of a real run at this ratio, scaled to its mean."""
    if ratio == 0:
        return [context] * heads
    drawn = random.Random(seed).choices(KEPT[str(ratio)], k=heads)
    scale = (1 - ratio) * heads / sum(drawn)
    return [min(max(round(context * fraction * scale), 1), context) for fraction in drawn]


def store_of(bench: Bench, lengths: list[int], batch: int, d: int, room: int = 32) -> RaggedKV:
    like = torch.empty(0, d, dtype=bench.dtype, device=bench.device)
    store = RaggedKV.empty(like, like, lengths, batch, room)
    for buffer in (store.keys, store.values, store.log_w):
        buffer.normal_()
    return store


def bench_decode(bench: Bench) -> None:
    """One attention step over a layer."""
    contexts = (64,) if bench.smoke else (8_192, 32_768, 131_072)
    for batch in (1, 8) if not bench.smoke else (1,):
        for context in contexts:
            query = bench.randn(batch, KV_HEADS * GROUP, 1, D)
            dense_keys, dense_values = (bench.randn(batch, KV_HEADS, context, D) for _ in range(2))
            new_key, new_value = (bench.randn(batch, KV_HEADS, 1, D) for _ in range(2))
            small = 2 * query.numel() * query.element_size()
            dense = 2 * dense_keys.numel() * dense_keys.element_size() + small
            case = {"case": "decode", "batch": batch, "context": context}
            attend = partial(F.scaled_dot_product_attention, query, enable_gqa=True)
            bench.row(case, "flash SDPA", dense, partial(_flash, bench, attend, dense_keys, dense_values))
            bench.row(
                case,
                "DynamicCache + SDPA",
                dense,
                lambda a=attend, k=dense_keys, v=dense_values, nk=new_key, nv=new_value: a(
                    torch.cat([k, nk], -2), torch.cat([v, nv], -2)
                ),
            )
            del dense_keys, dense_values, attend
            for ratio in (0, 0.5) if bench.smoke else (0, 0.5, 0.75, 0.9):
                lengths = kept_lengths(batch * KV_HEADS, context, ratio)
                store = store_of(bench, lengths, batch, D)
                entry = 2 * D * store.keys.element_size() + 4
                ours = {**case, "ratio": ratio, "longest": max(lengths), "shortest": min(lengths)}
                minimum = sum(lengths) * entry + small
                run = partial(weighted_decode, query, store, scaling=D**-0.5, impl="triton")
                bench.row(ours, "weighted_decode", minimum, run)
                equal = sum(lengths) // len(lengths)
                for name, varlen in (("flash-attn", _flash_attn), ("FlashInfer", _flashinfer)):
                    bench.row({**case, "ratio": ratio}, name, minimum, _prepared(varlen, bench, query, equal))
                del store, run


def _flash(bench: Bench, attend: Callable[[Tensor, Tensor], Tensor], keys: Tensor, values: Tensor) -> Tensor:
    """torch's flash kernel by name on a GPU, so that nothing slower is measured in its place."""
    if not bench.cuda:
        return attend(keys, values)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend(keys, values)


def _prepared(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> Callable[[], object] | str:
    """What ``prepare`` returns, or why another package's kernel cannot run here, whatever it raised."""
    try:
        return prepare(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _flash_attn(bench: Bench, query: Tensor, length: int) -> Callable[[], object]:
    """flash-attn's decode kernel over a dense cache of ``length`` entries per head."""
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    keys, values = (bench.randn(query.shape[0], length, KV_HEADS, D) for _ in range(2))
    sizes = torch.full((query.shape[0],), length, dtype=torch.int32, device=bench.device)
    return lambda: flash_attn_with_kvcache(query.transpose(1, 2), keys, values, cache_seqlens=sizes, causal=True)


def _flashinfer(bench: Bench, query: Tensor, length: int) -> Callable[[], object]:
    """FlashInfer's batch decode over pages of 16 entries."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportMissingImports]

    page, batch = 16, query.shape[0]
    pages = -(-length // page)
    cache = bench.randn(batch * pages, 2, page, KV_HEADS, D)
    workspace = torch.empty(2**27, dtype=torch.uint8, device=bench.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    index = partial(torch.arange, dtype=torch.int32, device=bench.device)
    last = torch.full((batch,), length - (pages - 1) * page, dtype=torch.int32, device=bench.device)
    wrapper.plan(
        index(batch + 1) * pages,
        index(batch * pages),
        last,
        KV_HEADS * GROUP,
        KV_HEADS,
        D,
        page,
        q_data_type=bench.dtype,
        kv_data_type=bench.dtype,
    )
    return lambda: wrapper.run(query.squeeze(2), cache)


def bench_mass(bench: Bench) -> None:
    """Prefill statistics; floors are keys, queries and results read or written once, and far below the arithmetic."""
    for context, rows in ((64, 16),) if bench.smoke else ((8_192, 8_192), (8_192, 512), (32_768, 512)):
        query, keys = bench.randn(1, KV_HEADS * GROUP, context, D), bench.randn(1, KV_HEADS, context, D)
        positions = torch.linspace(0, context - 1, rows, device=bench.device).long()
        weights = torch.full((1, rows), 1 / rows, device=bench.device)
        chosen = query if rows == context else query[:, :, positions].contiguous()
        case = {"case": "mass", "batch": 1, "context": context, "rows": rows}
        minimum = (keys.numel() + chosen.numel()) * keys.element_size() + 4 * KV_HEADS * GROUP * context
        run = partial(attention_mass, chosen, keys, weights, scaling=D**-0.5, positions=positions, impl="triton")
        bench.row(case, "attention_mass", minimum, run)
        attend = partial(F.scaled_dot_product_attention, query, is_causal=True, enable_gqa=True)
        prefill = 2 * (query.numel() + keys.numel()) * keys.element_size()
        bench.row(case, "flash prefill", prefill, partial(_flash, bench, attend, keys, keys))
        del query, keys, chosen, run, attend


def bench_model(bench: Bench) -> None:
    """A whole decode step. Lengths are set back before every step, so that any number of them can be timed."""
    shape = Shape(2, 64, 4, 2, 16, 128, 128) if bench.smoke else Shape()
    batch, context = (1, 40) if bench.smoke else (1, 32_768)
    decoder = Decoder(shape, bench.dtype, bench.device)
    ids = torch.zeros(batch, dtype=torch.int64, device=bench.device)
    position = torch.tensor([context], device=bench.device)
    entry = 2 * shape.head_dim * torch.tensor([], dtype=bench.dtype).element_size()

    for ratio in (0.5,) if bench.smoke else (0.5, 0.9):
        stores = [
            store_of(bench, kept_lengths(batch * shape.kv_heads, context, ratio, layer), batch, shape.head_dim)
            for layer in range(shape.layers)
        ]
        lengths = [store.length for store in stores]
        initial = [length.clone() for length in lengths]
        step = partial(_compressed_step, decoder, ids, position, stores, lengths, initial)
        stored = sum(int(length.sum()) for length in initial)
        case = {"case": "model", "batch": batch, "context": context, "ratio": ratio}
        minimum = decoder.nbytes + stored * (entry + 4)
        bench.row(case, "compressed, eager", minimum, step)
        bench.row(case, "compressed, CUDA graph", minimum, _captured(bench, step))
        del stores, lengths, step

    size = (batch, shape.kv_heads, context + 1, shape.head_dim)
    buffers = [(bench.randn(*size), bench.randn(*size)) for _ in range(shape.layers)]

    def attend_in_place(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = buffers[layer]
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def attend_after_copy(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (buffer[:, :, :context] for buffer in buffers[layer])
        keys, values = torch.cat([keys, key], -2), torch.cat([values, value], -2)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    case = {"case": "model", "batch": batch, "context": context, "ratio": 0}
    minimum = decoder.nbytes + shape.layers * batch * shape.kv_heads * context * entry
    bench.row(case, "DynamicCache, eager", minimum, lambda: decoder.step(ids, position, attend_after_copy))
    step_in_place = partial(decoder.step, ids, position, attend_in_place)
    bench.row(case, "static cache, eager", minimum, step_in_place)
    bench.row(case, "static cache, CUDA graph", minimum, _captured(bench, step_in_place))


def _compressed_step(
    decoder: Decoder,
    ids: Tensor,
    position: Tensor,
    stores: list[RaggedKV],
    lengths: list[Tensor],
    initial: list[Tensor],
) -> Tensor:
    """One step over ragged stores, from the same lengths every time."""
    torch._foreach_copy_(lengths, initial)  # pyright: ignore[reportPrivateImportUsage]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        store = stores[layer]
        append(store, key, value, impl="triton")
        store.room += 1
        return weighted_decode(query, store, scaling=query.shape[-1] ** -0.5, impl="triton")[0]

    return decoder.step(ids, position, attend)


def _captured(bench: Bench, step: Callable[[], object]) -> Callable[[], object] | str:
    """The step as a CUDA graph."""
    if not bench.cuda:
        return "CUDA graphs need a GPU"
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def table(bench: Bench) -> str:
    """Measured median, floor, and how near the two are; for decoding also the speed-up over the dense baselines."""

    def median(row: dict[str, Any]) -> float | None:
        return None if row["seconds"] == NOT_MEASURED else row["seconds"][1]

    def against(row: dict[str, Any], name: str) -> str:
        keys = ("case", "batch", "context") if row["case"] != "mass" else ("case", "context", "rows")
        for other in bench.rows:
            if other["impl"] == name and all(other.get(key) == row.get(key) for key in keys):
                own, base = median(row), median(other)
                return f"{base / own:.2f}x" if own and base else NOT_MEASURED
        return "-"

    header = [
        "case",
        "batch",
        "context",
        "r or rows",
        "implementation",
        "ms",
        "floor ms",
        "of copy",
        "flash/it",
        "cat/it",
    ]
    lines = [header]
    for row in bench.rows:
        time_taken = median(row)
        dense = "flash prefill" if row["case"] == "mass" else "flash SDPA"
        lines.append(
            [
                row["case"],
                str(row.get("batch", "")),
                str(row.get("context", "")),
                str(row.get("ratio", row.get("rows", ""))),
                row["impl"],
                NOT_MEASURED if time_taken is None else f"{1e3 * time_taken:.3f}",
                f"{1e3 * row['floor']:.3f}",
                NOT_MEASURED if time_taken is None else f"{row['floor'] / time_taken:.0%}",
                against(row, dense) if row["case"] != "model" else "-",
                against(row, "DynamicCache, eager" if row["case"] == "model" else "DynamicCache + SDPA"),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (with --smoke)")
    parser.add_argument("--smoke", action="store_true", help="toy sizes: tests the script, measures nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.jsonl")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.smoke:
        parser.error("--device cpu needs --smoke: Triton's interpreter takes hours at real sizes")
    if arguments.device == "cpu" and not interpreted():
        parser.error("--device cpu needs TRITON_INTERPRET=1 in the environment")
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error("no GPU found: nothing can be measured here")
    begin = time.perf_counter()
    torch.manual_seed(time.time_ns())
    with torch.no_grad():
        checks = check_all(torch.device(arguments.device), arguments.smoke)
        print(f"{checks} checks of the kernels against float64 passed")
        bench = Bench(arguments.device, arguments.smoke, arguments.output)
        bench_decode(bench)
        bench_mass(bench)
        bench_model(bench)
    if arguments.smoke:
        print("toy sizes: the times below mean nothing")
    print(table(bench))
    for reason in dict.fromkeys(row["reason"] for row in bench.rows if "reason" in row):
        print(f"{NOT_MEASURED}: {reason}")
    for name, value in bench.environment.items():
        print(f"{name:8s} {value}" if isinstance(value, str) else f"copy     {value / 1e12:.3f} TB/s")
    print(f"{len(bench.rows)} rows in {arguments.output}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
