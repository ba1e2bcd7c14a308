"""The demo: one text, one dense prefill, and what is left of both under every press and ratio.

The last tokens of the text are held back; the rest is the context. For every compressed copy of the context's cache::

    divergence    mean over the held-back tokens x_1 .. x_n of KL(dense || compressed), the two next-token distributions
                  after x_1 .. x_i, in nats; the text is fed token by token, whatever the model would have said
    step          median time of those n forward passes: one token over one cache
    answers       greedy answers to the questions, as kvpress' pipeline gives them

Every use starts from a freshly compressed cache (a seed draws the same entries again), so none sees another's tokens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from kvpress import KVPressTextGenerationPipeline
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from kvpress_prob.hf import RaggedLayer
from kvpress_prob.prefills.compressors import Compressor, compressor
from kvpress_prob.prefills.decoding import decode_single
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.prefills.shared_prefill import SharedPrefill, now
from kvpress_prob.records import NO_PRESS
from kvpress_prob.values import check_count, check_ratios, check_seeds

SHOWN = ("prob_learned", "snapkv", "h2o", "prob_min_h", "prob_best")
NEEDS_SURROGATE = "prob_learned"
QUESTIONS = ("What is the access code of the red cabinet?", "Who is the present observer?")
"""About the package's own text; the first one asks for the planted fact."""
ANY_TEXT = ("What is the text about?",)
MIN_CONTEXT = 128
"""Tokens; SnapKV needs more than its window of 64."""
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class DemoRow:
    """One press at one ratio.

    Attributes
    ----------
    press : str
    ratio, achieved_ratio : float
        Wanted and evicted fraction of the entries of full-attention layers.
    divergence : float
        Nats a token.
    dense_bytes, cache_bytes : int
        Measured on the storages of the cache before and after.
    step_ms : float
    answers : list of str
        In the order of the questions.
    kept : Float[Tensor, "layers hkv"] or None
        Kept fraction of every head; None where heads cannot differ.
    """

    press: str
    ratio: float
    achieved_ratio: float
    divergence: float
    dense_bytes: int
    cache_bytes: int
    step_ms: float
    answers: list[str]
    kept: Tensor | None


def check_settings(ratios: list[float], seed: int, tokens: int) -> None:
    """Raise ``ValueError`` for numbers that a demo cannot be run with."""
    check_ratios(ratios, zero=False)
    check_seeds("seed", [seed])
    check_count("tokens", tokens)


def demo_text() -> str:
    """The package's own text: about 3,000 tokens of prose with a planted fact."""
    return files("kvpress_prob.demo").joinpath("text.txt").read_text(encoding="utf-8")


@torch.inference_mode()
def run_demo(
    pipe: KVPressTextGenerationPipeline,
    text: str,
    questions: list[str],
    *,
    ratios: list[float],
    seed: int,
    tokens: int,
    presses: Sequence[str] = SHOWN,
    progress: bool = True,
) -> list[DemoRow]:
    """Rows of the dense cache and of every press at every ratio.

    Parameters
    ----------
    pipe : KVPressTextGenerationPipeline
    text : str
    questions : list of str
    ratios : list of float
        In (0, 1).
    seed : int
        Of the presses that draw.
    tokens : int
        Held back at the end of the text, at least 1.
    presses : sequence of str
        Names of the registries.
    progress : bool, default=True

    Raises
    ------
    ValueError
        For a ratio, a seed or a number of tokens out of range, a ratio that comes twice, and for a text
        that is too short, or too long for the model.
    """
    check_settings(ratios, seed, tokens)
    context, following, question_ids = _tokenized(pipe, text, questions, tokens)
    settings = [(NO_PRESS, 0.0), *((press, ratio) for ratio in ratios for press in presses)]
    rows: list[DemoRow] = []
    with tqdm(total=1 + len(settings), desc="prefill", unit="cache", disable=not progress) as bar:
        shared = SharedPrefill.run(pipe.model, context)
        bar.update()
        compressors = {press: compressor(PressSpec(press).build(), shared) for press in (NO_PRESS, *presses)}
        dense = torch.empty(0)
        for press, ratio in settings:
            bar.set_description(f"{press}, r = {ratio:g}")
            compressed = compressors[press].compress(ratio, seed)
            cache_bytes, kept = compressed.nbytes, _kept_fractions(compressed.cache, shared.tokens)
            log_p, step_ms = _read_on(pipe.model, compressed.cache, shared.tokens, following)
            if press == NO_PRESS:
                dense = log_p
            rows.append(
                DemoRow(
                    press=press,
                    ratio=ratio,
                    achieved_ratio=statistics.fmean(compressed.layer_ratios),
                    divergence=float(F.kl_div(log_p, dense, log_target=True, reduction="batchmean")),
                    dense_bytes=shared.nbytes,
                    cache_bytes=cache_bytes,
                    step_ms=step_ms,
                    answers=[
                        _answer(pipe, compressors[press], ratio, seed, shared.tokens, ids) for ids in question_ids
                    ],
                    kept=kept,
                )
            )
            bar.update()
    return rows


