"""Fit a surrogate: windows stream through the model, moments stay.

For every window the model prefills it, reads it once more (the reconstruction that the surrogate is to replace), and
each full-attention layer's hidden states and log-scores are added to that layer's moments (``maths.ridge``). Memory is
that of one window and of two moment matrices a layer, float64; where all layers together need more than ``max_bytes``,
they are taken in groups, each of which reads the windows again. Every fifth window is left out of the read-out that
the held-out figures are about; the surrogate itself is then solved from all.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpress_prob.fitting.checkpoint import Progress, load_progress, save_progress
from kvpress_prob.fitting.targets import PREDICTS, read_window, targets_of
from kvpress_prob.fitting.windows import Windows, cut_windows
from kvpress_prob.hf.fingerprint import fingerprint
from kvpress_prob.maths.arguments import check_integer, is_number
from kvpress_prob.maths.ridge import Moments, Readout, combined, moments, r_squared, solve_ridge, top_recall
from kvpress_prob.sources import Surrogate, SurrogateHeader

HELD_OUT_EVERY = 5
"""Coprime with the number of domains that take turns, so that all are held out."""
RIDGE = 1e-3
N_SINK = 4
"""First tokens that no read-out is fitted to: whatever they hold, all later rows attend to them."""
FRACTIONS = (0.05, 0.1, 0.2, 0.5)
CHECKPOINT_SECONDS = 30.0


@torch.inference_mode()
def fit_surrogate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = 50_000,
    window: int = 1024,
    ridge: float = RIDGE,
    seed: int = 0,
    max_bytes: int = 4_000_000_000,
    checkpoint: str | os.PathLike | None = None,
    progress: bool = True,
) -> Surrogate:
    """Fit a surrogate to a model.

    Parameters
    ----------
    model : PreTrainedModel
        Any that can be compressed; it is left as it is.
    tokenizer : PreTrainedTokenizerBase
    texts : sequence of str, optional
        What to fit on; None takes texts that need no download (``fitting.texts``). A surrogate is best on what it
        resembles.
    tokens : int, default=50_000
        Upper bound of the tokens that are read.
    window : int, default=1024
        Tokens that are read together, more than ``N_SINK``.
    ridge : float, default=1e-3
        Relative to the standardised inputs' unit variance.
    seed : int, default=0
        Of the default texts.
    max_bytes : int, default=4_000_000_000
        Bound of the accumulated moments; more layers than fit are taken in groups.
    checkpoint : str or Path, optional
        File that progress is kept in and continued from. It stays, to be deleted when the surrogate has been saved.
    progress : bool, default=True
        Show what is done and how long the rest takes.

    Raises
    ------
    TypeError
        For a model that cannot be compressed, and texts or a checkpoint of another type.
    ValueError
        For parameters out of range, texts without two windows, and a model without full-attention layers.
    """
    if not is_number(ridge) or not 0 < ridge < math.inf:
        raise ValueError(f"ridge must be a finite number > 0, got {ridge!r}")
    check_integer("window", window, N_SINK + 1)
    check_integer("max_bytes", max_bytes, 1)
    path = None if checkpoint is None else _checked_path(checkpoint)
    windows = cut_windows(tokenizer, texts, tokens=tokens, window=window, seed=seed)
    layers, hidden_size = _full_attention_layers(model, windows.ids[0, : min(8, window)])
    key = f"{fingerprint(model)} {windows.digest} {window} {float(ridge)} {max_bytes}"
    state = (load_progress(path, key, model.device) if path else None) or Progress()
    size = max(int(max_bytes // (2 * 8 * hidden_size**2)), 1)
    groups = [layers[begin : begin + size] for begin in range(0, len(layers), size)]
    fit = _Fit(model, windows, float(ridge), state, path, key)
    total = len(windows.ids) * len(groups) + len(windows.ids) // HELD_OUT_EVERY
    with tqdm(total=total, initial=state.steps, unit="window", desc="fit", disable=not progress) as bar:
        for group in groups[len(state.solved) :]:
            fit.accumulate(group, bar)
            fit.solve(group)
        held_out = fit.figures(layers, bar)
    return _surrogate(model, layers, [it for group in state.solved for it in group], windows, float(ridge), held_out)


def _checked_path(checkpoint: Any) -> Path:
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint must be a path or None, got {type(checkpoint).__name__}")
    path = Path(checkpoint)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"checkpoint must be a file in an existing folder, got '{path}'")
    return path


@dataclass
class _Fit:
    """One fit between its windows."""

    model: PreTrainedModel
    windows: Windows
    ridge: float
    state: Progress
    checkpoint: Path | None
    key: str
    saved: float = field(default_factory=time.monotonic)

    def accumulate(self, group: list[int], bar: tqdm) -> None:
        """Moments of a group of layers, from the first window that is not in them."""
        state = self.state
        for number in range(state.windows, len(self.windows.ids)):
            inputs = read_window(self.model, self.windows.ids[number], set(group))
            targets = targets_of(inputs)
            held = _is_held_out(number)
            sums = state.held if held else state.train
            for layer in group:
                sums[layer] = _added(sums.get(layer), inputs.hidden[layer], targets[layer])
                if held:
                    state.targets[layer, number] = targets[layer].cpu()
            state.windows, state.steps = number + 1, state.steps + 1
            bar.update()
            self._save()

    def solve(self, group: list[int]) -> None:
        """Read-outs of the group: from the windows that are not held out for the figures, and from all."""
        state = self.state
        for layer in group:
            train, held = state.train[layer], state.held.get(layer)
            state.tested[layer] = solve_ridge(train, self.ridge)
            state.r_squared[layer] = None if held is None else r_squared(state.tested[layer], held)
        state.solved.append([solve_ridge(_all(state, layer), self.ridge) for layer in group])
        state.train, state.held, state.windows = {}, {}, 0

    def figures(self, layers: list[int], bar: tqdm) -> dict[str, Any]:
        """R^2 and recall of every layer and of all together, on the held-out windows."""
        state = self.state
        numbers = [number for number in range(len(self.windows.ids)) if _is_held_out(number)]
        predicted: dict[tuple[int, int], Tensor] = {}
        for number in numbers:
            inputs = read_window(self.model, self.windows.ids[number], set(layers))
            for layer in layers:
                readout = state.tested[layer]
                hidden = inputs.hidden[layer].to(readout.weight.device).double()
                predicted[layer, number] = readout(hidden).float().cpu()
            bar.update()
        outputs = list(PREDICTS)
        figures: dict[str, Any] = {"windows": len(numbers), "layers": layers, "r_squared": {}, "recall": {}}
        for place, output in enumerate(outputs):
            per_layer = []
            for layer in layers:
                r2 = state.r_squared[layer]
                per_layer.append(None if r2 is None else round(float(r2.chunk(len(outputs))[place].mean()), 4))
            figures["r_squared"][output] = per_layer
            figures["recall"][output] = {
                str(fraction): _recalls(predicted, state.targets, layers, numbers, place, fraction)
                for fraction in FRACTIONS
            }
        return figures

    def _save(self) -> None:
        if self.checkpoint is not None and time.monotonic() - self.saved > CHECKPOINT_SECONDS:
            save_progress(self.checkpoint, self.key, self.state)
            self.saved = time.monotonic()


def _recalls(
    predicted: dict[tuple[int, int], Tensor],
    targets: dict[tuple[int, int], Tensor],
    layers: list[int],
    numbers: list[int],
    place: int,
    fraction: float,
) -> dict[str, Any]:
    """Mean over windows of the recall of the largest scores: of all layers together, and within each layer."""
    if not numbers:
        return {"all": None, "layers": [None for _ in layers]}

    def part(values: dict[tuple[int, int], Tensor], layer: int, number: int) -> Tensor:
        return values[layer, number][N_SINK:].chunk(len(PREDICTS), -1)[place].mT  # [hkv n]

    def mean(chosen: list[int]) -> float:
        found = [
            top_recall(
                torch.cat([part(predicted, layer, number) for layer in chosen]),
                torch.cat([part(targets, layer, number) for layer in chosen]),
                fraction,
            )
            for number in numbers
        ]
        return round(sum(found) / len(found), 4)

    return {"all": mean(layers), "layers": [mean([layer]) for layer in layers]}


def _added(sums: Moments | None, hidden: Tensor, targets: Tensor) -> Moments:
    device = hidden.device if sums is None else sums.xx.device  # a continued fit's may be another
    block = moments(hidden[N_SINK:].to(device), targets[N_SINK:].to(device))
    return block if sums is None else combined(sums, block)


def _all(state: Progress, layer: int) -> Moments:
    train, held = state.train[layer], state.held.get(layer)
    return train if held is None else combined(train, held)


def _is_held_out(number: int) -> bool:
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _full_attention_layers(model: PreTrainedModel, ids: Tensor) -> tuple[list[int], int]:
    """Indices of the full-attention layers and the width of what enters them, from a short prefill."""
    inputs = read_window(model, ids)
    if not inputs.hidden:
        raise ValueError(f"model must have full-attention layers, got {type(model).__name__} with none")
    heads = {len(it) for it in inputs.reading.values()}
    if len(heads) != 1:
        raise ValueError(f"model must have as many KV heads in every full-attention layer, got {sorted(heads)}")
    return inputs.prefill.layers, next(iter(inputs.hidden.values())).shape[-1]


def _surrogate(
    model: PreTrainedModel,
    layers: list[int],
    readouts: list[Readout],
    windows: Windows,
    ridge: float,
    held_out: dict[str, Any],
) -> Surrogate:
    """The read-outs as a surrogate, their means taken into the bias."""
    scale = torch.stack([it.scale for it in readouts]).float().cpu()
    weight = torch.stack([it.weight for it in readouts]).half().cpu()
    # The bias goes with the weights as they are stored.
    mean = torch.stack([it.mean for it in readouts]).cpu() / scale
    bias = torch.stack([it.bias for it in readouts]).cpu() - (mean.unsqueeze(-2) @ weight.double()).squeeze(-2)
    outputs = len(PREDICTS)
    header = SurrogateHeader(
        architecture=type(model).__name__,
        fingerprint=fingerprint(model),
        hidden_size=scale.shape[-1],
        kv_heads=weight.shape[-1] // outputs,
        layers=list(layers),
        predicts=dict(PREDICTS),
        transformers=transformers.__version__,
        fitted_on={
            "texts": windows.source,
            "digest": windows.digest,
            "windows": len(windows.ids),
            "window": windows.ids.shape[1],
            "ridge": ridge,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        held_out=held_out,
    )
    weight = weight.unflatten(-1, (outputs, -1)).movedim(-2, 1).contiguous()  # [layers outputs hidden hkv]
    return Surrogate(header, scale, weight, bias.float().unflatten(-1, (outputs, -1)))
