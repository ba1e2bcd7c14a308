"""What a sweep computes: one frozen dataclass, one YAML file."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from kvpress_prob.examples.tasks import TASKS
from kvpress_prob.models.loading import Dtype, check_device
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.records import Benchmark, DecodeMode
from kvpress_prob.values import (
    check_choices,
    check_count,
    check_list,
    check_name,
    check_ratios,
    check_seeds,
    check_text,
)

AttentionImplementation = Literal["sdpa", "eager"]


@dataclass(frozen=True)
class SweepConfig:
    """What a sweep computes; its hash names the results folder.

    Parameters
    ----------
    name : str
        Begins the folder's name: letters, digits, and ``. _ - + =`` inside.
    model : str
        Hub name, folder, or ``smollm2-demo``.
    presses : list
        Names, or mappings with ``press``, ``options`` and ``label``.
    ratios : list of float
        Compression ratios of every press but ``no_press``.
    entries : list of int, optional
        In place of ratios, budgets as entries that a head keeps on average, whatever the context's length. Records name
        them by the ratio that they are of a context of ``length`` tokens.
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

    Raises
    ------
    ValueError
        For a value that cannot become what it is for.
    """

    name: str
    model: str
    presses: list[str | PressSpec]
    ratios: list[float] = field(default_factory=list)
    entries: list[int] | None = None
    seeds: list[int] = field(default_factory=lambda: [0])
    benchmark: Benchmark = "ruler"
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
    attn_implementation: AttentionImplementation = "sdpa"
    device: str | None = None
    data_seed: int = 0

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for name, choices in (
            ("benchmark", Benchmark), ("decode", DecodeMode), ("dtype", Dtype),
            ("attn_implementation", AttentionImplementation),
        ):  # fmt: skip
            check_choices(name, [getattr(self, name)], get_args(choices))
        for name in ("model", "data"):
            check_text(name, getattr(self, name))
        for name in ("query_aware", "attention_error"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("length", "examples_per_task", "max_context_tokens", "max_new_tokens", "batch_rows"):
            if getattr(self, name) is not None or name in ("length", "batch_rows"):
                check_count(name, getattr(self, name))
        if self.entries is None:
            check_ratios(self.ratios, zero=True)
        else:
            self._check_entries(self.entries)
        check_seeds("seeds", self.seeds)
        check_seeds("data_seed", [self.data_seed])
        if self.tasks is not None:
            check_list("tasks", self.tasks)
            check_choices("tasks", self.tasks, TASKS[self.benchmark])
        if self.data == "generated" and self.benchmark != "ruler":
            raise ValueError(f"data='generated' needs benchmark='ruler', got {self.benchmark!r}")
        if self.device is not None:
            check_device(self.device)
        check_list("presses", self.presses)
        for press in self.presses:
            if not isinstance(press, str | PressSpec):
                raise ValueError(f"presses must be names or mappings with a name, got {press!r}")
        labels = [spec.name for spec in self.specs]
        for label in labels:
            check_text("label of a press", label)
            if labels.count(label) > 1:
                raise ValueError(f"presses must have different labels, got {label!r} twice")
        for spec in self.specs:
            spec.build()

    def _check_entries(self, values: list[int]) -> None:
        if self.ratios:
            raise ValueError(f"ratios must be empty where entries are given, got {self.ratios}")
        check_list("entries", values)
        for value in values:
            check_count("entries", value)
            if value >= self.length:
                raise ValueError(f"entries must be fewer than length = {self.length}, got {value}")

    @property
    def specs(self) -> list[PressSpec]:
        """The presses, names spelt out."""
        return [PressSpec(press) if isinstance(press, str) else press for press in self.presses]

    def plain(self) -> dict[str, Any]:
        """As plain values, for saving and hashing; without entries as before there were any."""
        plain = asdict(self)
        return plain if self.entries is not None else {name: it for name, it in plain.items() if name != "entries"}
