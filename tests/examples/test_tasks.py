"""Examples from files, the Hub and the generator."""

import json

import pandas as pd
import pytest

from kvpress_prob.examples import loading, tasks
from kvpress_prob.examples.generator import MAKERS, generate_examples
from kvpress_prob.examples.loading import load_examples
from kvpress_prob.examples.metrics import score_prediction
from tests.helpers.evaluation import ruler_rows, write_rows


def words(text: str) -> int:
    return len(text.split())


def longbench_rows() -> list[dict]:
    return [
        {"context": "c " * n, "question": "q", "answer_prefix": "A:", "answers": ["x", "y"], "task": task,
         "max_new_tokens": 5, "all_classes": ["x", "z"] if task == "trec" else None}
        for n, task in ((3, "trec"), (9, "qasper"), (4, "qasper"))
    ]  # fmt: skip


def test_parquet_and_json_lines_are_alike(tmp_path):
    rows = ruler_rows(4)
    lines = write_rows(tmp_path / "a.jsonl", rows)
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    one = load_examples("ruler", str(lines), count_tokens=words)
    assert one == load_examples("ruler", str(tmp_path / "a.parquet"), count_tokens=words)
    assert [example.name for example in one] == ["niah_single_1/0", "vt/0", "niah_single_1/1", "vt/1"]
    assert one[0].answers == ["111"]
    assert one[0].context == rows[0]["context"]


