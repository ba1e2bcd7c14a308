"""Attention error of the rows that follow a text: ``python -m benchmarks.attention_error``.

A context is compressed; the next rows of the text attend to what is left. Every layer gets the queries of the dense
model, so an error is that of its own eviction. ``relative`` is ``|o_hat - o| / |o|``, ``absolute`` the mean absolute
error of the first row after the context (figure 2 of arXiv 2608.28293); both means over layers and heads, then mean and
standard error over texts, after the mean over seeds. Correction is also weakened by the importance temperature tau.
"""

import argparse
from typing import Any

import pandas as pd
import torch
from kvpress import BasePress, SnapKVPress

from benchmarks.running import load, options, read_texts, show, token_ids, write
from kvpress_prob import H2OPress, MinVariancePress, ProbabilisticPress
from kvpress_prob.prefills.attention_error import DenseQuestion, attention_errors
from kvpress_prob.prefills.compressors import compressor, draws
from kvpress_prob.prefills.shared_prefill import SharedPrefill

RATIOS = [0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95]
TEMPERATURES = (2, 5, 10, 50)


def presses() -> dict[str, BasePress]:
    """New presses by label; all but the top-k presses draw from pi_min-h, of centred values where nothing is said."""

    def drawn(sampler: Any, correction: Any, temperature: float = 1.0, centered: bool = True) -> ProbabilisticPress:
        scorer = MinVariancePress(centered=centered)
        return ProbabilisticPress(scorer, sampler=sampler, correction=correction, temperature=temperature)

    found: dict[str, BasePress] = {
        "H2O top-k": H2OPress(average=True),
        "SnapKV top-k": SnapKVPress(),
        "multinomial, none": drawn("multinomial", "none"),
        "multinomial, counts": drawn("multinomial", "counts"),
        "multinomial, counts, uncentred (prob_min_h)": drawn("multinomial", "counts", centered=False),
        "multinomial, inclusion": drawn("multinomial", "inclusion"),
        "systematic, inclusion": drawn("systematic", "inclusion"),
    }
    for sampler, correction in (("multinomial", "counts"), ("systematic", "inclusion")):
        for tau in TEMPERATURES:
            found[f"{sampler}, {correction}, tau {tau}"] = drawn(sampler, correction, tau)
    return found


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a text, press, ratio and seed."""
    model, tokenizer = load(arguments.model)
    tokens, following = arguments.tokens, arguments.rows
    rows = []
    for name, ids in token_ids(tokenizer, read_texts(arguments.text), tokens + following).items():
        ids = ids.to(model.device)
        shared = SharedPrefill.run(model, ids[:, :tokens])
        question = DenseQuestion(shared, ids[:, tokens:])
        for label, press in presses().items():
            seeds = range(arguments.seed, arguments.seed + arguments.seeds) if draws(press) else (None,)
            compress = compressor(press, shared).compress
            settings = [(ratio, seed) for ratio in arguments.ratios for seed in seeds]
            # Copies of a cache take memory: one press at a time.
            errors = attention_errors(shared, question, [compress(*setting) for setting in settings], following)
            rows += [
                {"text": name, "press": label, "ratio": ratio, "draw": seed, **vars(error)}
                for (ratio, seed), error in zip(settings, errors, strict=True)
            ]
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = options("attention_error", __doc__)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--rows", type=int, default=33, help="rows after the context (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each text (default: %(default)s)")
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    per_text = pd.DataFrame(rows).groupby(["press", "ratio", "text"])[["relative", "absolute"]].mean()
    statistics = per_text.groupby(["press", "ratio"]).agg(["mean", "sem"])
    for kind in ("relative", "absolute"):
        for name, of in (("mean", "mean"), ("sem", "standard error")):
            table = statistics[kind][name].unstack("ratio").loc[list(presses())]
            show(f"{kind} attention error, {of} of {pd.DataFrame(rows)['text'].nunique()} texts", table, 5)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
