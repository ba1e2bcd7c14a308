"""NVIDIA's own ``evaluation/evaluate.py``, unchanged, with this package's presses in its registry.

The scripts are in kvpress' source archive and not in its wheel. They are fetched once into the user's cache folder, or
read from a checkout. Their dependencies are those of ``kvpress[eval]``.
"""

import runpy
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from kvpress_prob.examples.tables import checked_table, read_table
from kvpress_prob.examples.tasks import BENCHMARKS
from kvpress_prob.extras import extra
from kvpress_prob.prefills.press_spec import BASELINES
from kvpress_prob.presses import PHYSICAL_PRESSES, PRESSES, make_press

with extra("eval", "Running kvpress' evaluation script"):
    from platformdirs import user_cache_path

SCRIPT = "evaluate.py"


def run_kvpress_evaluation(
    arguments: list[str], *, scripts: Path | None = None, data: Path | None = None, seed: int = 0
) -> None:
    """Run kvpress' script in this process.

    Parameters
    ----------
    arguments : list of str
        Its own command line: ``--dataset ruler --press_name prob_best ...``.
    scripts : Path, optional
        kvpress' ``evaluation`` folder. Default: of the installed version's source archive.
    data : Path, optional
        Local data (see ``examples.tables``) instead of the Hub's, for whichever dataset the arguments name.
    seed : int
        Seed of this package's presses.

    Raises
    ------
    ValueError
        For a folder without the scripts, data that does not fit, or an unknown dataset or press.
    """
    folder = scripts or fetch_scripts()
    if not (folder / SCRIPT).is_file():
        raise ValueError(f"kvpress_evaluation must be kvpress' evaluation folder, got '{folder}' without {SCRIPT}")
    with _importable(folder), tempfile.TemporaryDirectory() as scratch:
        registry = import_module("evaluate_registry")
        registry.PRESS_REGISTRY.update({name: make_press(name, seed=seed) for name in (*PRESSES, *PHYSICAL_PRESSES)})
        added = [name for name in BASELINES if name not in registry.PRESS_REGISTRY]
        registry.PRESS_REGISTRY.update({name: BASELINES[name]() for name in added})
        dataset = _choice(arguments, "dataset", list(registry.DATASET_REGISTRY), "ruler")
        _choice(arguments, "press_name", list(registry.PRESS_REGISTRY), "knorm")
        if data is not None:
            if dataset not in BENCHMARKS or _value(arguments, "data_dir"):
                raise ValueError(f"data serves --dataset {' or '.join(BENCHMARKS)} without --data_dir, got {arguments}")
            table = checked_table(dataset, read_table(data), str(data))
            table.to_parquet(Path(scratch) / "test.parquet")
            registry.DATASET_REGISTRY[dataset] = scratch
        sys.argv = [SCRIPT, *arguments]
        runpy.run_path(str(folder / SCRIPT), run_name="__main__")


def fetch_scripts() -> Path:
    """kvpress' evaluation folder for the installed version, downloaded once by pip."""
    release = version("kvpress")
    home = user_cache_path("kvpress-prob") / f"kvpress-{release}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "kvpress",
                 "--dest", scratch, f"kvpress=={release}"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"pip could not download kvpress' source archive: {done.stderr.strip()[-400:]}")
            with tarfile.open(next(Path(scratch).glob("kvpress-*.tar.gz"))) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / f"kvpress-{release}").rename(home)
    return home / "evaluation"


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The scripts import each other by names at the top level, whatever else has these names."""
    argv, others = sys.argv, _take_modules()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path.remove(str(folder))
        _take_modules()
        sys.modules.update(others)


def _take_modules() -> dict[str, ModuleType]:
    """Remove and return the imported modules that have the scripts' names."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "evaluate_registry")]
    return {name: sys.modules.pop(name) for name in names}


def _value(arguments: list[str], name: str) -> str | None:
    """Value of ``--name`` in either of Fire's spellings."""
    for place, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key in (f"--{name}", f"--{name.replace('_', '-')}"):
            return value if equals else arguments[place + 1] if place + 1 < len(arguments) else ""
    return None


def _choice(arguments: list[str], name: str, allowed: list[str], default: str) -> str:
    value = _value(arguments, name) or default
    if value not in allowed:
        raise ValueError(f"--{name} must be one of {sorted(allowed)}, got {value!r}")
    return value
