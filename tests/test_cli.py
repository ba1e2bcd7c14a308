"""The command line: what works, and one line with exit code 2 for what does not."""

import json
from dataclasses import dataclass

import pandas as pd
import pytest
from transformers.utils import logging

from kvpress_prob import cli
from kvpress_prob.sources import find_surrogate, load_surrogate
from tests.helpers.evaluation import ruler_rows, save_tiny_model, write_rows

TEXT = "".join(f"Note {i}: the quick brown fox jumps over dog {i * i}. " for i in range(7))
CONFIG = """
name: small
model: {model}
data: {data}
presses: [no_press, {{press: prob_best, options: {{temperature: 2}}, label: warm}}, snapkv]
ratios: [0.5]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("cli")
    model = save_tiny_model(folder / "model")
    data = write_rows(folder / "rows.jsonl", ruler_rows())
    (folder / "sweep.yaml").write_text(CONFIG.format(model=model, data=data))
    return folder


def test_sweep_and_report(files, tmp_path, capsys):
    command = ["sweep", str(files / "sweep.yaml"), "--ratios", "[0.3, 0.6]", "--examples-per-task=1",
               "--output", str(tmp_path / "out")]  # fmt: skip
    assert cli.main(command) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert str(folder / "report.html") in capsys.readouterr().out
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["ratios"], saved["examples_per_task"]) == ([0.3, 0.6], 1)
    assert saved["presses"][1]["label"] == "warm"
    assert len((folder / "records.jsonl").read_text().splitlines()) == 2 * (1 + 2 * 2)
    (folder / "report.html").unlink()
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "report.html").exists()


def test_demo(files, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["demo", "--model", str(files / "model"), "--text", str(tmp_path / "text.txt"), "--ratios", "[0.5]",
               "--question", "Who: he?", "--question=Why?", "--tokens=4",
               "--output", str(tmp_path / "out")]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.index("ms/token") < printed.index("Who: he?") < printed.index("Why?")
    table = pd.read_csv(tmp_path / "out" / "demo.csv")
    assert table["press"].tolist() == ["no_press", "snapkv", "h2o", "prob_min_h", "prob_best"]
    for press in table["press"]:
        assert printed.count(press) == 3
    assert (tmp_path / "out" / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_diagnose(files, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    output = tmp_path / "out"
    command = ["diagnose", "--model", str(files / "model"), "--text", str(tmp_path / "text.txt"), "--tokens", "80",
               "--rows", "2", "--budgets", "[4]", "--draws", "2", "--output", str(output)]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert {"closable", "spearman", "auc", "weighted_deviation"} <= set(printed.split())
    assert sorted(file.name for file in output.iterdir()) == [
        "cells.csv", "heads.png", "rows.csv", "settings.json", "summary.csv"
    ]  # fmt: skip
    assert json.loads((output / "settings.json").read_text())["tokens"] == 80
    assert pd.read_csv(output / "cells.csv")["s"].unique().tolist() == [4]
    assert cli.main([*command[:6], "900"]) == 2
    assert "text must have at least 900 tokens, got" in capsys.readouterr().err


def test_list(capsys):
    assert cli.main(["list"]) == 0
    words = capsys.readouterr().out.split()
    assert {"prob_best", "snapkv", "kvzip", "no_press", "niah_multikey_3", "qasper"} <= set(words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep", "{sweep}", "--presses", "[snap]"], "press must be one of ['no_press', 'prob_min'"),
        (["sweep", "{sweep}", "--tasks", "[niah]"], "tasks must be among ['niah_single_1'"),
        (["sweep", "{sweep}", "--tasks", "[cwe]"], "tasks must be among ['niah_single_1', 'vt'] of"),
        (["sweep", "{sweep}", "--ratios", "[1.5]"], "ratios must be in [0, 1), got 1.5"),
        (["sweep", "{sweep}", "--benchmark", "loogle"], "Expected a typing.Literal['ruler', 'longbench']"),
        (["sweep", "{sweep}", "--benchmark", "longbench"], "got none called ['answers']"),
        (["sweep", "{sweep}", "--model", "/no/where"], "model must be 'smollm2-demo', a Hub name or a folder"),
        (["sweep", "{sweep}", "--data", "{empty}"], "data must have rows, got none"),
        (["sweep", "{sweep}", "--engine", "dask"], "Expected a typing.Literal['local', 'ray']"),
        (["sweep", "{sweep}", "--engine", "ray", "--workers", "0"], "workers must be at least 1, got 0"),
        (["sweep", "{bad_key}"], "must be among ['name', 'model', 'presses', 'ratios'"),
        (["sweep", "{bad_yaml}"], "config must be a YAML file, got"),
        (["sweep", "{bad_list}"], "config must be a YAML file of keys and values"),
        (["sweep", "{missing}"], "config must be a YAML file, got"),
        (["sweep"], "the following arguments are required: sweep.config.name"),
        (["demo", "--text", "{missing}"], "text must be a UTF-8 file, got"),
        (["demo", "--model", "{model}", "--ratios", "[0.5, 1]"], "ratios must be in (0, 1), got 1.0"),
        (["demo", "--model", "/no/where"], "model must be 'smollm2-demo', a Hub name or a folder"),
        (["demo", "--model", "{model}", "--text", "{empty}"], "text must have at least 128 + 64 tokens, got"),
        (["demo", "--model", "{model}", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["demo", "--model", "/no/where", "--seed", "-1"], "seed must be an integer in [0, 2^63), got -1"),
        (["demo", "--model", "/no/where", "--ratios", "0.5", "0.5"], "ratios must be different from each other"),
        (["demo", "--model", "/no/where", "--ratios", 400 * "1"], "must be ones that a float can hold, got --ratios="),
        (["diagnose", "--model", "/no/where", "--tokens", "-5"], "tokens must be at least 1, got -5"),
        (["diagnose", "--model", "/no/where", "--rows", "0"], "rows must be at least 1, got 0"),
        (["diagnose", "--model", "/no/where", "--budgets", "4", "5"], "budgets must be different ones among [4, 8"),
        (["demo", "--output", "{empty}"], "output must be a folder, got the file"),
        (["demo", "--tokens", "many"], "Expected a <class 'int'>. Got value: many"),
        (["fit", "--output", "{folder}"], "output must be a file, got the folder"),
        (["fit", "--output", "{missing}/one"], "output must be in an existing folder, got"),
        (["fit", "--model", "{model}", "--text", "{empty}", "--window", "0"], "window must be an integer >= 5, got 0"),
        (["report", "{missing}"], "must be a results folder, got no records.jsonl"),
        (["sweeep"], "invalid choice: 'sweeep' (choose from"),
        (["list", "--", "x"], "list takes nothing after --, got ['x']"),
    ],
)
def test_bad_input(files, tmp_path, capsys, monkeypatch, arguments, message):
    names = {"sweep": files / "sweep.yaml", "model": files / "model", "folder": tmp_path}
    names["missing"] = tmp_path / "nothing"
    for name, text in (("bad_key", "nmae: x\n"), ("bad_yaml", "a: [b\n"), ("bad_list", "- 3\n"), ("empty", "")):
        names[name] = tmp_path / f"{name}.jsonl"
        names[name].write_text(text)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert cli.main([argument.format(**names) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvpress-prob: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_traceback_on_request(capsys):
    assert cli.main(["--traceback", "report", "/no/where"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_new_subcommand_is_one_function(monkeypatch):
    @dataclass
    class Options:
        size: int = 3

    called = {}

    def bench(config: Options, arguments: list[str], dry_run: bool = False) -> None:
        """Measure.

        Parameters
        ----------
        config
            What.
        arguments
            More.
        dry_run
            Do nothing.
        """
        called.update(config=config, arguments=arguments, dry_run=dry_run)

    monkeypatch.setitem(cli.COMMANDS, "bench", bench)
    assert cli.main(["bench", "--size", "4", "--dry-run", "true", "--", "-x", "--y=1"]) == 0
    assert called == {"config": Options(4), "arguments": ["-x", "--y=1"], "dry_run": True}


def test_fit_leaves_a_surrogate_that_the_model_finds(model_folder, pipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    argv = ["fit", "--model", str(model_folder), "--text", str(text), "--tokens", "480", "--window", "80"]
    assert cli.main(argv) == 0
    folder = tmp_path / "kvpress-prob" / "surrogates"
    assert sorted(it.suffix for it in folder.iterdir()) == [".png", ".safetensors"]
    assert find_surrogate(pipe.model).header.fitted_on["windows"] == 6
    assert "top 10%" in capsys.readouterr().out
    assert cli.main([*argv, "--output", str(tmp_path / "one.png")]) == 0
    assert load_surrogate(tmp_path / "one.png", model=pipe.model).header.fitted_on["windows"] == 6
    assert (tmp_path / "one.png.png").read_bytes().startswith(b"\x89PNG")


def test_a_fit_that_cannot_be_saved_can_be_continued(model_folder, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("kvpress_prob.fitting.fit.CHECKPOINT_SECONDS", 0.0)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    argv = ["fit", "--model", str(model_folder), "--text", str(tmp_path / "text.txt"), "--tokens", "480",
            "--window", "80", "--output", str(tmp_path / "one.safetensors")]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("kvpress_prob.sources.save_surrogate", fail)
        assert cli.main(argv) == 2
    assert (tmp_path / "one.safetensors.partial").is_file()
    assert cli.main([*argv, "--window", "60"]) == 2
    assert f"delete '{tmp_path / 'one.safetensors.partial'}'" in capsys.readouterr().err
    assert cli.main(argv) == 0
    assert sorted(it.name for it in tmp_path.iterdir()) == ["one.safetensors", "one.safetensors.png", "text.txt"]
