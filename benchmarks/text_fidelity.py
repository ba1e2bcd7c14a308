"""How far a text's next tokens drift from the dense model's: ``python -m benchmarks.text_fidelity``.

The first ``--tokens`` tokens of each text are prefilled once and compressed by every press at every ratio; the text's
next ``--next`` tokens are then read over the compressed cache. A row's figure is the mean over them of KL(dense ||
compressed) of the next-token distributions, in nats. Presses that mask instead of evicting hold all their bytes, which
the table says.
"""

import argparse
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from tqdm import tqdm

from benchmarks.running import load, options, read_texts, show, token_ids, write
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill, hidden_entries
from kvpress_prob.records import NO_PRESS

TOP_K = ("h2o", "snapkv", "tova", "expected_attention", "adakv_snapkv", "compactor", "kvzip", "prob_kvzip")
PRESSES = ("prob_best", "prob_fast", "prob_min_h", *TOP_K)


def spec(press: str) -> PressSpec:
    """A press by name, with options in brackets."""
    name, _, options = press.rstrip(")").partition("(")
    pairs = (option.split("=", 1) for option in options.split(", ") if option)
    return PressSpec(name, {key: yaml.safe_load(value) for key, value in pairs})


def read_on(model: Any, row: Compressed, context: int, following: Tensor) -> Tensor:
    """Log-probabilities [n vocabulary] after each of the following tokens [1, n]."""
    positions = torch.arange(context, context + following.shape[1]).unsqueeze(0)
    with hidden_entries(row.masked):
        logits = model(following, past_key_values=row.cache, position_ids=positions).logits
    return logits.squeeze(0).float().log_softmax(-1)


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a text, press and ratio."""
    model, tokenizer = load(arguments.model)
    texts = token_ids(tokenizer, read_texts(arguments.text), arguments.tokens + arguments.next)
    rows = []
    for name, ids in tqdm(texts.items(), unit="text"):
        context, following = ids[:, : arguments.tokens], ids[:, arguments.tokens :]
        shared = SharedPrefill.run(model, context)
        dense = read_on(model, compressor(None, shared).compress(0.0, None), arguments.tokens, following)
        for press in arguments.press:
            mine = compressor(spec(press).build(), shared)
            for ratio in arguments.ratios:
                row = mine.compress(ratio, arguments.seed)
                held = row.nbytes / shared.nbytes
                log_p = read_on(model, row, arguments.tokens, following)
                divergence = float(F.kl_div(log_p, dense, log_target=True, reduction="batchmean"))
                rows.append({"text": name, "press": press, "ratio": ratio, "kl": divergence, "bytes_over_dense": held})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = options("text_fidelity", __doc__, tokens=1024)
    parser.add_argument("--next", type=int, default=128, help="tokens that are read on (default: 128)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--press", nargs="+", default=list(PRESSES), help=f"names, {NO_PRESS} excepted")
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    frame = pd.DataFrame(rows)
    table = frame.pivot_table(index="press", columns="ratio", values="kl", sort=False)
    show(f"KL to dense of the next {arguments.next} tokens, mean of {frame['text'].nunique()} texts", table, 5)
    baselines = [press for press in arguments.press if press in TOP_K]
    if baselines:
        show("the same over the best top-k press", table / table.loc[baselines].min(), 3)
    held = frame.pivot_table(index="press", columns="ratio", values="bytes_over_dense", sort=False)
    show("bytes held, over dense", held, 3)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
