"""A run that was killed and continued gives what an undisturbed run gives; so does Ray."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvpress_prob.records import CONFIG, RECORDS, TIMINGS, Record, read_records, to_line
from kvpress_prob.records.writer import RecordWriter, results_folder
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.local_engine import run_sweep
from kvpress_prob.sweeps.plan import examples_of, plan
from kvpress_prob.sweeps.run import missing, open_results
from kvpress_prob.sweeps.worker import Worker
from tests.helpers.evaluation import ruler_rows, write_rows

CONFIG_FILE = """
name: resume
model: {model}
data: {data}
presses: [no_press, prob_min_h, {{press: prob_min_h, options: {{temperature: 2.0}}}}, snapkv, adakv_snapkv]
ratios: [0.3, 0.7]
seeds: [0, 1]
batch_rows: 4
"""


def without_timings(records: list[Record]) -> list[dict]:
    rows = [asdict(record) for record in records]
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]


def config(model_folder, data, **changes) -> SweepConfig:
    settings = {"presses": ["no_press", "prob_min_h", "snapkv"], "ratios": [0.3, 0.7], "seeds": [0, 1]}
    return SweepConfig(name="resume", model=str(model_folder), data=str(data), **{**settings, **changes})


def test_killed_at_random_points(tmp_path, model_folder):
    data = write_rows(tmp_path / "rows.jsonl", ruler_rows(8))
    file = tmp_path / "sweep.yaml"
    file.write_text(CONFIG_FILE.format(model=model_folder, data=data))
    command = [sys.executable, "-m", "kvpress_prob.cli", "sweep", str(file), "--report", "false", "--output"]

    def run(output: Path) -> subprocess.Popen:
        with open(tmp_path / "log", "w") as log:
            return subprocess.Popen([*command, str(output)], stdout=log, stderr=log)

    assert run(tmp_path / "whole").wait() == 0, (tmp_path / "log").read_text()
    (undisturbed,) = (tmp_path / "whole").iterdir()
    size = (undisturbed / RECORDS).stat().st_size
    records = tmp_path / "killed" / undisturbed.name / RECORDS
    points = sorted(random.Random(0).sample(range(1, size), 2))
    for point in points:
        process = run(tmp_path / "killed")
        while process.poll() is None and not (records.exists() and records.stat().st_size >= point):
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert run(tmp_path / "killed").wait() == 0, (tmp_path / "log").read_text()
    assert without_timings(read_records(records.parent)) == without_timings(read_records(undisturbed))


def test_any_torn_end_is_cut_to_whole_units(tmp_path, model_folder, ruler_file, pipe):
    settings = config(model_folder, ruler_file, batch_rows=3)
    examples = examples_of(settings)
    contexts = plan(settings, examples)
    folder = run_sweep(settings, tmp_path, progress=False)
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    content = b"".join(lines)
    units = [unit.keys for context in contexts for unit in context]
    ends = [sum(map(len, lines[: sum(map(len, units[: i + 1]))])) for i in range(len(units))]
    places = {0, len(content)} | {end + step for end in ends for step in (-1, 0, 1)} | set(range(0, len(content), 997))
    for place in sorted(place for place in places if place <= len(content)):
        (folder / RECORDS).write_bytes(content[:place])
        with open_results(settings, tmp_path, examples, contexts) as writer:
            finished = [keys for keys, end in zip(units, ends, strict=True) if end <= place]
            assert writer.done == set().union(*finished)
            assert sum(map(len, missing(contexts, writer))) == len(units) - len(finished)
        assert (folder / RECORDS).read_bytes() == content[: max([end for end in ends if end <= place], default=0)]


def test_a_finished_run_is_left_alone(tmp_path, model_folder, ruler_file, monkeypatch):
    folder = run_sweep(config(model_folder, ruler_file), tmp_path, progress=False)
    before = (folder / RECORDS).read_bytes()
    monkeypatch.setattr(Worker, "run", lambda *_: pytest.fail("ran again"))
    assert run_sweep(config(model_folder, ruler_file), tmp_path, progress=False) == folder
    assert (folder / RECORDS).read_bytes() == before


def test_another_configuration_is_another_folder(tmp_path, model_folder, ruler_file):
    names = {
        results_folder(tmp_path, config(model_folder, ruler_file, **changes).plain()).name
        for changes in ({}, {"seeds": [0]}, {"batch_rows": 9}, {"max_new_tokens": 3})
    }
    assert len(names) == 4


def test_one_writer_at_a_time(tmp_path, model_folder, ruler_file):
    settings = config(model_folder, ruler_file)
    examples = examples_of(settings)
    contexts = plan(settings, examples)
    writer = open_results(settings, tmp_path, examples, contexts)
    with writer, pytest.raises(ValueError, match="another process writes to"):
        open_results(settings, tmp_path, examples, contexts)
    open_results(settings, tmp_path, examples, contexts).__exit__(None, None, None)


def test_other_examples_are_refused(tmp_path, model_folder):
    data = write_rows(tmp_path / "rows.jsonl", ruler_rows(2))
    folder = run_sweep(config(model_folder, data), tmp_path, progress=False)
    before = (folder / RECORDS).read_bytes()
    write_rows(data, ruler_rows(3))
    with pytest.raises(ValueError, match=r"data must hold the examples that .* was begun with"):
        run_sweep(config(model_folder, data), tmp_path, progress=False)
    assert (folder / RECORDS).read_bytes() == before


def test_foreign_records_are_refused(tmp_path, model_folder, ruler_file):
    folder = run_sweep(config(model_folder, ruler_file), tmp_path, progress=False)
    foreign = replace(read_records(folder)[0], press="other")
    (folder / RECORDS).write_text(to_line(asdict(foreign)))
    with pytest.raises(ValueError, match=r"line 1: must be a record of this sweep, got .*'other'"):
        run_sweep(config(model_folder, ruler_file), tmp_path, progress=False)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    with RecordWriter(tmp_path / "x", {"name": "x"}, [], lambda key: frozenset({key})):
        pass
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [CONFIG, "examples.jsonl", RECORDS]


def test_ray_gives_the_same(tmp_path, model_folder, ruler_file):
    pytest.importorskip("ray", reason="ray is not installed")
    from kvpress_prob.sweeps.ray_engine import run_sweep_on_ray

    settings = config(model_folder, ruler_file, batch_rows=3)
    local = read_records(run_sweep(settings, tmp_path / "local", progress=False))
    begun = run_sweep_on_ray(settings, tmp_path / "ray", workers=2, progress=False)
    lines = (begun / RECORDS).read_bytes().splitlines(keepends=True)
    (begun / RECORDS).write_bytes(b"".join(lines[:-1]))
    folder = run_sweep_on_ray(settings, tmp_path / "ray", workers=2, progress=False)
    remote = read_records(folder)

    def order(row: dict) -> tuple:
        return row["example"], row["press"], row["ratio"], row["seed"] or -1

    assert sorted(without_timings(remote), key=order) == sorted(without_timings(local), key=order)
    for workers, gpus, message in (
        (0, 0, "workers must be at least 1"),
        (1, -1, "gpus_per_worker must be a number >= 0"),
    ):
        with pytest.raises(ValueError, match=f"{message}, got {min(workers, gpus)}"):
            run_sweep_on_ray(settings, tmp_path, workers=workers, gpus_per_worker=gpus)


@pytest.mark.parametrize("when", ["loading", "working"])
def test_a_killed_ray_worker_is_one_line(tmp_path, model_folder, when):
    """Scenario S62: whenever it is killed; then the same command gives what an undisturbed run gives."""
    pytest.importorskip("ray", reason="ray is not installed")
    psutil = pytest.importorskip("psutil", reason="psutil is not installed")
    data = write_rows(tmp_path / "rows.jsonl", ruler_rows(8))
    file = tmp_path / "sweep.yaml"
    file.write_text(CONFIG_FILE.format(model=model_folder, data=data))
    command = [sys.executable, "-m", "kvpress_prob.cli", "sweep", str(file), "--report", "false", "--engine", "ray",
               "--workers", "1", "--output", str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def workers() -> list:
        found = []
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile: the next look sees the rest
            everything = psutil.Process(process.pid).children(recursive=True)
            found = [it for it in everything if "".join(it.cmdline()[:1]).startswith("ray::Remote")]
        return found

    def begun() -> bool:
        written = any(it.stat().st_size for it in (tmp_path / "out").glob(f"*/{RECORDS}"))
        return bool(workers()) and (when == "loading" or written)

    while process.poll() is None and not begun():
        time.sleep(0.01)
    while not (found := workers()):
        assert process.poll() is None
    for worker in found:
        worker.kill()
    printed, errors = process.communicate()
    assert process.returncode == 1, errors
    assert printed == ""
    lines = [
        line
        for line in errors.replace("\r", "\n").split("\n")
        if line.strip() and "row/s" not in line and "s/row" not in line
    ]
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvpress-prob: error: a Ray worker was lost (")
    assert lines[0].endswith("; the same command continues the sweep")
    if when == "loading":
        return
    subprocess.run(command, check=True, capture_output=True)
    (folder,) = (tmp_path / "out").iterdir()
    command[command.index("ray")] = "local"
    subprocess.run([*command[:-1], str(tmp_path / "local")], check=True, capture_output=True)
    (local,) = (tmp_path / "local").iterdir()
    found, wanted = (without_timings(read_records(it)) for it in (folder, local))
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))
