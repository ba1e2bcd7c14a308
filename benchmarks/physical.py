"""kvpress' presses that hide entries, before and after ``PhysicalPress``: ``python -m benchmarks.physical``.

For each press: what its cache holds over the dense cache, milliseconds per token of the whole model while decoding, and
whether 32 greedy tokens are the same. DuoAttention has no downloaded pattern for most models: its heads are scored by
kvpress' own on-the-fly method, over the given texts instead of BookSum.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from kvpress import BasePress, DuoAttentionPress
from kvpress.presses import duo_attention_press
from torch import Tensor
from transformers import DynamicCache

from benchmarks.running import interleaved, load, medians, options, read_texts, show, token_ids, write
from kvpress_prob import PHYSICAL_PRESSES
from kvpress_prob.hf import cache_bytes

DENSE = "dense"
STEPS = 32
"""Greedy tokens that are compared."""
SAMPLES, WORDS = 20, 300
"""Texts that DuoAttention's heads are scored over, and words of each."""


def pressed(model: Any, ids: Tensor, press: BasePress | None) -> tuple[DynamicCache, dict[Any, Any]]:
    """The cache of a context, and what kvpress' attention is asked to hide of it."""
    cache = DynamicCache()
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.masked_key_indices = None
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    hidden = {module: module.masked_key_indices for module in modules}
    for module in modules:
        module.masked_key_indices = None
    return cache, hidden


@contextmanager
def hiding(hidden: dict[Any, Any]) -> Iterator[None]:
    for module, indices in hidden.items():
        module.masked_key_indices = indices
    try:
        yield
    finally:
        for module in hidden:
            module.masked_key_indices = None


def step(model: Any, cache: DynamicCache, hidden: dict[Any, Any], token: Tensor) -> Tensor:
    """One more token."""
    with hiding(hidden):
        return model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)


def answer(model: Any, cache: DynamicCache, hidden: dict[Any, Any], token: Tensor) -> list[int]:
    tokens = []
    for _ in range(STEPS):
        token = step(model, cache, hidden, token)
        tokens.append(int(token))
    return tokens


def duo_attention(press: DuoAttentionPress, texts: dict[str, str]) -> DuoAttentionPress:
    """Scored over the texts, with sinks and a window that fit contexts of two thousand tokens."""
    words = " ".join(texts.values()).split()
    pieces = [" ".join(words[begin : begin + WORDS]) for begin in range(0, len(words) - WORDS, WORDS)]
    frame = pd.DataFrame({"chapter": pieces[:SAMPLES]})
    book = SimpleNamespace(to_pandas=lambda: frame)
    scored = duo_attention_press.duo_attention_on_the_fly

    def pattern(model: Any) -> tuple[int, int, Any]:
        with patch.object(duo_attention_press, "load_dataset", lambda *_, **__: book):
            return 4, 64, scored(model, num_samples=len(frame))

    press.load_attention_pattern = pattern  # pyright: ignore[reportAttributeAccessIssue]
    return press


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Two rows a press, hidden and evicted; the dense cache first."""
    model, tokenizer = load(arguments.model)
    texts = read_texts(arguments.text)
    ids = next(iter(token_ids(tokenizer, texts, arguments.tokens + 1).values()))
    ids, token = ids[:, :-1], ids[:, -1:]
    caches: dict[tuple[str, str], tuple[DynamicCache, dict[Any, Any]]] = {(DENSE, ""): pressed(model, ids, None)}
    achieved = {DENSE: 0.0}
    for name in arguments.press:
        press = PHYSICAL_PRESSES[name]()
        if isinstance(press.press, DuoAttentionPress):
            duo_attention(press.press, texts)
        press.compression_ratio = arguments.ratio
        label = name.removesuffix("_physical")
        caches[label, "hidden"] = pressed(model, ids, press.press)
        caches[label, "evicted"] = pressed(model, ids, press)
        achieved[label] = press.report.achieved_ratio if press.report else 0.0
    size = {key: cache_bytes(cache) for key, (cache, _) in caches.items()}
    answers = {key: answer(model, cache, hidden, token) for key, (cache, hidden) in caches.items()}
    ms = medians(
        interleaved({key: partial(step, model, *parts, token) for key, parts in caches.items()}, arguments.rounds)
    )
    return [
        {"press": name, "way": way, "achieved_ratio": achieved[name], "bytes": size[name, way],
         "bytes_over_dense": size[name, way] / size[DENSE, ""], "ms": ms[name, way],
         "dense_over_it": ms[DENSE, ""] / ms[name, way],
         "same_tokens": answers[name, way] == answers[name, "hidden"] if way else True}
        for name, way in caches
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = options("physical", __doc__)
    parser.add_argument("--ratio", type=float, default=0.75)
    parser.add_argument(
        "--press", nargs="*", default=[name for name in PHYSICAL_PRESSES if name != "kvgrad_physical"],
        help="names of the registry (default: all but KVgrad's, which takes minutes)"
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    rows = measure(arguments)
    table = pd.DataFrame(rows).set_index(["press", "way"])
    show(f"{arguments.tokens} tokens, ratio {arguments.ratio}, median of {arguments.rounds} rounds", table, 3)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
