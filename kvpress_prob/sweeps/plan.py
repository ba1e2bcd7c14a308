"""What a sweep has to do: its examples, and its work in units.

A *unit* is one context with a fixed group of (press, ratio, seed) settings and all its questions. A unit's rows are
written together, and what is in a unit never depends on what has been done already, so a run that was killed and
continued computes exactly what an undisturbed run computes.
"""

from dataclasses import asdict, dataclass

from kvpress_prob.examples.loading import load_examples
from kvpress_prob.maths.budget import ratio_of_entries
from kvpress_prob.models.loading import load_tokenizer
from kvpress_prob.prefills.compressors import draws
from kvpress_prob.prefills.press_spec import PressSpec
from kvpress_prob.records import NO_PRESS, Example, Key
from kvpress_prob.sweeps.configuration import SweepConfig


def examples_of(config: SweepConfig) -> list[Example]:
    """The examples of a configuration."""
    tokenizer = load_tokenizer(config.model)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    examples = load_examples(
        config.benchmark,
        config.data,
        count_tokens=count_tokens,
        tasks=config.tasks,
        length=config.length,
        examples_per_task=config.examples_per_task,
        max_context_tokens=config.max_context_tokens,
        seed=config.data_seed,
    )
    return [_with_question_inside(example) for example in examples] if config.query_aware else examples


def _with_question_inside(example: Example) -> Example:
    return Example(**{**asdict(example), "context": example.context + example.question, "question": ""})


@dataclass(frozen=True)
class Setting:
    """One press at one budget and seed; ``ratio`` is nominal where the budget is a number of entries."""

    spec: PressSpec
    ratio: float
    seed: int | None
    entries: int | None = None

    def ratio_of(self, tokens: int) -> float:
        """The compression ratio of a context."""
        return self.ratio if self.entries is None else ratio_of_entries(self.entries, tokens)


@dataclass(frozen=True)
class Unit:
    """What is computed and written together: one context, all its questions, some settings."""

    context: str
    examples: list[Example]
    settings: list[Setting]

    @property
    def keys(self) -> frozenset[Key]:
        """Keys of the unit's records."""
        return frozenset(
            (example.name, setting.spec.name, setting.ratio, setting.seed)
            for example in self.examples
            for setting in self.settings
        )


def settings_of(config: SweepConfig) -> list[Setting]:
    """All settings in the order in which they are run: press by press."""
    settings = []
    for spec in config.specs:
        budgets: list[tuple[float, int | None]] = [(ratio, None) for ratio in config.ratios]
        if config.entries is not None:
            budgets = [(round(1 - entries / config.length, 6), entries) for entries in config.entries]
        if spec.press == NO_PRESS:
            budgets = [(0.0, None)]
        seeds: list[int | None] = list(config.seeds) if draws(spec.build()) else [None]
        settings += [Setting(spec, ratio, seed, entries) for ratio, entries in budgets for seed in seeds]
    return settings


def plan(config: SweepConfig, examples: list[Example]) -> list[list[Unit]]:
    """The units of every context."""
    contexts: dict[str, list[Example]] = {}
    for example in examples:
        contexts.setdefault(example.context, []).append(example)
    settings = settings_of(config)
    size = 1 if config.decode == "single" else config.batch_rows
    groups = [settings[begin : begin + size] for begin in range(0, len(settings), size)]
    return [[Unit(context, group, part) for part in groups] for context, group in contexts.items()]
