"""Does eviction hit its target? ``python -m benchmarks.target_ratio`` (table 1 of arXiv 2608.28293).

For the paper's four proposals, as the registry has them, the difference of achieved and target ratio over all heads and
layers; mean and largest over texts. For the systematic sampler, how far a head of a budget of its own
(``allocation="head"``) is from it, in entries.
"""

import argparse
import statistics
from typing import Any, cast

import pandas as pd
import torch

from benchmarks.running import load, options, read_texts, show, token_ids, write
from kvpress_prob import MinVariancePress, ProbabilisticPress, make_press
from kvpress_prob.hf import RaggedLayer
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill

RATIOS = [0.1, 0.3, 0.5, 0.7, 0.9]
PROPOSALS = ("prob_min", "prob_min_h", "prob_h2o", "prob_h2o_h")
SYSTEMATIC = "systematic, per head"


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a text, press and ratio."""
    model, tokenizer = load(arguments.model)
    rows = []
    for name, ids in token_ids(tokenizer, read_texts(arguments.text), arguments.tokens).items():
        shared = SharedPrefill.run(model, ids.to(model.device))
        presses = {press: make_press(press) for press in PROPOSALS}
        presses[SYSTEMATIC] = ProbabilisticPress(MinVariancePress(), allocation="head")
        for label, press in presses.items():
            compress = compressor(press, shared).compress
            for ratio in arguments.ratios:
                compressed = compress(ratio, arguments.seed)
                achieved = statistics.fmean(compressed.layer_ratios)
                row = {"text": name, "press": label, "ratio": ratio, "achieved": achieved}
                if label == SYSTEMATIC:
                    row["entries_off"] = _entries_off(compressed, (1 - ratio) * shared.tokens)
                rows.append(row)
    return rows


def _entries_off(compressed: Compressed, budget: float) -> float:
    """Largest distance of a head's kept entries from its budget."""
    layers = cast(list[RaggedLayer], compressed.cache.layers)
    return max(float((layer.store.length - budget).abs().max()) for layer in layers if isinstance(layer, RaggedLayer))


def main(argv: list[str] | None = None) -> None:
    parser = options("target_ratio", __doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    table = pd.DataFrame(rows).assign(error=lambda frame: (frame["achieved"] - frame["ratio"]).abs())
    order = [*PROPOSALS, SYSTEMATIC]
    for statistic in ("mean", "max"):
        errors = table.pivot_table(index="press", columns="ratio", values="error", aggfunc=statistic).loc[order]
        show(f"|achieved - target|, {statistic} of {table['text'].nunique()} texts", errors, 5)
    show("systematic sampler: most entries off a head's budget", table.groupby("ratio")[["entries_off"]].max().T, 3)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
