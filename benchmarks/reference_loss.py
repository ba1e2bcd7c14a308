"""Loss of the reference answer over a compressed context: ``python -m benchmarks.reference_loss --data FOLDER``.

A small model rarely writes LongBench's answers out, so exact answers say little about a press on it. The loss needs no
answer of the model: a context is prefilled once, every press compresses a copy of its cache to a number of entries a
head, and question and reference answer are read over what is left. A row's figure is the mean negative
log-likelihood of the answer's tokens, in nats; with several accepted answers the most likely one counts. Presses are
compared with the dense cache on the same rows; intervals resample contexts.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.running import options, show, write
from benchmarks.text_fidelity import read_on, spec
from kvpress_prob.examples.loading import load_examples
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.compressors import compressor
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill
from kvpress_prob.records import NO_PRESS, Example

PRESSES = ("prob_best", "prob_fast", "prob_min_h", "prob_kvzip", "snapkv", "h2o", "tova", "expected_attention", "kvzip")
RESAMPLES = 2000


def loss(model: Any, row: Compressed, context: int, question: Tensor, answers: list[Tensor]) -> float:
    """Nats a token of the likeliest answer [1, n] after the question [1, m]; every answer is dropped from the cache
    again."""
    losses = []
    for answer in answers:
        following = torch.cat((question, answer), 1)
        log_p = read_on(model, row, context, following[:, :-1])[-answer.shape[1] :]
        losses.append(-float(log_p.gather(-1, answer.T).mean()))
        for layer in row.cache.layers:
            layer.crop(layer.get_seq_length() - (following.shape[1] - 1))  # pyright: ignore[reportAttributeAccessIssue]
    return min(losses)


def tokenized(pipe: Any, example: Example) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Context, question with answer prefix, and answers, by the rules of kvpress' pipeline."""
    inputs = pipe.preprocess(example.context, [example.question], example.answer_prefix, int(1e10))
    encode = pipe.tokenizer.encode
    answers = [encode(f" {answer}", return_tensors="pt", add_special_tokens=False) for answer in example.answers]
    return inputs["context_ids"], inputs["questions_ids"][0], [answer for answer in answers if answer.shape[1]]


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row an example, press and number of entries."""
    pipe = load_pipeline(arguments.model)
    examples = load_examples(
        "longbench",
        str(arguments.data),
        count_tokens=lambda text: len(pipe.tokenizer.encode(text, add_special_tokens=False)),  # pyright: ignore
        examples_per_task=arguments.examples_per_task,
        max_context_tokens=arguments.tokens,
    )
    rows = []
    for example in tqdm(examples, unit="example"):
        context, question, answers = tokenized(pipe, example)
        shared = SharedPrefill.run(pipe.model, context)
        settings = [(NO_PRESS, None, 0.0)] + [
            (press, entries, 1 - entries / shared.tokens)
            for press in arguments.press
            for entries in arguments.entries
            if entries < shared.tokens
        ]
        presses = {press: compressor(spec(press).build(), shared) for press in (NO_PRESS, *arguments.press)}
        for press, entries, ratio in settings:
            row = presses[press].compress(ratio, arguments.seed)
            held = row.nbytes / shared.nbytes
            nats = loss(pipe.model, row, shared.tokens, question, answers)
            rows.append(
                {"example": example.name, "task": example.task, "press": press, "entries": entries, "ratio": ratio,
                 "loss": nats, "bytes_over_dense": held, "context_tokens": shared.tokens}
            )  # fmt: skip
    return rows


def tabulate(frame: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Mean loss of a press minus the dense cache's on the same examples, with a 95 % interval over contexts."""
    dense = frame[frame["press"] == NO_PRESS].set_index("example")["loss"]
    random = np.random.default_rng(seed)
    rows = []
    groups = frame[frame["press"] != NO_PRESS].groupby(["press", "entries"], sort=False)
    for (press, entries), part in cast(Any, groups):
        difference = (part.set_index("example")["loss"] - dense).dropna().to_numpy()
        means = random.choice(difference, (RESAMPLES, len(difference))).mean(1)
        low, high = np.quantile(means, (0.025, 0.975))
        rows.append(
            {"press": press, "entries": int(entries), "over dense": difference.mean(), "low": low, "high": high,
             "bytes": part["bytes_over_dense"].mean(), "examples": len(difference)}
        )  # fmt: skip
    return pd.DataFrame(rows).sort_values(["entries", "over dense"])


def main(argv: list[str] | None = None) -> None:
    parser = options("reference_loss", __doc__, tokens=3000)
    parser.add_argument("--data", type=Path, required=True, help="LongBench rows in kvpress' schema, file or folder")
    parser.add_argument("--examples-per-task", type=int, help="the first so many of each task")
    parser.add_argument("--entries", type=int, nargs="+", default=[64, 128, 256, 512], help="entries a head")
    parser.add_argument("--press", nargs="+", default=list(PRESSES), help=f"names, {NO_PRESS} excepted")
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    frame = pd.DataFrame(rows)
    show(
        f"dense: {frame.loc[frame['press'] == NO_PRESS, 'loss'].mean():.3f} nats a token; loss over it", tabulate(frame)
    )
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
