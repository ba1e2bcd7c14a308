"""A long life: many contexts through one press and one model, then many tokens on one cache (``make soak``).

What must hold: resident memory is flat, no Python object outlives its context, and a late step is as fast as a step on
a fresh cache of the same size.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob import load_compressed, save_compressed
from kvpress_prob.hf import cache_bytes
from tests.helpers.compare import compress, press_of
from tests.helpers.models import tiny_llama, tokens


@dataclass(frozen=True)
class State:
    """What the process holds: bytes resident, bytes of the cache in use, Python objects, tensors."""

    resident: int
    cache: int
    objects: int
    tensors: int


def state(cache: DynamicCache | None = None) -> State:
    gc.collect()
    objects = gc.get_objects()
    return State(
        resident=psutil.Process().memory_info().rss,
        cache=0 if cache is None else cache_bytes(cache),
        objects=len(objects),
        tensors=sum(issubclass(type(it), torch.Tensor) for it in objects),
    )


def contexts(model: PreTrainedModel, count: int, longest: int) -> tuple[State, State]:
    """Compress ``count`` contexts of random length and ask each something; the states after a fifth and at the end."""
    press, lengths = press_of(0.5), random.Random(0)
    early = None
    for index in range(count):
        cache = compress(model, tokens(lengths.randint(1, longest), seed=index), press)
        for step in (5, 1, 1):
            model(tokens(step, seed=step), past_key_values=cache)
        del cache
        if index == count // 5:
            early = state()
    assert early is not None
    return early, state()


def decoding(model: PreTrainedModel, count: int, context: int = 200) -> tuple[State, State, float]:
    """Decode ``count`` tokens on one cache; the states after a fifth and at the end, and how much longer the last steps
    take than steps on a fresh cache with the same entries."""
    cache = compress(model, tokens(context), press_of(0.5))
    early = None
    for index in range(count):
        model(tokens(1, seed=index), past_key_values=cache)
        if index == count // 5:
            early = state(cache)
    late = state(cache)
    with tempfile.TemporaryDirectory() as folder:
        save_compressed(cache, Path(folder) / "cache")
        fresh = load_compressed(Path(folder) / "cache")
    steps = {"grown": cache, "fresh": fresh}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(20):
        for name, it in steps.items():
            begin = time.perf_counter()
            model(tokens(1), past_key_values=it)
            best[name] = min(best[name], time.perf_counter() - begin)
    assert early is not None
    return early, late, best["grown"] / best["fresh"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    model = tiny_llama(layers=4)
    early, late = contexts(model, arguments.contexts, longest=1500)
    growth = late.resident / early.resident - 1
    print(
        f"{arguments.contexts} contexts: resident memory {early.resident / 1e6:.0f} -> {late.resident / 1e6:.0f} MB "
        f"({growth:+.2%}), objects {late.objects - early.objects:+d}, tensors {late.tensors - early.tensors:+d}"
    )
    ok = growth < 0.02 and late.objects - early.objects < 50 and late.tensors == early.tensors

    early, late, slower = decoding(model, arguments.tokens)
    growth = (late.resident - late.cache) / (early.resident - early.cache) - 1
    print(
        f"{arguments.tokens} tokens: cache {early.cache / 1e6:.1f} -> {late.cache / 1e6:.1f} MB, the rest "
        f"{growth:+.2%}, objects {late.objects - early.objects:+d}, tensors {late.tensors - early.tensors:+d}, "
        f"last steps take {slower:.2f} of the time on a fresh cache of the same entries"
    )
    ok = ok and growth < 0.02 and late.objects - early.objects < 50 and late.tensors == early.tensors and slower < 1.2
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
