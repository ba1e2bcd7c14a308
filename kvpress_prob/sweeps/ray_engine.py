"""The same sweep on Ray: every worker loads the model once and takes one context after the other.

Workers return records; the driver alone writes, unit by unit, as in one process. Results are the same, rows may be in
another order. Needs the extra ``ray``. Data paths and models must be readable on the workers.
"""

import io
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch

from kvpress_prob.extras import extra
from kvpress_prob.records import Record
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.errors import SweepInterrupted
from kvpress_prob.sweeps.plan import Unit, examples_of, plan
from kvpress_prob.sweeps.run import missing, open_results, progress_bar
from kvpress_prob.sweeps.worker import Worker
from kvpress_prob.values import check_count

with extra("ray", "engine='ray'"):
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util import ActorPool


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
    SweepInterrupted
        If a worker or the cluster was lost. What was written stays, and the same call continues.
    """
    check_count("workers", workers)
    if not math.isfinite(gpus_per_worker) or gpus_per_worker < 0:
        raise ValueError(f"gpus_per_worker must be a number >= 0, got {gpus_per_worker}")
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

    with (
        _cluster(address, workers),
        open_results(config, output, examples, contexts) as writer,
        progress_bar(contexts, writer, progress) as bar,
    ):
        actor = ray.remote(num_cpus=1, num_gpus=gpus_per_worker)(Remote)
        pool = ActorPool([actor.remote() for _ in range(workers)])
        for done in pool.map_unordered(lambda worker, units: worker.run.remote(units), missing(contexts, writer)):
            for records in done:
                writer.append(records)
                bar.update(len(records))
    return writer.folder


@contextmanager
def _cluster(address: str | None, workers: int) -> Iterator[None]:
    """Ray inside the block; what a worker raised is raised as it was, what killed one as ``SweepInterrupted``."""
    try:
        ray.init(
            address=address, num_cpus=None if address else workers, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
    except ConnectionError as error:
        raise ValueError(f"ray_address must be that of a running cluster, got {address!r}: {error}") from error
    said = io.StringIO()
    # A thread of Ray prints a page about every process that dies, some of them late: until Ray is shut down.
    with redirect_stdout(said):
        try:
            yield
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            reason = str(error).strip().partition("\n")[0]
            lost = SweepInterrupted(f"a Ray worker was lost ({reason}); the same command continues the sweep")
            lost.add_note(said.getvalue())
            raise lost from error
        finally:
            ray.shutdown()