def test_folder_filters_and_order(tmp_path):
    write_rows(tmp_path / "b.jsonl", longbench_rows()[:1])
    pd.DataFrame(longbench_rows()[1:]).drop(columns="all_classes").to_parquet(tmp_path / "a.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    examples = load_examples("longbench", str(tmp_path), count_tokens=words, tasks=["trec", "qasper"])
    assert [example.name for example in examples] == ["trec/0", "qasper/0", "qasper/1"]
    assert [example.all_classes for example in examples] == [["x", "z"], None, None]
    short = load_examples("longbench", str(tmp_path), count_tokens=words, max_context_tokens=4, examples_per_task=1)
    assert [example.name for example in short] == ["qasper/1", "trec/0"]


def test_tasks_take_turns(tmp_path):
    rows = sorted(ruler_rows(6), key=lambda row: row["task"])[:-1]  # three of one task, then two of another
    names = [it.name for it in load_examples("ruler", str(write_rows(tmp_path / "a.jsonl", rows)), count_tokens=words)]
    assert names == ["niah_single_1/0", "vt/0", "niah_single_1/1", "vt/1", "niah_single_1/2"]


def test_numbers_stay_text(tmp_path):
    rows = ruler_rows(1)
    rows[0]["answer"] = ["007"]
    rows[0]["question"] = "2020-01-01"
    example = load_examples("ruler", str(write_rows(tmp_path / "a.jsonl", rows)), count_tokens=words)[0]
    assert (example.answers, example.question) == (["007"], "2020-01-01")


@pytest.mark.parametrize(
    ("benchmark", "folders", "wanted"),
    [("ruler", ["8192"], None), ("longbench", ["qasper", "trec"], ["qasper", "trec"])],
)
def test_hub_names_are_kvpress_own(monkeypatch, benchmark, folders, wanted):
    asked = []

    class Table:
        def __init__(self, rows):
            self.rows = rows

        def to_pandas(self):
            return pd.DataFrame(self.rows)

    def load(name, data_dir, split):
        asked.append((name, data_dir, split))
        return Table(ruler_rows(1) if benchmark == "ruler" else [r for r in longbench_rows() if r["task"] == data_dir])

    monkeypatch.setattr(loading, "load_dataset", load)
    examples = load_examples(benchmark, "hub", count_tokens=words, tasks=wanted, length=8192)
    assert asked == [(tasks.HUB[benchmark], folder, "test") for folder in folders]
    assert examples


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"benchmark": "loogle"}, r"benchmark must be one of \('ruler', 'longbench'\), got 'loogle'"),
        ({}, {"tasks": ["niah"]}, r"tasks must be among \['niah_single_1'.*got 'niah'"),
        ({}, {"tasks": ["cwe"]}, r"tasks must be among \['niah_single_1', 'vt'\] of .*got 'cwe'"),
        ({"task": "mine"}, {}, "column 'task' must be among .*got 'mine'"),
        ({}, {"benchmark": "longbench"}, r"must have the columns .*got none called \['answers'\]"),
        ({}, {"max_context_tokens": 1}, "must leave at least one example, got none"),
        ({}, {"examples_per_task": 0}, "must leave at least one example"),
    ],
)
def test_bad_data(tmp_path, change, options, message):
    rows = [{**row, **change} for row in ruler_rows(2)]
    settings = {"benchmark": "ruler", "data": str(write_rows(tmp_path / "a.jsonl", rows)), "count_tokens": words}
    with pytest.raises(ValueError, match=message):
        load_examples(**{**settings, **options})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "must be 'hub', 'generated' or a file or folder"),
        ("a.parquet", "x", "data must be readable"),
        ("a.jsonl", "{", "data must be readable"),
        ("a.jsonl", "", "data must have rows, got none"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_examples("ruler", str(tmp_path / name), count_tokens=words)
    with pytest.raises(ValueError, match="must be 'hub', 'generated' or a file or folder"):
        load_examples("ruler", str(tmp_path / "nowhere"), count_tokens=words)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must be 'hub', 'generated' or a file or folder"):
        load_examples("ruler", str(tmp_path / "empty"), count_tokens=words)


@pytest.mark.parametrize("task", MAKERS)
@pytest.mark.parametrize("length", [300, 900])
def test_generated_examples(task, length):
    examples = generate_examples(task, 3, length, words, seed=7)
    assert len({example.context for example in examples}) == 3
    for example in examples:
        size = words(example.context + example.question + example.answer_prefix) + example.max_new_tokens
        assert length - 40 < size <= length
        text = example.context.lower()
        assert all(answer.lower() in text for answer in example.answers)
        assert score_prediction("ruler", task, ", ".join(example.answers), example.answers) == 100
        assert score_prediction("ruler", task, "", example.answers) == 0
    assert examples[:2] == generate_examples(task, 2, length, words, seed=7)
    assert examples[0].context != generate_examples(task, 1, length, words, seed=8)[0].context
    json.dumps(examples[0].as_row())


@pytest.mark.parametrize(("task", "n"), [("niah_multivalue", 4), ("niah_multiquery", 4), ("vt", 5), ("cwe", 10)])
def test_number_of_answers(task, n):
    assert len(generate_examples(task, 1, 600, words)[0].answers) == n


@pytest.mark.parametrize("length", [130, 200, 3000])
def test_frequent_words_are_the_most_frequent(length):
    for example in generate_examples("fwe", 3, length, words):
        listed = pd.Series(example.context.split("\n")[1].split()).value_counts()
        assert list(listed.index[:3]) == example.answers
        assert listed.iloc[2] > listed.iloc[3]


def test_generator_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"task must be one of \['cwe'.*got 'qa_1'"):
        generate_examples("qa_1", 1, 500, words)
    with pytest.raises(ValueError, match="length must be large enough for vt, got 20 tokens"):
        generate_examples("vt", 1, 20, words)
    with pytest.raises(ValueError, match="different words in cwe"):
        generate_examples("cwe", 1, 10**6, words)
    with pytest.raises(ValueError, match="data='generated' needs benchmark='ruler'"):
        load_examples("longbench", "generated", count_tokens=words)
    few = load_examples("ruler", "generated", count_tokens=words, tasks=["vt"], length=300, examples_per_task=2)
    assert [example.name for example in few] == ["vt/0", "vt/1"]
