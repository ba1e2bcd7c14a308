"""The CPU benchmarks at toy sizes: they run, and their rows say what they claim."""

import json
from dataclasses import asdict, replace

import pandas as pd
import pytest

from benchmarks import (
    attention_error,
    bounded,
    decode_cpu,
    halves,
    physical,
    pooled,
    prefill_cost,
    running,
    target_ratio,
    text_fidelity,
)
from kvpress_prob.records import to_line
from tests.helpers.evaluation import ruler_rows, save_tiny_model, write_rows
from tests.helpers.records import made_up_run

FILLER = "The quick brown fox number {} jumps over the lazy dog while wizards brew tea. "


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model, two texts of more than 200 characters and one that is too short."""
    folder = tmp_path_factory.mktemp("benchmarks")
    save_tiny_model(folder / "model")
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(FILLER.format(name + str(i)) for i in range(4)))
    (folder / "short.txt").write_text("Too short.")
    return folder


def run(benchmark, files, tmp_path, *arguments: str) -> list[dict]:
    output = tmp_path / "out" / "rows.jsonl"
    texts = [str(files / f"{name}.txt") for name in ("a", "b", "short")]
    common = ["--model", str(files / "model"), "--output", str(output), "--text", *texts]
    benchmark.main([*common, *arguments])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row in rows:
        assert set(row["texts"]) == {"a.txt", "b.txt", "short.txt"}
        assert "torch" in row["versions"]
        assert row["settings"]["seed"] == 0
    return rows


def test_target_ratio(files, tmp_path, capsys):
    rows = run(target_ratio, files, tmp_path, "--tokens", "150")
    assert {row["text"] for row in rows} == {"a.txt", "b.txt"}
    assert len(rows) == 2 * 5 * 5
    for row in rows:
        assert row["achieved"] == pytest.approx(row["ratio"], abs=0.05)
        if row["press"] == target_ratio.SYSTEMATIC:
            assert row["entries_off"] <= 1
    assert "max of 2 texts" in capsys.readouterr().out


def test_bounded(files, tmp_path, capsys):
    arguments = ["--press", "reading", "--tokens", "400", "--entries", "150", "--chunk", "100", "--long", "3072"]
    rows = run(bounded, files, tmp_path, "--parts", "memory", "long", *arguments)
    assert [row["part"] for row in rows] == ["memory", "long"]
    assert 0.9 < rows[0]["over_budget_and_chunk"] < 2  # widths of a toy are small beside weights and positions
    assert rows[0]["bytes_after"] < rows[0]["peak_bytes"]
    assert rows[1]["tokens"] == 3072
    assert 0.9 < rows[1]["last_over_first_bytes"] < 1.1
    assert "over_budget_and_chunk" in capsys.readouterr().out


def test_bounded_answers(files, tmp_path, capsys):
    """Every press answers every row; the record names the data, not where it lies."""
    data = write_rows(tmp_path / "rows.jsonl", ruler_rows(2, characters=600))
    arguments = ["--press", "reading", "--data", str(data), "--tasks", "niah_single_1", "--seeds", "2"]
    rows = run(bounded, files, tmp_path, "--parts", "ruler", *arguments)
    wanted = [("dense", None)] + 2 * [("reading, one draw", 0), ("reading, bounded", 0)]
    wanted += [("reading, bounded, top-k", None), ("snapkv, bounded, top-k", None)]
    got = [(row["press"], 0 if row["seed"] == 1 else row["seed"]) for row in rows]
    assert got == wanted
    assert all(0 <= row["score"] <= 100 and row["task"] == "niah_single_1" for row in rows)
    assert rows[0]["settings"]["data"] == "rows.jsonl"
    assert "niah_single_1" in capsys.readouterr().out


def test_attention_error(files, tmp_path, capsys):
    arguments = ["--tokens", "150", "--rows", "5", "--ratios", "0.3", "0.8", "--seeds", "2"]
    rows = run(attention_error, files, tmp_path, *arguments)
    drawn = [row for row in rows if row["draw"] is not None]
    assert len(rows) == 2 * 2 * (2 + 2 * 13)
    assert {row["draw"] for row in drawn} == {0, 1}
    assert all(0 < row["relative"] < 10 and row["absolute"] > 0 for row in rows)
    by_press = {row["press"]: row["relative"] for row in rows if row["ratio"] == 0.8}
    assert list(by_press) == list(attention_error.presses())
    assert "relative attention error, standard error of 2 texts" in capsys.readouterr().out


def test_decode_cpu(files, tmp_path, capsys):
    arguments = ["--contexts", "64", "--model-contexts", "100", "--ratios", "0.5", "--rounds", "2"]
    rows = run(decode_cpu, files, tmp_path, *arguments, "--bandwidth-bytes", "4096")
    attention = [row for row in rows if row["case"] == "attention"]
    assert [row["way"] for row in attention] == 2 * ["DynamicCache", "AdaKV, masked", "ours"]
    assert [(row["way"], row["ratio"]) for row in rows[len(attention) :]] == [("DynamicCache", 0.0), ("prob_best", 0.5)]
    for row in rows:
        assert row["ms"] > 0
    for dense, masked, ours in zip(*[iter(attention)] * 3, strict=True):
        assert masked["floor_ms"] == dense["floor_ms"]
        assert ours["floor_ms"] == pytest.approx(dense["floor_ms"] / 2, rel=0.1)
    assert "model, median of 2 rounds" in capsys.readouterr().out


def test_prefill_cost(files, tmp_path, capsys):
    rows = run(prefill_cost, files, tmp_path, "--tokens", "200", "--rounds", "2")
    parts = [f"reconstruction {part:g}" for part in prefill_cost.FRACTIONS]
    assert [row["press"] for row in rows] == ["dense", "exact", "max_rows=256", "expected", *parts, "prob_best"]
    assert rows[0]["over_dense"] == rows[0]["bytes_over_dense"] == 1
    assert all(row["bytes_over_dense"] < 1 for row in rows[1:])
    assert "prefill of 200 tokens" in capsys.readouterr().out


def test_physical(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(physical, "WORDS", 20)
    presses = ["adakv_snapkv_physical", "kvzip_physical", "duo_attention_physical"]
    arguments = ["--tokens", "200", "--ratio", "0.5", "--rounds", "1", "--press", *presses]
    rows = {(row["press"], row["way"]): row for row in run(physical, files, tmp_path, *arguments)}
    assert len(rows) == 1 + 2 * len(presses)
    for name in ("adakv_snapkv", "kvzip", "duo_attention"):
        hidden, evicted = rows[name, "hidden"], rows[name, "evicted"]
        assert hidden["bytes_over_dense"] >= 1 > evicted["bytes_over_dense"]
        assert hidden["achieved_ratio"] == evicted["achieved_ratio"] > 0.2
        assert evicted["same_tokens"]
    assert rows["kvzip", "hidden"]["bytes_over_dense"] > 1.9
    assert "ratio 0.5, median of 1 rounds" in capsys.readouterr().out


def test_text_fidelity(files, tmp_path, capsys):
    presses = ["prob_best", "prob_min_h", "h2o", "kvzip"]
    rows = run(
        text_fidelity, files, tmp_path, "--tokens", "150", "--next", "20", "--ratios", "0.1", "0.5", "--press", *presses
    )
    assert [(row["press"], row["ratio"]) for row in rows[:8]] == [(it, r) for it in presses for r in (0.1, 0.5)]
    assert len(rows) == 16
    assert all(row["kl"] > 0 for row in rows)
    assert all((row["bytes_over_dense"] >= 1) == (row["press"] == "kvzip") for row in rows if row["ratio"] == 0.5)
    out = capsys.readouterr().out
    assert "mean of 2 texts" in out
    assert "over the best top-k press" in out


def test_a_press_with_options():
    spec = text_fidelity.spec("prob_best(max_weight=3.0, press.0.press.source.fraction=0.5)")
    assert (spec.press, spec.options) == ("prob_best", {"max_weight": 3.0, "press.0.press.source.fraction": 0.5})
    assert text_fidelity.spec("kvzip").options == {}


def test_halves_do_not_depend_on_order_or_company(tmp_path, capsys):
    rows = pd.DataFrame({"context": [f"text {i}" for i in range(40)], "question": "What?", "task": ["a", "b"] * 20})
    tune, report = (halves.split(rows, half) for half in halves.HALVES)
    assert len(tune) + len(report) == 40
    assert not set(tune.index) & set(report.index)
    assert set(halves.split(rows.iloc[::-1].head(15), "tune").index) <= set(tune.index)
    rows.to_parquet(tmp_path / "rows.parquet")
    halves.main([str(tmp_path / "rows.parquet"), "--half", "tune", "--tasks", "b", "--per-task", "3",
                 "--output", str(tmp_path / "half.jsonl")])  # fmt: skip
    chosen = [json.loads(line) for line in (tmp_path / "half.jsonl").read_text().splitlines()]
    assert [row["context"] for row in chosen] == list(tune[tune["task"] == "b"]["context"][:3])
    with pytest.raises(ValueError, match=r"tasks must be among \['a', 'b'\], got \['c'\]"):
        halves.split(rows, "tune", ["c"])


def test_pooled_sweeps(tmp_path, capsys):
    _, _, records = made_up_run()
    records = [replace(record, score=0.0) if record.task == "vt" else record for record in records]
    for name in ("short", "long"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"name": name}))
        (folder / "records.jsonl").write_text("".join(to_line(asdict(record)) for record in records))
    folders = [str(tmp_path / "short"), str(tmp_path / "long")]
    pooled.main([*folders, "--other", "snapkv", "--output", str(tmp_path / "out")])
    averages = pd.read_csv(tmp_path / "out" / "averages.csv").set_index(["press", "ratio"])
    solved = pd.DataFrame([asdict(record) for record in records if record.task != "vt"])
    means = solved.groupby(["press", "ratio"])["score"].mean()
    for key, mean in means.items():
        assert averages.loc[key, "score"] == pytest.approx(mean)
        assert averages.loc[key, "of_dense"] == pytest.approx(mean / means["no_press", 0.0])
    difference = means["prob_best", 0.9] - means["snapkv", 0.9]
    assert averages.loc[("prob_best", 0.9), "difference"] == pytest.approx(difference)
    written = pd.read_csv(tmp_path / "out" / "records.csv")
    assert set(written["task"]) == {f"{name}/{task}" for name in ("short", "long") for task in solved["task"].unique()}
    assert "prediction" not in written
    assert (tmp_path / "out" / "score.png").stat().st_size > 1000
    assert "16 examples of 4 tasks" in capsys.readouterr().out


def test_texts_that_are_too_short(files, tmp_path):
    with pytest.raises(ValueError, match="texts must have at least 900 tokens, got at most 3"):
        run(target_ratio, files, tmp_path, "--tokens", "900")


def test_default_texts_are_long():
    texts = running.read_texts(None)
    assert len(texts) >= 4
    assert all(len(text) > 8_000 for text in texts.values())


def test_every_function_runs_once_a_round_after_a_warm_up():
    calls = []
    times = running.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 3)
    assert calls == list("ab" * 4)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
