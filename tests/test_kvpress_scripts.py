"""kvpress' own evaluation script, with our presses and local data; the sweep agrees with it.

The script is a copy of the installed version's source archive, which pip downloads once into the user's cache.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from kvpress_prob.cli import main
from kvpress_prob.kvpress_scripts import fetch_scripts, run_kvpress_evaluation
from kvpress_prob.records import read_records
from kvpress_prob.records.statistics import tabulate
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.local_engine import run_sweep
from tests.helpers.evaluation import ruler_rows, write_rows

pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("jieba", "fuzzywuzzy", "nltk", "bert_score")),
        reason="kvpress[eval] is not installed",
    ),
    pytest.mark.filterwarnings("ignore"),  # the dependencies of kvpress' scripts warn when imported
]


@pytest.fixture(scope="module")
def scripts() -> Path:
    return fetch_scripts()


def test_runs_and_agrees_with_a_sweep(tmp_path, model_folder, scripts):
    rows = ruler_rows()
    for row, answer in zip(rows, "aeio", strict=True):
        row["answer"] = [answer, "T"]  # single characters: some random answers hold them
    data = write_rows(tmp_path / "rows.jsonl", rows)
    scores = {}
    for press in ("prob_best", "h2o", "snapkv"):
        # In a process of its own, as on a command line: the script sets up logging and seeds for its process.
        command = [
            *(sys.executable, "-m", "kvpress_prob.cli", "eval", "--data", str(data)),
            *("--kvpress-evaluation", str(scripts), "--", "--model", str(model_folder), "--press_name", press),
            *(
                "--compression_ratio",
                "0.5",
                "--output_dir",
                str(tmp_path / "out"),
                "--dataset=ruler",
                "--device",
                "cpu",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        folder = next((tmp_path / "out").glob(f"*{press}*"))
        metrics = json.loads((folder / "metrics.json").read_text())
        scores[press] = {task: metric["string_match"] for task, metric in metrics.items()}
    config = SweepConfig(
        name="agree", model=str(model_folder), data=str(data), presses=list(scores), ratios=[0.5], decode="single"
    )
    table = tabulate(read_records(run_sweep(config, tmp_path, progress=False))).scores
    for row in table[table["task"] != "all"].itertuples():
        assert round(row.score, 2) == scores[row.press][row.task]
    assert table["score"].nunique() > 1


def test_fetches_once(tmp_path, monkeypatch, scripts):
    assert (scripts / "evaluate.py").is_file()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    assert fetch_scripts() == scripts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "rulers"], r"--dataset must be one of \['aime25'.*got 'rulers'"),
        (["--press-name=snap"], r"--press_name must be one of .*'prob_best'.*got 'snap'"),
        (["--dataset", "loogle"], "data serves --dataset ruler or longbench"),
        (["--data_dir", "4096"], "without --data_dir"),
    ],
)
def test_bad_arguments(tmp_path, scripts, ruler_file, arguments, message):
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        run_kvpress_evaluation(arguments, scripts=scripts, data=ruler_file)
    assert not {name for name in set(sys.modules) - modules if name.startswith(("benchmarks", "evaluate"))}
    assert str(scripts) not in sys.path


def test_wrong_folder(tmp_path, capsys):
    assert main(["eval", "--kvpress-evaluation", str(tmp_path), "--", "--dataset", "ruler"]) == 2
    assert "without evaluate.py" in capsys.readouterr().err


def test_another_package_called_benchmarks_is_in_nobodys_way(monkeypatch):
    """The scripts have a package of that name themselves."""
    mine = ModuleType("benchmarks")
    monkeypatch.setitem(sys.modules, "benchmarks", mine)
    with pytest.raises(ValueError, match="--press_name must be one of"):
        run_kvpress_evaluation(["--press_name", "snap"])
    assert sys.modules["benchmarks"] is mine
    assert "evaluate_registry" not in sys.modules
