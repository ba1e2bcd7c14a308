"""What a cache that is bounded at all times costs and keeps: ``python -m benchmarks.bounded``.

memory   largest bytes of the cache in a prefill of ``--tokens`` tokens by a budget of ``--entries``, over those of the
         budget and one chunk, and over the dense cache's
time     the same prefill, and one of 2,048 tokens by half the entries, over a dense prefill in the same rounds
text     KL(dense || bounded) of the next tokens of running text, over one draw of the same press at the same ratio
ruler    answers about RULER contexts (``--data``), over one draw at the same ratio and beside kvpress' top-k; without
         ``--room`` question and answer are within the budget, which one draw has on top
turns    a conversation that grows past its budget: bytes, and answers about facts of its first turn
long     a tiny model, ``--long`` tokens through 512 entries: bytes and time a chunk
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from kvpress import KVPressTextGenerationPipeline, SnapKVPress
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.running import interleaved, load, medians, options, read_texts, show, token_ids, write
from kvpress_prob import (
    CacheBudget,
    Component,
    H2OPress,
    MinVariancePress,
    ProbabilisticPress,
    SurrogatePress,
    make_press,
)
from kvpress_prob.examples.loading import load_examples
from kvpress_prob.examples.metrics import score_prediction
from kvpress_prob.hf import cache_bytes

PARTS = ("memory", "time", "text", "ruler", "turns", "long")
INTERVAL = 16


def budget(entries: int, chunk: int | None, room: int = 0) -> CacheBudget:
    return CacheBudget(entries + room, chunk_size=chunk, interval=INTERVAL, room=room)


def lookup(ratio: float = 0.0, **settings: Any) -> ProbabilisticPress:
    """A surrogate's scores, which never change."""
    press = SurrogatePress()
    return ProbabilisticPress(press, ratio, budget_weighting="score", proposal_temperature=0.25, n_sink=4, n_recent=64,
                              max_weight=5.0, **settings)  # fmt: skip


def reading(ratio: float = 0.0, **settings: Any) -> ProbabilisticPress:
    """What the newest rows attend to, which changes."""
    return ProbabilisticPress(MinVariancePress(), ratio, n_sink=4, **settings)


def accumulated(ratio: float = 0.0, **settings: Any) -> ProbabilisticPress:
    """What the newest rows attend to, every row counting alike."""
    return ProbabilisticPress(H2OPress(), ratio, n_sink=4, **settings)


def union(ratio: float = 0.0, **settings: Any) -> ProbabilisticPress:
    """A surrogate's scores and what the newest rows attend to, half of the budget each."""
    parts = [
        Component(SurrogatePress(), 0.5, budget_weighting="score", proposal_temperature=0.25),
        Component(MinVariancePress(), 0.5),
    ]
    return ProbabilisticPress(parts, ratio, n_sink=4, max_weight=5.0, **settings)


def learned(ratio: float = 0.8, **settings: Any) -> ProbabilisticPress:
    """``prob_learned``: the same two by its own shares, and 64 rows."""
    return cast(ProbabilisticPress, make_press("prob_learned", ratio, **settings))


PRESSES: dict[str, Callable[..., ProbabilisticPress]] = {
    "lookup": lookup, "reading": reading, "accumulated": accumulated, "union": union, "learned": learned
}  # fmt: skip


def chunked(model: Any, ids: Tensor, press: ProbabilisticPress | None, chunk: int) -> Iterator[DynamicCache]:
    """The cache after every chunk, before and after what the press evicts; None is a dense prefill at once."""
    cache = DynamicCache()
    if press is None:
        model(ids, past_key_values=cache, logits_to_keep=1)
        yield cache
        return
    with press(model):
        for begin in range(0, ids.shape[1], chunk):
            model(ids[:, begin : begin + chunk], past_key_values=cache, logits_to_keep=1)
            yield cache


