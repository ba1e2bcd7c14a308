"""A sweep in this process."""

from pathlib import Path

from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.plan import examples_of, plan
from kvpress_prob.sweeps.run import missing, open_results, progress_bar
from kvpress_prob.sweeps.worker import Worker


def run_sweep(config: SweepConfig, output: Path, *, progress: bool = True) -> Path:
    """Run what is missing of a sweep, in this process.

    Returns
    -------
    Path
        The results folder.
    """
    examples = examples_of(config)
    contexts = plan(config, examples)
    worker = Worker(config)
    with open_results(config, output, examples, contexts) as writer, progress_bar(contexts, writer, progress) as bar:
        for units in missing(contexts, writer):
            for records in worker.run(units):
                writer.append(records)
                bar.update(len(records))
    return writer.folder
