"""Progress of a fit, kept in a file so that a killed one goes on where it was."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf.files import replacing
from kvpress_prob.maths.ridge import Moments, Readout


@dataclass
class Progress:
    """Everything that a fit knows between two windows.

    Attributes
    ----------
    windows : int
        Windows that the present group of layers has read.
    steps : int
        Windows that were read by all groups so far.
    train, held : dict of int to Moments
        Moments of the present group's layers, of windows to fit on and of held-out ones.
    solved : list of list of Readout
        Read-outs of the groups that are done.
    tested : dict of int to Readout
        The same without the held-out windows.
    r_squared : dict of int to Tensor or None
        Of ``tested``, on the held-out windows; None without any.
    targets : dict of (int, int) to Tensor
        Targets [n outputs*hkv] of layers and held-out windows.
    """

    windows: int = 0
    steps: int = 0
    train: dict[int, Moments] = field(default_factory=dict)
    held: dict[int, Moments] = field(default_factory=dict)
    solved: list[list[Readout]] = field(default_factory=list)
    tested: dict[int, Readout] = field(default_factory=dict)
    r_squared: dict[int, Tensor | None] = field(default_factory=dict)
    targets: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def save_progress(path: Path, key: str, progress: Progress) -> None:
    """Replace the file when the new one is complete; ``key`` names what the progress belongs to."""
    plain: dict[str, Any] = {
        **vars(progress),
        "train": {layer: vars(it) for layer, it in progress.train.items()},
        "held": {layer: vars(it) for layer, it in progress.held.items()},
        "solved": [[vars(it) for it in group] for group in progress.solved],
        "tested": {layer: vars(it) for layer, it in progress.tested.items()},
    }
    with replacing(path) as temporary:
        torch.save({"key": key, "progress": plain}, temporary)


def load_progress(path: Path, key: str, device: torch.device | str = "cpu") -> Progress | None:
    """The progress in a file; None if there is no file.

    Raises
    ------
    ValueError
        For a file that is damaged or belongs to another fit; the message says which file to delete.
    """
    if not path.is_file():
        return None
    try:
        held = torch.load(path, weights_only=True, map_location=device)
        progress = _restored(held["progress"]) if held["key"] == key else None
    except Exception as error:  # torch.load's errors have no common class
        raise ValueError(
            f"checkpoint must be a fit's progress, got '{path}': {error} (to begin anew, delete it)"
        ) from error
    if progress is None:
        raise ValueError(
            "checkpoint must belong to this model, texts and settings, got the progress of another fit: to give that "
            f"up, delete '{path}'"
        )
    return progress


def _restored(plain: dict[str, Any]) -> Progress:
    names = {entry.name for entry in fields(Progress)}
    if set(plain) != names:
        raise ValueError(f"fields must be {sorted(names)}, got {sorted(plain)}")
    return Progress(
        **plain
        | {
            "train": {layer: Moments(**it) for layer, it in plain["train"].items()},
            "held": {layer: Moments(**it) for layer, it in plain["held"].items()},
            "solved": [[Readout(**it) for it in group] for group in plain["solved"]],
            "tested": {layer: Readout(**it) for layer, it in plain["tested"].items()},
        }
    )