def prefill(model: Any, ids: Tensor, press: ProbabilisticPress | None, chunk: int = 512) -> DynamicCache:
    *_, cache = chunked(model, ids, press, chunk)
    return cache


def memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The largest bytes are those after a chunk's last layer and before anything is evicted."""
    model, tokenizer = load(arguments.model)
    ids = long_ids(tokenizer, arguments)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    entry = 2 * width * next(model.parameters()).element_size() * heads * model.config.num_hidden_layers
    rows = []
    for name in arguments.press:
        press = PRESSES[name](budget=budget(arguments.entries, None), seed=arguments.seed)
        peaks: list[int] = []
        last = model.model.layers[-1].self_attn
        cache = DynamicCache()
        with press(model):
            # After the press' own hook on the last layer: the chunk is in every layer, nothing is evicted yet.
            handle = last.register_forward_hook(lambda *_, cache=cache, peaks=peaks: peaks.append(cache_bytes(cache)))
            for begin in range(0, ids.shape[1], arguments.chunk):
                model(ids[:, begin : begin + arguments.chunk], past_key_values=cache, logits_to_keep=1)
            handle.remove()
        wanted = entry * (arguments.entries + arguments.chunk)
        rows.append({"part": "memory", "press": name, "tokens": ids.shape[1], "peak_bytes": max(peaks),
                     "over_budget_and_chunk": max(peaks) / wanted, "over_dense": max(peaks) / (entry * ids.shape[1]),
                     "bytes_after": cache_bytes(cache)})  # fmt: skip
    return rows


