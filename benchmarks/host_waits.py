"""What makes a GPU wait for the host, counted without one: ``python -m benchmarks.host_waits``.

A *read* brings a value back to the host: ``.item()``, ``bool(tensor)``, ``.tolist()``, ``torch.equal``, ``nonzero``,
``unique``, ``repeat_interleave`` without a size, boolean indexing, a copy to the CPU. An *operation* is a call of a
torch operator. Both are counted where this package makes them, in a small model of random weights on the CPU, by phase;
what transformers and torch do by themselves is not. Tensors that were made without a device, or copied to the host
before, are on the host: looking at them waits for nothing. The package's own operators (``torch.ops.kvpress_prob``) are
one operation each; on a GPU their bodies are kernels.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.running import RESULTS, show, write
from kvpress_prob import MinVariancePress, ProbabilisticPress
from kvpress_prob.maths import binomial

PACKAGE, ELSEWHERE = "/kvpress_prob/", ("/transformers/", "/kvpress/")
READS_OF_VALUES = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim",
                   "unique_consecutive", "bincount"}  # fmt: skip


@dataclass
class Counts:
    """Reads and operations of the package, by phase; ``where`` counts the lines that read."""

    reads: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    where: Counter[tuple[str, str]] = field(default_factory=Counter)


def _caller() -> tuple[str, str] | None:
    """Phase and line of the innermost frame of the package, or None when transformers or kvpress called."""
    frame, line, phase = sys._getframe(2), None, "running"
    while frame is not None:
        name = frame.f_code.co_filename
        if line is None:
            if PACKAGE in name:
                line = f"{name.split(PACKAGE)[1]}:{frame.f_lineno}"
            elif any(part in name for part in ELSEWHERE):
                return None
        if frame.f_code.co_name == "after_model":
            phase = "after the prefill"
        frame = frame.f_back
    return None if line is None else (phase, line)


class _Counter:
    def __init__(self) -> None:
        self.counts = Counts()
        self.on_host = WeakTensorKeyDictionary()
        self.inside = False  # the body of one of the package's operators

    def read(self, tensors: list[Tensor]) -> None:
        caller = _caller()
        if self.inside or caller is None or all(tensor in self.on_host for tensor in tensors):
            return
        self.counts.reads[caller[0]] += 1
        self.counts.where[caller] += 1

    def made(self, result: Any, tensors: list[Tensor], host: bool) -> None:
        """``result`` is on the host if what it was made of is."""
        if host if not tensors else all(tensor in self.on_host for tensor in tensors):
            for tensor in _tensors(result):
                self.on_host[tensor] = True


class _Functions(TorchFunctionMode):
    """Sees what never becomes an operator: lists, and copies to the CPU, which is where everything is."""

    def __init__(self, counter: _Counter) -> None:
        self.counter = counter

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument in args:
            if not isinstance(argument, Tensor) and hasattr(type(argument), "__torch_function__"):
                # A compressed layer's keys take the call over; torch would do this with the mode switched off.
                with self:
                    return type(argument).__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "")
        tensors = _tensors((args, kwargs))
        to_host = name in ("cpu", "numpy") or (name == "to" and "cpu" in (*args[1:2], kwargs.get("device")))
        if name == "tolist" or to_host:
            self.counter.read(tensors[:1])
        result = func(*args, **kwargs)
        if to_host and isinstance(result, Tensor):
            result = result.clone()
            self.counter.on_host[result] = True
        elif not tensors:
            self.counter.made(result, tensors, host=kwargs.get("device") in (None, "cpu"))
        return result


class _Operations(TorchDispatchMode):
    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        counter = self.counter
        namespace, name = func.name().split("::")[0], func.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        caller = _caller()
        if caller is not None and not counter.inside and not all(tensor in counter.on_host for tensor in tensors):
            counter.counts.operations[caller[0]] += 1
        boolean = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            it is not None and it.dtype in (torch.bool, torch.uint8) for it in args[1]
        )
        sizeless = name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
        if name in READS_OF_VALUES or boolean or sizeless:
            counter.read(tensors)
        if namespace == "kvpress_prob":
            counter.inside = True
            try:
                return func(*args, **kwargs)
            finally:
                counter.inside = False
        result = func(*args, **kwargs)
        if tensors:
            counter.made(result, tensors, host=False)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def counted() -> Iterator[Counts]:
    """Count what the package does inside the block."""
    counter = _Counter()
    narrowing, binomial.NARROWING = binomial.NARROWING, ()  # as on a device that is not the host
    try:
        with _Functions(counter), _Operations(counter):
            yield counter.counts
    finally:
        binomial.NARROWING = narrowing


def model(layers: int, attention: str) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def inputs(tokens: int, batch: int, padded: int) -> dict[str, Tensor]:
    """Random tokens and their mask, on the device."""
    ids = torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compressed(llama: LlamaForCausalLM, press: ProbabilisticPress, given: dict[str, Tensor]) -> DynamicCache:
    """The compressed cache of a prefill."""
    cache = DynamicCache()
    with press(llama):
        llama(**given, past_key_values=cache, logits_to_keep=1)
    return cache


def decoding(layers: int, attention: str, batch: int, padded: int) -> Counts:
    """One token after another has made room."""
    llama = model(layers, attention)
    given = inputs(64, batch, padded)
    cache, mask = compressed(llama, PRESSES["all rows"](), given), given["attention_mask"]
    token = torch.ones(batch, 1, dtype=torch.long)
    mask, later = (torch.nn.functional.pad(mask, (0, more), value=1) for more in (1, 2))
    llama(input_ids=token, past_key_values=cache, attention_mask=mask)
    with counted() as counts:
        llama(input_ids=token, past_key_values=cache, attention_mask=later)
    return counts


def prefill(
    layers: int, press: Callable[[], ProbabilisticPress], tokens: int = 300, batch: int = 1, padded: int = 0
) -> Counts:
    llama, made, given = model(layers, "sdpa"), press(), inputs(tokens, batch, padded)
    with counted() as counts:
        compressed(llama, made, given)
    return counts


def reordering(layers: int) -> Counts:
    """Beams change places."""
    llama = model(layers, "sdpa")
    cache = compressed(llama, PRESSES["all rows"](), inputs(64, 2, 0))
    beams = torch.tensor([1, 1])
    with counted() as counts:
        cache.reorder_cache(cast(Any, beams))
    return counts


PRESSES: dict[str, Callable[[], ProbabilisticPress]] = {
    "all rows": lambda: ProbabilisticPress(MinVariancePress(), 0.5, seed=0),
    "max_rows=64": lambda: ProbabilisticPress(MinVariancePress(max_rows=64), 0.5, seed=0),
    "multinomial": lambda: ProbabilisticPress(
        MinVariancePress(), 0.5, sampler="multinomial", correction="counts", seed=0
    ),
}


@torch.no_grad()
def measure(layers: int = 4) -> list[dict[str, Any]]:
    """Rows of the table. Figures *a layer* are the difference that ``layers`` further layers make."""
    rows = []

    def add(phase: str, counts: list[Counts], at: str) -> None:
        few, many = counts
        rows.append(
            {
                "phase": phase,
                "reads": few.reads[at],
                "reads a layer": (many.reads[at] - few.reads[at]) / layers,
                "operations": few.operations[at],
                "operations a layer": (many.operations[at] - few.operations[at]) / layers,
            }
        )

    for name, arguments in (
        ("sdpa", ("sdpa", 1, 0)),
        ("eager", ("eager", 1, 0)),
        ("padded batch, sdpa", ("sdpa", 2, 5)),
        ("padded batch, eager", ("eager", 2, 5)),
    ):
        add(f"decode a token: {name}", [decoding(n, *arguments) for n in (layers, 2 * layers)], "running")
    for name, press in PRESSES.items():
        counts = [prefill(n, press) for n in (layers, 2 * layers)]
        add(f"during a prefill: {name}", counts, "running")
        add(f"after a prefill: {name}", counts, "after the prefill")
    counts = [prefill(n, PRESSES["all rows"], batch=2, padded=7) for n in (layers, 2 * layers)]
    add("during a prefill: padded batch", counts, "running")
    add("after a prefill: padded batch", counts, "after the prefill")
    add("re-ordering beams", [reordering(n) for n in (layers, 2 * layers)], "running")
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_waits", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, nargs="?", const=RESULTS / "host_waits.jsonl", help="write JSON lines")
    parser.set_defaults(text=[])
    arguments = parser.parse_args(argv)
    rows = measure(arguments.layers)
    show(f"a model of {arguments.layers} layers", pd.DataFrame(rows).set_index("phase"), 1)
    write(arguments.output, rows, arguments)


if __name__ == "__main__":
    main()
