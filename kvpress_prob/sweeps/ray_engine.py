"""The same sweep on Ray: every worker loads the model once and takes one context after the other.

Workers return records; the driver alone writes, unit by unit, as in one process. Results are the same, rows may be in
another order. Needs the extra ``ray``. Data paths and models must be readable on the workers.
"""

from pathlib import Path

import torch

from kvpress_prob.records import Record
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.sweep import (
    Unit,
    Worker,
    examples_of,
    missing,
    open_results,
    plan,
    progress_bar,
)


def run_sweep_on_ray(
    config: SweepConfig,
    output: Path,
    *,
    workers: int,
    address: str | None = None,
    gpus_per_worker: float = 0,
    progress: bool = True,
) -> Path:
    """Run what is missing of a sweep on ``workers`` Ray actors.

    Parameters
    ----------
    config : SweepConfig
    output : Path
        Results go to a folder inside.
    workers : int
        Each computes with this process' number of torch threads, so that sums run in the same order.
    address : str, optional
        "auto" joins a running cluster; None starts one on this machine.
    gpus_per_worker : float

    Returns
    -------
    Path
        The results folder.

    Raises
    ------
    ModuleNotFoundError
        If Ray is not installed.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    try:
        import ray
        from ray.util import ActorPool
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("engine='ray' needs Ray: pip install 'kvpress-prob[ray]'") from error
    examples = examples_of(config)
    contexts = plan(config, examples)
    threads = torch.get_num_threads()

    class Remote:
        """A worker in a process of its own."""

        def __init__(self) -> None:
            torch.set_num_threads(threads)
            self.worker = Worker(config)

        def run(self, units: list[Unit]) -> list[list[Record]]:
            return list(self.worker.run(units))

    ray.init(address=address, num_cpus=None if address else workers, include_dashboard=False, log_to_driver=False)
    try:
        actor = ray.remote(num_cpus=1, num_gpus=gpus_per_worker)(Remote)
        pool = ActorPool([actor.remote() for _ in range(workers)])
        with (
            open_results(config, output, examples, contexts) as writer,
            progress_bar(contexts, writer, progress) as bar,
        ):
            for done in pool.map_unordered(lambda worker, units: worker.run.remote(units), missing(contexts, writer)):
                for records in done:
                    writer.append(records)
                    bar.update(len(records))
        return writer.folder
    finally:
        ray.shutdown()