def long_ids(tokenizer: Any, arguments: argparse.Namespace) -> Tensor:
    """The texts one after the other, repeated to the wanted length."""
    ids = tokenizer("\n\n".join(read_texts(arguments.text).values()), return_tensors="pt", verbose=False).input_ids
    return ids.repeat(1, -(-arguments.tokens // ids.shape[1]))[:, : arguments.tokens]


def timing(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Dense, and every press by the budget, one after the other in every round."""
    model, tokenizer = load(arguments.model)
    everything, rows = long_ids(tokenizer, arguments), []
    for tokens, entries in dict.fromkeys([(2048, 1024), (arguments.tokens, arguments.entries)]):
        ids = everything[:, :tokens]
        runs: dict[str, Callable[[], object]] = {"dense": partial(prefill, model, ids, None)}
        for name in arguments.press:
            press = PRESSES[name](budget=budget(entries, None), seed=arguments.seed)
            runs[name] = partial(prefill, model, ids, press, arguments.chunk)
        times = interleaved(runs, arguments.rounds)
        ms = medians(times)
        rows += [
            {"part": "time", "press": name, "tokens": ids.shape[1], "entries": entries, "ms": ms[name],
             "over_dense": statistics.median(a / b for a, b in zip(times[name], times["dense"], strict=True))}
            for name in runs
        ]  # fmt: skip
    return rows


def text(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both read the same texts; a budget of the same share of the tokens as one draw keeps."""
    model, tokenizer = load(arguments.model)
    tokens, rows = arguments.text_tokens, []
    texts = token_ids(tokenizer, read_texts(arguments.text), tokens + 128)
    for name, ids in tqdm(list(texts.items())[: arguments.texts], unit="text"):

        def read_on(press: ProbabilisticPress | None, chunk: int, ids: Tensor = ids) -> Tensor:
            cache = prefill(model, ids[:, :tokens], press, chunk)
            return model(ids[:, tokens:], past_key_values=cache).logits.squeeze(0).float().log_softmax(-1)

        dense = read_on(None, tokens)
        for press in arguments.press:
            for ratio in (0.5, 0.8):
                entries = round((1 - ratio) * tokens)
                once = PRESSES[press](ratio, seed=arguments.seed)
                within = replace(budget(entries, None), queries=arguments.queries)
                bounded = PRESSES[press](ratio, budget=within, seed=arguments.seed)
                kl = [
                    float(F.kl_div(read_on(it, chunk), dense, log_target=True, reduction="batchmean"))
                    for it, chunk in ((once, tokens), (bounded, arguments.text_chunk))
                ]
                rows.append({"part": "text", "press": press, "text": name, "ratio": ratio, "kl_once": kl[0],
                             "kl_bounded": kl[1]})  # fmt: skip
    return rows


def ruler(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """kvpress' pipeline, one question a context, which the press does not see."""
    model, tokenizer = load(arguments.model)
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=cast(Any, tokenizer))
    examples = load_examples("ruler", str(arguments.data), count_tokens=lambda it: len(tokenizer(it).input_ids),
                             tasks=arguments.tasks, examples_per_task=arguments.examples)  # fmt: skip
    rows = []
    for example in tqdm(examples, unit="example"):
        entries = len(tokenizer(example.context, verbose=False).input_ids) // 5
        fifth = partial(budget, entries, arguments.ruler_chunk, arguments.room)
        snapkv = ProbabilisticPress(
            SnapKVPress(), sampler="top_k", correction="none", allocation="head", n_sink=4, budget=fifth()
        )
        presses: list[tuple[str, int | None, ProbabilisticPress | None]] = [("dense", None, None)]
        for name in arguments.press:
            for seed in range(arguments.seed, arguments.seed + arguments.seeds):
                presses.append((f"{name}, one draw", seed, PRESSES[name](0.8, seed=seed)))
                presses.append((f"{name}, bounded", seed, PRESSES[name](budget=fifth(), seed=seed)))
            if arguments.top_k and len(PRESSES[name]().components) == 1:
                top_k = PRESSES[name](budget=fifth(), sampler="top_k", correction="none")
                presses.append((f"{name}, bounded, top-k", None, top_k))
        if arguments.top_k:
            presses.append(("snapkv, bounded, top-k", None, snapkv))
        for name, seed, press in presses:
            answer = pipe(example.context, question=example.question, answer_prefix=example.answer_prefix, press=press,
                          max_new_tokens=example.max_new_tokens)["answer"]  # fmt: skip
            score = score_prediction("ruler", example.task, answer, example.answers)
            rows.append({"part": "ruler", "press": name, "seed": seed, "task": example.task, "example": example.name,
                         "score": score, "answer": answer})  # fmt: skip
    return rows


def turns(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Twenty turns over one budget; the last one asks for what the first one said."""
    model, tokenizer = load(arguments.model)
    texts, rows = list(read_texts(arguments.text).values()), []
    for conversation in range(arguments.conversations):
        number = str(48_213 + 7_919 * conversation)
        said = [f"The special magic number for the harbour is {number}. Remember it."]
        said += [texts[turn % len(texts)][900 * conversation : 900 * conversation + 900] for turn in range(19)]
        entries = sum(len(tokenizer(it).input_ids) for it in said) // 4
        presses = {
            "dense": None,
            **{f"{name}, bounded": PRESSES[name](budget=budget(entries, 512), seed=0) for name in arguments.press},
            **{f"{name}, one draw of the first ten turns": PRESSES[name](0.75, seed=0) for name in arguments.press},
        }
        for name, press in presses.items():
            cache, peak = DynamicCache(), 0
            if press is None or press.budget is None:
                first = tokenizer("\n\n".join(said[:10]), return_tensors="pt").input_ids
                cache = prefill(model, first, press, first.shape[1])
                for turn in said[10:]:
                    model(tokenizer("\n\n" + turn, return_tensors="pt").input_ids, past_key_values=cache)
                    peak = max(peak, cache_bytes(cache))
            else:
                for turn in said:
                    with press(model):
                        model(tokenizer(turn + "\n\n", return_tensors="pt").input_ids, past_key_values=cache)
                    peak = max(peak, cache_bytes(cache))
            question = tokenizer("\n\nThe special magic number for the harbour mentioned above is",
                                 return_tensors="pt").input_ids  # fmt: skip
            answer = greedy(model, tokenizer, cache, question)
            rows.append({"part": "turns", "press": name, "conversation": conversation, "entries": entries,
                         "tokens": cache.get_seq_length(), "peak_bytes": peak, "right": number in answer,
                         "answer": answer})  # fmt: skip
    return rows


def greedy(model: Any, tokenizer: Any, cache: DynamicCache, ids: Tensor, steps: int = 10) -> str:
    chosen = []
    for _ in range(steps):
        ids = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        chosen.append(ids)
    return tokenizer.decode(torch.cat(chosen, 1)[0])


def long(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A random model of two layers: what grows would show here."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2**20)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    press, chunk = ProbabilisticPress(MinVariancePress(), budget=CacheBudget(512), seed=0), 512
    cache, milliseconds, held = DynamicCache(), [], []
    with press(model):
        for number in range(arguments.long // chunk):
            ids = torch.randint(0, 128, (1, chunk), generator=torch.Generator().manual_seed(number))
            begin = time.perf_counter()
            model(ids, past_key_values=cache, logits_to_keep=1)
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            held.append(cache_bytes(cache))
    tenth = max(len(held) // 10, 3)
    early, late = milliseconds[2 : 2 + tenth], milliseconds[-tenth:]
    return [
        {"part": "long", "tokens": cache.get_seq_length(), "largest_bytes": max(held[2:]),
         "last_over_first_bytes": statistics.mean(held[-tenth:]) / statistics.mean(held[2 : 2 + tenth]),
         "last_over_first_time": statistics.median(late) / statistics.median(early),
         "ms_a_chunk": statistics.median(milliseconds)}
    ]  # fmt: skip


MEASURES = {"memory": memory, "time": timing, "text": text, "ruler": ruler, "turns": turns, "long": long}


def table(part: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """What is printed of a part."""
    frame = pd.DataFrame(rows).drop(columns=["part"])
    if part == "text":
        means = frame.groupby(["press", "ratio"], sort=False)[["kl_once", "kl_bounded"]].mean()
        return means.assign(over_once=means["kl_bounded"] / means["kl_once"])
    if part == "ruler":
        scores = frame.pivot_table(index="press", columns="task", values="score", sort=False)
        return scores.assign(mean=scores.mean(axis=1))
    if part == "turns":
        return frame.groupby("press", sort=False)[["tokens", "entries", "peak_bytes", "right"]].mean()
    return frame


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = options("bounded", __doc__, tokens=8000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all; ruler only with --data")
    parser.add_argument("--press", nargs="+", choices=sorted(PRESSES), default=list(PRESSES))
    parser.add_argument("--entries", type=int, default=1024, help="budget of memory and time")
    parser.add_argument("--chunk", type=int, default=512, help="chunks of memory and time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--text-tokens", type=int, default=1024, help="context of text")
    parser.add_argument("--queries", type=int, default=32, help="newest rows that text's budget reads")
    parser.add_argument("--text-chunk", type=int, default=128, help="chunks of text")
    parser.add_argument("--data", type=Path, help="RULER rows")
    parser.add_argument("--tasks", nargs="+", help="of RULER (default: all)")
    parser.add_argument("--examples", type=int, default=2, help="of each task")
    parser.add_argument("--ruler-chunk", type=int, default=256, help="chunks of ruler")
    parser.add_argument("--top-k", action=argparse.BooleanOptionalAction, default=True, help="in ruler, too")
    parser.add_argument("--room", type=int, default=0, help="entries that ruler's budget has on top, for the answer")
    parser.add_argument("--seeds", type=int, default=3, help="of each draw")
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--long", type=int, default=200_000, help="tokens of the tiny model")
    arguments = parser.parse_args(argv)
    parts = arguments.parts or [part for part in PARTS if part != "ruler" or arguments.data]
    if "ruler" in parts and arguments.data is None:
        parser.error("ruler needs --data")
    rows = []
    for part in parts:
        mine = MEASURES[part](arguments)
        show(part, table(part, mine), 3)
        rows += mine
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