def tabulate(rows: list[DemoRow]) -> pd.DataFrame:
    """One line a row; sizes in decimal megabytes."""
    return pd.DataFrame(
        {
            "press": [row.press for row in rows],
            "r": [row.ratio for row in rows],
            "achieved": [round(row.achieved_ratio, 4) for row in rows],
            "KL": [round(row.divergence, 5) for row in rows],
            "MB before": [round(row.dense_bytes / 1e6, 2) for row in rows],
            "MB after": [round(row.cache_bytes / 1e6, 2) for row in rows],
            "ms/token": [round(row.step_ms, 1) for row in rows],
            **{f"answer {i + 1}": [row.answers[i] for row in rows] for i in range(len(rows[0].answers))},
        }
    )


def _tokenized(
    pipe: KVPressTextGenerationPipeline, text: str, questions: list[str], tokens: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Context [1, t], held-back tokens [1, n] and questions, by the rules of kvpress' pipeline."""
    model: Any = pipe.model
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", int(1e10))
    # The context ends inside a sentence; without a break models read on instead of answering.
    inputs = pipe.preprocess(text, [f"\n\n{question}" for question in questions], "", int(1e10))
    ids, question_ids = inputs["context_ids"].to(model.device), inputs["questions_ids"]
    longest = ids.shape[1] + max((question.shape[1] for question in question_ids), default=0) + ANSWER_TOKENS
    if ids.shape[1] < MIN_CONTEXT + tokens:
        raise ValueError(f"text must have at least {MIN_CONTEXT} + {tokens} tokens, got {ids.shape[1]}")
    if longest > limit:
        raise ValueError(f"text and question must fit into the model's {limit} positions, got {longest} tokens")
    return ids[:, :-tokens], ids[:, -tokens:], [question.to(model.device) for question in question_ids]


def _read_on(model: Any, cache: DynamicCache, position: int, ids: Tensor) -> tuple[Tensor, float]:
    """Log-probabilities [n, vocabulary], float32, after each token of ``ids``, and the median milliseconds of a
    token."""
    log_p, times = [], []
    for step, token in enumerate(ids.split(1, dim=1)):
        begin = now(ids.device)
        position_ids = torch.tensor([[position + step]], device=ids.device)
        logits = model(input_ids=token, past_key_values=cache, position_ids=position_ids).logits
        times.append(now(ids.device) - begin)
        log_p.append(logits[0, -1].float().log_softmax(-1))
    return torch.stack(log_p), statistics.median(times)


def _answer(
    pipe: KVPressTextGenerationPipeline,
    press: Compressor,
    ratio: float,
    seed: int,
    context_length: int,
    question_ids: Tensor,
) -> str:
    compressed = press.compress(ratio, seed)
    return " ".join(decode_single(pipe, compressed, context_length, question_ids, ANSWER_TOKENS).text.split())


def _kept_fractions(cache: DynamicCache, tokens: int) -> Tensor | None:
    lengths = [layer.store.length for layer in cache.layers if isinstance(layer, RaggedLayer)]
    return torch.stack(lengths).cpu() / tokens if lengths else None
