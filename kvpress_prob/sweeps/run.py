"""A run of a sweep, whichever engine runs it: what is written already, what is missing, how far it is."""

from pathlib import Path

from tqdm import tqdm

from kvpress_prob.records import Example
from kvpress_prob.records.writer import RecordWriter, results_folder
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.plan import Unit


def open_results(
    config: SweepConfig, output: Path, examples: list[Example], contexts: list[list[Unit]]
) -> RecordWriter:
    """The results folder of a sweep, made or continued."""
    units = {key: unit.keys for units in contexts for unit in units for key in unit.keys}
    plain = config.plain()
    return RecordWriter(results_folder(output, plain), plain, examples, units.__getitem__)


def missing(contexts: list[list[Unit]], writer: RecordWriter) -> list[list[Unit]]:
    """Units that are not written yet, by context."""
    left = [[unit for unit in units if not unit.keys <= writer.done] for units in contexts]
    return [units for units in left if units]


def progress_bar(contexts: list[list[Unit]], writer: RecordWriter, show: bool) -> tqdm:
    """Rows done and the time left."""
    total = sum(len(unit.keys) for units in contexts for unit in units)
    return tqdm(total=total, initial=len(writer.done), unit="row", desc=writer.folder.name, disable=not show)
