"""What a sweep computes: one frozen dataclass, one YAML file."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvpress_prob.models.loading import Dtype
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.records import DecodeMode


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep computes; its hash names the results folder.

    Parameters
    ----------
    name : str
        Begins the folder's name.
    model : str
        Hub name, folder, or ``smollm2-demo``.
    presses : list
        Names, or mappings with ``press``, ``options`` and ``label``.
    ratios : list of float
        Compression ratios of every press but ``no_press``.
    seeds : list of int
        Seeds of the presses that draw; others run once.
    benchmark : {"ruler", "longbench"}
    data : str
        "hub", "generated", or the path of local data in kvpress' schema.
    tasks : list of str, optional
        Default: all that the data has.
    length : int
        Sequence length of RULER data from the Hub or the generator.
    examples_per_task : int, optional
        The first so many of each task.
    max_context_tokens : int, optional
        Leaves out longer contexts.
    query_aware : bool
        Put the question into the compressed context (kvpress' ``query_aware``).
    max_new_tokens : int, optional
        Instead of the data's.
    decode : {"batched", "single", "none"}
        How answers are decoded; "none" measures compression alone.
    batch_rows : int
        Most caches held and decoded at once; one with ``decode="single"``.
    attention_error : bool
        Measure the attention error over the question's tokens.
    dtype, attn_implementation, device
        Of the model; ``device`` defaults to a GPU if there is one.
    data_seed : int
        Seed of generated data.
    """

    name: str
    model: str
    presses: list[str | PressSpec]
    ratios: list[float]
    seeds: list[int] = field(default_factory=lambda: [0])
    benchmark: Literal["ruler", "longbench"] = "ruler"
    data: str = "hub"
    tasks: list[str] | None = None
    length: int = 4096
    examples_per_task: int | None = None
    max_context_tokens: int | None = None
    query_aware: bool = False
    max_new_tokens: int | None = None
    decode: DecodeMode = "batched"
    batch_rows: int = 64
    attention_error: bool = False
    dtype: Dtype = "auto"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    device: str | None = None
    data_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("presses", "ratios", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for ratio in self.ratios:
            if not 0 <= ratio < 1:
                raise ValueError(f"ratios must be in [0, 1), got {ratio}")
        if self.batch_rows < 1:
            raise ValueError(f"batch_rows must be at least 1, got {self.batch_rows}")
        labels = [spec.name for spec in self.specs]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"presses must have different labels, got {label!r} twice")
        for spec in self.specs:
            spec.build()

    @property
    def specs(self) -> list[PressSpec]:
        """The presses, names spelt out."""
        return [PressSpec(press) if isinstance(press, str) else press for press in self.presses]

    def plain(self) -> dict[str, Any]:
        """As plain values, for saving and hashing."""
        return asdict(self)
