"""What compression adds to a prefill, and what it leaves of the cache: ``python -m benchmarks.prefill_cost``.

A prefill with a press, scoring, drawing and packing included, against a dense prefill in the same rounds: the
package's scorer over all query rows (``exact``) and over 256 of them, expected queries, a reconstruction of the context
or of a part of it, and any presses of the registry by name.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import pandas as pd
import torch
from kvpress import BasePress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.running import interleaved, load, medians, options, read_texts, show, token_ids, write
from kvpress_prob import (
    AttentionPress,
    Component,
    ExpectedQueries,
    MinVariancePress,
    PhysicalPress,
    ProbabilisticPress,
    Reconstruction,
    SurrogatePress,
    make_press,
)
from kvpress_prob.hf import cache_bytes

DENSE = "dense"
NO_ROWS = "surrogate alone"
FRACTIONS = (1.0, 0.5, 0.25)
"""Parts of the context that are repeated."""


def prefill(model: PreTrainedModel, ids: Tensor, press: BasePress | None) -> DynamicCache:
    """The cache of a context, compressed or not."""
    cache = DynamicCache()
    if press is None:
        model(ids, past_key_values=cache, logits_to_keep=1)
    else:
        with press(model):
            model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def reconstruction(fraction: float) -> ProbabilisticPress:
    source = Reconstruction(fraction=fraction)
    return ProbabilisticPress(AttentionPress(source=source, statistic="max"), budget_weighting="score")


def no_rows() -> ProbabilisticPress:
    """A surrogate's two outputs and no attention statistic."""
    reading = SurrogatePress(output="reading", recency=1.0)
    return ProbabilisticPress([Component(SurrogatePress(), 0.5, budget_weighting="score"), Component(reading)])


def scorers() -> dict[str, ProbabilisticPress]:
    return {
        "exact": ProbabilisticPress(MinVariancePress()),
        "max_rows=256": ProbabilisticPress(MinVariancePress(max_rows=256)),
        "expected": ProbabilisticPress(AttentionPress(source=ExpectedQueries(), factor="norm")),
        **{f"reconstruction {part:g}": reconstruction(part) for part in FRACTIONS},
    }


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a press; the dense prefill first."""
    model, tokenizer = load(arguments.model)
    name, ids = next(iter(token_ids(tokenizer, read_texts(arguments.text), arguments.tokens).items()))
    presses: dict[str, ProbabilisticPress | PhysicalPress | None] = {
        DENSE: None,
        **({} if arguments.only else scorers()),
        **{press: no_rows() if press == NO_ROWS else make_press(press) for press in arguments.press},
    }
    for press in presses.values():
        if press is not None:
            press.compression_ratio = arguments.ratio
        if isinstance(press, ProbabilisticPress):
            press.seed = arguments.seed
    times = interleaved(
        {label: partial(prefill, model, ids, press) for label, press in presses.items()}, arguments.rounds
    )
    ms = medians(times)
    overhead = {
        label: statistics.median(mine / dense for mine, dense in zip(taken, times[DENSE], strict=True))
        for label, taken in times.items()
    }
    size = {label: cache_bytes(prefill(model, ids, press)) for label, press in presses.items()}
    return [
        {"press": label, "text": name, "ratio": arguments.ratio if press else 0.0, "ms": ms[label],
         "over_dense": overhead[label], "bytes": size[label], "bytes_over_dense": size[label] / size[DENSE]}
        for label, press in presses.items()
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = options("prefill_cost", __doc__)
    parser.add_argument("--ratio", type=float, default=0.5)
    known = f"names of the registry, or '{NO_ROWS}': no attention statistic (default: prob_best)"
    parser.add_argument("--press", nargs="*", default=["prob_best"], help=known)
    parser.add_argument("--only", action="store_true", help="the dense prefill and --press only")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    table = pd.DataFrame(rows).set_index("press").drop(columns=["text"])
    show(f"prefill of {arguments.tokens} tokens, median of {arguments.rounds} rounds", table, 3)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
