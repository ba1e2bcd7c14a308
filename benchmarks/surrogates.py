"""What a surrogate should predict, from what and from how much: ``python -m benchmarks.surrogates TABLE FOLDER``.

Reads a folder of ``benchmarks.surrogate_data``, so that no table needs another pass of the model. Tables:

    targets     R^2 and recall of linear read-outs by target, on held-out windows and on the rows
    tokens      the same by the number of windows they were fitted on
    domains     R^2 of read-outs of one domain, and of all but one, on every domain and on the rows
    layers      a linear read-out and two layers of 512, at three layers
    lengths     R^2 and recall of the model's own surrogate in longer contexts than it was fitted on (no folder)
    draws       scores of the rows when entries are drawn by a statistic of the pass, or by what predicts it

Every fifth window is held out. Recall is that of the largest scores of all heads and layers of a context together.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from benchmarks.running import load, read_texts, show, write
from benchmarks.surrogate_data import STATISTICS
from kvpress_prob.examples.metrics import score_prediction
from kvpress_prob.fitting.fit import HELD_OUT_EVERY, N_SINK, RIDGE
from kvpress_prob.fitting.targets import LEAST, PREDICTS, read_window
from kvpress_prob.fitting.targets import targets_of as targets_of_window
from kvpress_prob.hf import Prefill, cache_bytes
from kvpress_prob.maths.ridge import Moments, Readout, combined, moments, r_squared, solve_ridge, top_recall
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.decoding import RowBatch, decode_batch
from kvpress_prob.prefills.shared_prefill import Compressed, Costs, copied
from kvpress_prob.presses import make_press
from kvpress_prob.presses.scoring import LayerScores
from kvpress_prob.sources import find_surrogate

TARGETS = ("max", "max_output", "gradient", "reading")
ROWS = "rows"
Row = dict[str, Any]


def items(folder: Path, kind: str) -> Iterator[Row]:
    """Windows or rows, in order."""
    for path in sorted(folder.glob("*.pt")):
        if path.name.startswith("window-") == (kind == "window"):
            yield {"name": path.stem, **torch.load(path, weights_only=False)}


def targets_of(item: Row) -> Tensor:
    """Targets [layers n targets*hkv]."""
    parts = [item[name] * (item[name].shape[-1] if name == "reading" else 1) for name in TARGETS]
    return torch.cat([it.clamp(min=LEAST).log() for it in parts], 1).mT


def block(item: Row) -> Moments:
    return moments(item["hidden"][:, N_SINK:].float(), targets_of(item)[:, N_SINK:])


def added(sums: dict[Any, Moments], key: Any, new: Moments) -> None:
    sums[key] = combined(sums[key], new) if key in sums else new


def total(sums: dict[Any, Moments], wanted: Callable[[Any], bool]) -> Moments:
    chosen = [it for key, it in sums.items() if wanted(key)]
    whole = chosen[0]
    for it in chosen[1:]:
        whole = combined(whole, it)
    return whole


def gathered(folder: Path) -> dict[tuple[str, str, int], Moments]:
    """Moments by (domain, "train" or "held" or "rows", third of the windows)."""
    sums: dict[Any, Moments] = {}
    windows = len(list(folder.glob("window-*.pt")))
    for number, item in enumerate(tqdm(items(folder, "window"), total=windows, unit="window")):
        held = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        added(sums, (item["domain"], "held" if held else "train", 4 * number // windows), block(item))
    for item in items(folder, "row"):
        added(sums, (item["domain"], ROWS, 0), block(item))
    return sums


def r2(readout: Readout, known: Moments) -> dict[str, float]:
    """Mean R^2 over layers and heads, by target."""
    parts = r_squared(readout, known).chunk(len(TARGETS), -1)
    return {name: float(part.mean()) for name, part in zip(TARGETS, parts, strict=True)}


def recall(readout: Readout, chosen: Iterator[Row], fraction: float) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    for item in chosen:
        predicted = readout(item["hidden"].double())[:, N_SINK:].mT.chunk(len(TARGETS), 1)
        for name, part in zip(TARGETS, predicted, strict=True):
            found[name].append(top_recall(part, item[name][..., N_SINK:], fraction))
    return {name: sum(it) / len(it) for name, it in found.items()}


def held_windows(folder: Path) -> Iterator[Row]:
    for number, item in enumerate(items(folder, "window")):
        if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
            yield item


def targets(options: argparse.Namespace) -> list[Row]:
    sums = gathered(options.folder)
    readout = solve_ridge(total(sums, lambda key: key[1] == "train"), RIDGE)
    rows = []
    for place in ("held", ROWS):
        explained = r2(readout, total(sums, lambda key, place=place: key[1] == place))
        for fraction in (0.05, 0.1, 0.2, 0.5):
            chosen = held_windows(options.folder) if place == "held" else items(options.folder, "row")
            for name, value in recall(readout, chosen, fraction).items():
                rows.append({"target": name, "on": place, "r2": explained[name], "top": fraction, "recall": value})
    return rows


def tokens(options: argparse.Namespace) -> list[Row]:
    sums = gathered(options.folder)
    rows = []
    for quarters in (1, 2, 4):
        known = total(sums, lambda key, quarters=quarters: key[1] == "train" and key[2] < quarters)
        readout = solve_ridge(known, RIDGE)
        for place in ("held", ROWS):
            explained = r2(readout, total(sums, lambda key, place=place: key[1] == place))
            rows.append({"tokens": int(known.count), "on": place, **{it: explained[it] for it in ("max", "reading")}})
    return rows


def domains(options: argparse.Namespace) -> list[Row]:
    sums = gathered(options.folder)
    names = sorted({key[0] for key in sums if key[1] == "train"})
    fits: dict[str, Callable[[Any], bool]] = {"all": lambda key: key[1] == "train"}
    for name in names:
        fits[name] = lambda key, name=name: key[1] == "train" and key[0] == name
        fits[f"all but {name}"] = lambda key, name=name: key[1] == "train" and key[0] != name
    rows = []
    for fitted, wanted in fits.items():
        readout = solve_ridge(total(sums, wanted), RIDGE)
        for name in (*names, ROWS):
            known = total(sums, lambda key, name=name: key[1] == ROWS if name == ROWS else key[:2] == (name, "held"))
            explained = r2(readout, known)
            rows.append({"fitted on": fitted, "on": name, **{it: explained[it] for it in ("max", "reading")}})
    return rows


def layers(options: argparse.Namespace) -> list[Row]:
    """``max`` alone; the network sees the same standardised rows 12 times."""
    windows = list(items(options.folder, "window"))
    rows = []
    for layer in (5, 15, 25):
        parts: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
        for number, item in enumerate(windows):
            y = item["max"][layer].clamp(min=LEAST).log().T
            parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append((item["hidden"][layer].float(), y))
        x, y = (torch.cat([pair[i][N_SINK:] for pair in parts[False]]) for i in (0, 1))
        held_x, held_y = (torch.cat([pair[i][N_SINK:] for pair in parts[True]]) for i in (0, 1))
        linear = solve_ridge(moments(x, y), RIDGE)
        known = (held_y - held_y.mean(0)).square().sum(0)
        network = trained((x - linear.mean.float()) / linear.scale.float(), y)
        with torch.no_grad():
            both = {
                "linear": linear(held_x.double()).float(),
                "two layers of 512": network((held_x - linear.mean.float()) / linear.scale.float()),
            }
        for name, predicted in both.items():
            explained = float((1 - (held_y - predicted).square().sum(0) / known).mean())
            rows.append({"layer": layer, "read-out": name, "r2": explained})
    return rows


def trained(x: Tensor, y: Tensor, epochs: int = 12) -> nn.Module:
    """Two layers, by AdamW on shuffled batches of 512 rows."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(x.shape[1], 512), nn.GELU(), nn.Linear(512, y.shape[1]))
    network[2].bias.data = y.mean(0)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(512):
            optimizer.zero_grad()
            (network(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()
        schedule.step()
    return network


@torch.inference_mode()
def lengths(options: argparse.Namespace) -> list[Row]:
    """Python's reference, chapter after chapter, to 1,024, 4,096 and 8,000 tokens."""
    model, tokenizer = load(options.model)
    surrogate = find_surrogate(model)
    ids = tokenizer("\n\n".join(read_texts(None).values()), return_tensors="pt", verbose=False).input_ids[0]
    rows = []
    for n in options.lengths:
        inputs = read_window(model, ids[:n])
        targets = {layer: it[N_SINK:] for layer, it in targets_of_window(inputs).items()}
        for output, name in enumerate(PREDICTS):
            pairs = [
                (surrogate.log_scores(layer, inputs.hidden[layer].unsqueeze(0), name)[0, :, N_SINK:],
                 target.chunk(len(PREDICTS), -1)[output].mT)
                for layer, target in targets.items()
            ]  # fmt: skip
            predicted, target = (torch.stack(it).flatten(0, 1) for it in zip(*pairs, strict=True))  # [layers*hkv n]
            explained = 1 - (target - predicted).square().sum(-1) / (target - target.mean(-1, True)).square().sum(-1)
            for fraction in (0.05, 0.1, 0.2, 0.5):
                rows.append({"tokens": n, "output": name, "r2": float(explained.mean()), "top": fraction,
                             "recall": top_recall(predicted, target, fraction)})  # fmt: skip
    return rows


def compressed(press: Any, lookup: Tensor, reading: Tensor, prefill: Prefill, ratio: float, seed: int) -> Compressed:
    """A copy of the cache drawn from scores [layers hkv t] in place of the press' two scorers'."""
    gathering = press.gathering(ratio)
    gathering.scores = [
        [LayerScores(it.unsqueeze(0), torch.zeros_like(it, dtype=torch.bool).unsqueeze(0)) for it in scores]
        for scores in (lookup, reading)
    ]
    mine = replace(prefill, cache=copied(cast(DynamicCache, prefill.cache)))
    report = press.draw(gathering.complete(prefill), mine, ratio, seed)
    cache = cast(DynamicCache, mine.cache)
    return Compressed(cache, {}, report.layer_ratios, None, cache_bytes(cache), Costs())


def prefill_of(item: Row, model: Any) -> Prefill:
    cache = DynamicCache()
    for keys, values in zip(item["keys"], item["values"], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys.unsqueeze(0), values.unsqueeze(0))
        layer.keys, layer.values = keys.unsqueeze(0), values.unsqueeze(0)
        cache.layers.append(layer)
    t = len(item["ids"])
    valid, position = torch.ones(1, t, dtype=torch.bool), torch.tensor([t])
    ids, unread = item["ids"].unsqueeze(0), cast(Any, None)  # packing reads no rotary state
    layers = list(range(len(item["keys"])))
    return Prefill(model, cache, layers, valid, position, ids, item["last_hidden_state"], unread)


@torch.inference_mode()
def draws(options: argparse.Namespace) -> list[Row]:
    """Every statistic, and the surrogate of ``max``, in the first place of ``prob_learned``'s union."""
    pipe = load_pipeline(options.model)
    train: Moments | None = None
    for item in items(options.folder, "window"):
        train = block(item) if train is None else combined(train, block(item))
    readout = None if train is None else solve_ridge(train, RIDGE)
    rows = []
    for item in tqdm(list(items(options.folder, "row")), unit="row"):
        prefill = prefill_of(item, pipe.model)
        lookups = {name: item[name] for name in STATISTICS if name in options.lookups}
        if readout is not None:
            lookups["learned max"] = readout(item["hidden"].double()).mT.chunk(len(TARGETS), 1)[0].exp().float()
        settings = [(name, r, seed) for name in lookups for r in options.ratios for seed in range(options.seeds)]
        limit = min(64, item["row"]["max_new_tokens"])
        for begin in range(0, len(settings), 16):
            part = settings[begin : begin + 16]
            caches = [
                compressed(make_press("prob_learned"), lookups[name], item["reading"], prefill, ratio, seed)
                for name, ratio, seed in part
            ]
            shared: Any = SimpleNamespace(tokens=len(item["ids"]), prefill=prefill)
            batch = RowBatch(shared, caches, item["question"].shape[1] + limit)
            answers = decode_batch(pipe, batch, item["question"], limit)
            for (name, ratio, seed), answer in zip(part, answers, strict=True):
                score = score_prediction("ruler", item["domain"], answer.text, list(item["row"]["answer"]), None)
                rows.append({"example": item["name"], "task": item["domain"], "lookup": name, "ratio": ratio,
                             "seed": seed, "score": score})  # fmt: skip
    return rows


TABLES = {
    "targets": targets,
    "tokens": tokens,
    "domains": domains,
    "layers": layers,
    "lengths": lengths,
    "draws": draws,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("folder", type=Path, nargs="?", help="of benchmarks.surrogate_data; lengths needs none")
    parser.add_argument("--model", default="smollm2-demo")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--lookups", nargs="+", choices=STATISTICS, default=list(STATISTICS), help="of draws")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000], help="of lengths")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.folder is None and options.table != "lengths":
        parser.error(f"{options.table} needs a folder of benchmarks.surrogate_data")
    rows = TABLES[options.table](options)
    table = pd.DataFrame(rows)
    if options.table == "draws":
        table = table.pivot_table(index="lookup", columns="ratio", values="score", sort=False)
    show(options.table, table, 3)
    options.text = None
    write(options.output, rows, options)


if __name__ == "__main__":
    main()
