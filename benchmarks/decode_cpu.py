"""One decode step on the CPU: ``python -m benchmarks.decode_cpu``.

*Attention*, 32 query heads, 8 KV heads, D = 128: append one token, then attend, through transformers' own sdpa function
(with kvpress' wrapper, as in any process that imports kvpress) over

* ``DynamicCache``: the dense cache, which is copied at every token;
* ``AdaKV, masked``: kvpress' way of dropping entries head by head: the dense cache with hidden entries;
* ``ours``: the ragged store, head lengths from what a real run kept (``data/kept_counts.json``);

beside the floor: the bytes of the stored entries over this machine's read bandwidth, measured in the same rounds.

*Model*: milliseconds per token of the whole model over a dense and a compressed cache of real text, in turn.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.running import interleaved, load, medians, options, read_texts, show, token_ids, write
from kvpress_prob import make_press
from kvpress_prob.hf import RaggedLayer
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.shared_prefill import SharedPrefill
from kvpress_prob.ragged import RaggedKV

HEADS, KV_HEADS, D = 32, 8, 128
DENSE = "DynamicCache"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEPT = json.loads((Path(__file__).parent / "data/kept_counts.json").read_text())["kept_fraction"]


def attention_step(layer: Any, query: Tensor, new: Tensor, masked: tuple[Tensor, ...] | None = None) -> Tensor:
    """Append a token to a cache layer and attend to it, the way a transformers model does."""
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, masked_key_indices=masked)
    keys, values = layer.update(new, new)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, keys, values, None, 0.0, scaling=D**-0.5)[0]


@dataclass(frozen=True)
class Way:
    """One way to decode: what it runs, and the bytes of entries that it cannot avoid reading."""

    name: str
    ratio: float
    step: Callable[[], object]
    nbytes: int = 0


def attention(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a dtype, context, ratio and way."""
    generator = torch.Generator().manual_seed(arguments.seed)
    big = torch.ones(arguments.bandwidth_bytes // 4)  # written, so that its pages are real
    read = Way("read", 0.0, big.sum)
    rows = []
    for dtype in arguments.dtypes:
        for context in arguments.contexts:
            ways = attention_ways(DTYPES[dtype], context, arguments.ratios, generator)
            times = timed([read, *ways], arguments.rounds)
            bandwidth = big.nbytes / times.pop(0)["ms"]
            for way, row in zip(ways, times, strict=True):
                case = {"case": "attention", "dtype": dtype, "context": context}
                rows.append({**case, **row, "floor_ms": way.nbytes / bandwidth, "bytes_per_ms": bandwidth})
    return rows


def attention_ways(dtype: torch.dtype, context: int, ratios: list[float], generator: torch.Generator) -> list[Way]:
    """The dense cache, then kvpress' and ours at every ratio, over the same random entries."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # kvpress' masking needs queries of one half-space, as trained models have them.
    query, new = randn(1, HEADS, 1, D) + 1, randn(1, KV_HEADS, 1, D)
    keys, values = (randn(1, KV_HEADS, context, D) for _ in range(2))
    entry = 2 * D * dtype.itemsize
    everything = KV_HEADS * context * entry
    ways = [Way(DENSE, 0.0, partial(attention_step, dense_layer(keys, values), query, new), everything)]
    for ratio in ratios:
        kept = kept_entries(context, ratio, generator)
        hidden = (~kept).nonzero(as_tuple=True)
        ragged = RaggedLayer(RaggedKV.pack(keys, values, kept, torch.zeros(kept.shape)), context, [0])
        masked = partial(attention_step, dense_layer(keys, values), query, new, hidden)
        ours = partial(attention_step, ragged, query, new)
        ways.append(Way("AdaKV, masked", ratio, masked, everything))
        ways.append(Way("ours", ratio, ours, int(kept.sum()) * (entry + 4)))
    return ways


def timed(ways: list[Way], rounds: int) -> list[dict[str, Any]]:
    """A row a way; its speed is given relative to the dense cache's."""
    ms = medians(interleaved({(way.name, way.ratio): way.step for way in ways}, rounds))
    return [
        {"way": name, "ratio": ratio, "ms": taken, "dense_over_it": ms[DENSE, 0.0] / taken}
        for (name, ratio), taken in ms.items()
    ]


def dense_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(keys, values)
    return layer


def kept_entries(context: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Kept entries [1 hkv t]: lengths from a real run, scaled to the ratio's mean; places at random."""
    measured = KEPT[min(KEPT, key=lambda known: abs(float(known) - ratio))]
    drawn = random.Random(generator.initial_seed()).choices(measured, k=KV_HEADS)
    scale = (1 - ratio) * KV_HEADS / sum(drawn)
    kept = torch.zeros(1, KV_HEADS, context, dtype=torch.bool)
    for head, fraction in enumerate(drawn):
        kept[0, head, torch.randperm(context, generator=generator)[: max(round(context * fraction * scale), 1)]] = True
    return kept


def whole_model(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a context and cache."""
    model, tokenizer = load(arguments.model)
    text = {"all": "\n\n".join(read_texts(arguments.text).values())}
    rows = []
    for context in arguments.model_contexts:
        ids = token_ids(tokenizer, text, context)["all"]
        shared = SharedPrefill.run(model, ids)
        press = compressor(make_press(arguments.press), shared)
        caches = {(DENSE, 0.0): shared.copy_cache()}
        for ratio in arguments.ratios:
            caches[arguments.press, ratio] = press.compress(ratio, arguments.seed).cache
        ways = [Way(*name, partial(model_step, model, ids[:, -1:], cache)) for name, cache in caches.items()]
        rows += [{"case": "model", "context": context, **row} for row in timed(ways, arguments.rounds)]
    return rows


def model_step(model: Any, token: Tensor, cache: DynamicCache) -> None:
    """One more token; its position is the cache's logical length."""
    model(input_ids=token, past_key_values=cache)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = options("decode_cpu", __doc__)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32_768])
    parser.add_argument("--model-contexts", type=int, nargs="*", default=[2048, 8000])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75, 0.9])
    parser.add_argument("--press", default="prob_best", help="of the whole-model part (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bandwidth-bytes", type=int, default=2**28, help="read to measure the bandwidth")
    arguments = parser.parse_args(argv)
    rows = attention(arguments) + whole_model(arguments)
    table = pd.DataFrame(rows)
    for case, part in table.groupby("case"):
        show(f"{case}, median of {arguments.rounds} rounds", part.dropna(axis=1).drop(columns="case").round(4), 3)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
