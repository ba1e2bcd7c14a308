"""What surrogates are measured on, gathered once: ``python -m benchmarks.surrogate_data FOLDER --windows 48``.

Every item is a prefill and a reconstruction of it: hidden states of all layers, several statistics over the repeated
rows, and the reading scores. Windows of the texts that ``kvpress-prob fit`` takes by default carry their domain; rows
in kvpress' schema (``--rows``, the tune half of ``benchmarks.halves``) carry keys, values, question and answers too, so
that they can be compressed and answered without another prefill. ``benchmarks.surrogates`` reads the folder.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from kvpress import KVgradPress, KVPressTextGenerationPipeline
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from kvpress_prob import Reconstruction
from kvpress_prob.fitting.targets import read_window
from kvpress_prob.fitting.texts import DOMAINS
from kvpress_prob.fitting.windows import cut_windows
from kvpress_prob.hf import decoder_of
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.sources import QueryRows

GRADIENT = "gradient"
STATISTICS = ("max", "max_output", "max_change", "rms", "mean", "l4", "group_mean", GRADIENT)
"""Over the repeated rows ``p_j`` of the query heads of a group: the largest ``p_j(i)`` (``prob_best``), the largest
``p_j(i) |W_O v_i| / |x_j|`` (KVzip+), the largest change of an output ``p / (1 - p) |o_j - v_i|``, root mean square,
mean, fourth root of the mean fourth power, and the mean over the heads of each head's largest; all but that one take
the largest over the heads. ``gradient`` is kvpress' KVgrad, of a replay of its own: attention times the norms of what
the entry writes and of the gradient that arrives there."""


class Statistics:
    """Statistics of a reconstruction, all from one pass; rows by entries in memory, a head at a time."""

    def __init__(self, model: Any, context: int):
        self.layers: list[nn.Module] = [layer.self_attn for layer in decoder_of(model).layers]
        self.context = context
        self.norms: dict[int, Tensor] = {}  # [n] of what enters a layer's attention
        self.found: dict[int, dict[str, Tensor]] = {}

    def note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A forward pre-hook."""
        states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.norms[int(module.layer_idx)] = states[0].norm(dim=-1)  # pyright: ignore[reportArgumentType]

    def visit(self, layer: int, rows: QueryRows) -> Tensor:
        """A ``Visit``."""
        query, keys, values = rows.query[0], rows.keys[0], rows.values[0]
        heads, n, width = query.shape
        group, entries = heads // len(keys), keys.shape[1]
        hidden = torch.arange(entries) > torch.arange(entries - n, entries).unsqueeze(-1)
        output_weight: Any = self.layers[layer].o_proj.weight  # pyright: ignore[reportAttributeAccessIssue]
        outputs, parts = [], {name: [] for name in STATISTICS if name not in ("group_mean", GRADIENT)}
        for head in range(heads):
            logits = rows.scaling * query[head] @ keys[head // group].T
            p = torch.softmax(logits.masked_fill_(hidden, -torch.inf), -1)
            outputs.append(p @ values[head // group])
            p, v = p[:, : self.context], values[head // group, : self.context]
            written = (v @ output_weight[:, head * width : (head + 1) * width].T).norm(dim=-1)
            distance = torch.cdist(outputs[-1], v)
            parts["max"].append(p.amax(0))
            parts["max_output"].append((p / self.norms[layer].unsqueeze(-1)).amax(0) * written)
            parts["max_change"].append((p / (1 - p).clamp(min=1e-4) * distance).amax(0))
            parts["rms"].append(p.square().mean(0).sqrt())
            parts["mean"].append(p.mean(0))
            parts["l4"].append(p.square().square().mean(0).sqrt().sqrt())
        by_group = {name: torch.stack(it).unflatten(0, (-1, group)) for name, it in parts.items()}
        self.found[layer] = {name: it.amax(1) for name, it in by_group.items()}
        self.found[layer]["group_mean"] = by_group["max"].mean(1)
        return torch.stack(outputs).unsqueeze(0)


class Gradients(KVgradPress):
    """kvpress' KVgrad of a whole context, which keeps its scores [layers hkv n] and evicts nothing."""

    found: Tensor

    def _perform_kvzip_compression(self, model: Any, tokenizer: Any) -> None:
        self.prefix_length = 0  # of a chat's beginning, which windows do not have
        super()._perform_kvzip_compression(model, tokenizer)

    def compress_post(self, model: Any) -> None:
        self.found = cast(Tensor, self.score_val)[:, 0].clone()

    @classmethod
    def of(cls, model: Any, ids: Tensor) -> Tensor:
        press = cls(compression_ratio=0.5)
        with press(model):
            model.model(input_ids=ids.unsqueeze(0), past_key_values=DynamicCache())
        return press.found


@torch.inference_mode()
def gather(model: Any, ids: Tensor, *, cache: bool) -> dict[str, Any]:
    """One context [n]: hidden states [layers n hidden] in half precision, scores [layers hkv n]."""
    inputs = read_window(model, ids)
    statistics = Statistics(model, len(ids))
    hooks = [it.register_forward_pre_hook(statistics.note, with_kwargs=True) for it in statistics.layers]
    try:
        Reconstruction().run(inputs.prefill, statistics.visit)
    finally:
        for hook in hooks:
            hook.remove()
    layers = inputs.prefill.layers
    item: dict[str, Any] = {
        "ids": ids,
        "hidden": torch.stack([inputs.hidden[layer] for layer in layers]).half(),
        "reading": torch.stack([inputs.reading[layer] for layer in layers]).float(),
        **{it: torch.stack([statistics.found[layer][it] for layer in layers]) for it in statistics.found[layers[0]]},
        GRADIENT: Gradients.of(model, ids),
    }
    if cache:
        held: Any = inputs.prefill.cache.layers
        item |= {name: torch.stack([getattr(held[layer], name)[0] for layer in layers]) for name in ("keys", "values")}
        item["last_hidden_state"] = inputs.prefill.last_hidden_state
    return item


def windows(pipe: KVPressTextGenerationPipeline, count: int, size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The windows that a fit reads by default, with their domains."""
    cut = cut_windows(pipe.tokenizer, None, tokens=count * size, window=size)  # pyright: ignore[reportArgumentType]
    for number, ids in enumerate(cut.ids):
        yield f"window-{number:03d}", {"ids": ids, "domain": DOMAINS[number % len(DOMAINS)]}


def examples(pipe: KVPressTextGenerationPipeline, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows in kvpress' schema."""
    for number, row in enumerate(pd.read_json(path, lines=True, dtype=False).to_dict("records")):  # pyright: ignore
        inputs = pipe.preprocess(row["context"], [row["question"]], row["answer_prefix"], int(1e10))
        asked = {"question": inputs["questions_ids"][0], "row": row}
        yield f"{path.stem}-{number:03d}", {"ids": inputs["context_ids"][0], "domain": row["task"], **asked}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--windows", type=int, default=0, help="windows of the default texts")
    parser.add_argument("--size", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help="JSON Lines files in kvpress' schema")
    options = parser.parse_args(argv)
    pipe = load_pipeline(options.model)
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = list(windows(pipe, options.windows, options.size)) if options.windows else []
    wanted += [it for path in options.rows for it in examples(pipe, path)]
    for name, item in tqdm(wanted, unit="item"):
        path = options.folder / f"{name}.pt"
        if not path.exists():
            torch.save({**item, **gather(pipe.model, item["ids"], cache="row" in item)}, path)


if __name__ == "__main__":
    main()
