"""Tables of examples: every cell is what its scorer can use, or is named."""

import json

import numpy as np
import pandas as pd
import pytest

from kvpress_prob.examples.loading import load_examples
from kvpress_prob.examples.metrics import LONGBENCH_METRICS, score_prediction
from kvpress_prob.examples.tables import checked_table, read_table
from kvpress_prob.examples.tasks import ANSWERS, BENCHMARKS, HUB, TASKS
from tests.helpers.evaluation import ruler_rows, write_rows


def longbench_row(task: str = "qasper", **changes) -> dict:
    (row,) = ruler_rows(1)
    answers = row.pop("answer")
    row |= {"task": task, "answers": answers, "all_classes": ["x", "y"] if task == "trec" else None}
    return row | changes


def count(text: str) -> int:
    return len(text)


def test_every_benchmark_has_its_tables():
    assert set(BENCHMARKS) == set(TASKS) == set(HUB) == set(ANSWERS)
    assert set(TASKS["longbench"]) == set(LONGBENCH_METRICS)


@pytest.mark.parametrize("answer", ["111", 111, ["111"], [111]], ids=repr)
@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_one_answer_is_one_answer(tmp_path, benchmark, file, answer):
    """Scenario S56: a plain text or number is one answer, not its letters."""
    row = ruler_rows(1)[0] | {"answer": answer} if benchmark == "ruler" else longbench_row(answers=answer)
    if file.endswith("jsonl"):
        write_rows(tmp_path / file, [row, row])
    else:
        pd.DataFrame([row, row]).to_parquet(tmp_path / file)
    examples = load_examples(benchmark, str(tmp_path / file), count_tokens=count)
    for example in examples:
        assert example.answers == ["111"]
        assert score_prediction(benchmark, example.task, "it is 111", example.answers) > 0
        assert score_prediction(benchmark, example.task, "1 of one, 1 of all", example.answers) == 0


@pytest.mark.parametrize(
    ("benchmark", "change", "message"),
    [
        ("ruler", {"answer": []}, "answer must not be empty"),
        ("ruler", {"answer": ["7", " "]}, "answer must not hold blank text"),
        ("ruler", {"answer": ""}, "answer must not hold blank text"),
        ("ruler", {"answer": None}, "answer must be text, got None"),
        ("ruler", {"answer": [None]}, "answer must be text, got None"),
        ("ruler", {"answer": [["7"]]}, r"answer must be text, got \['7'\]"),
        ("ruler", {"answer": [float("nan")]}, "must be JSON in UTF-8|answer must be text, got nan"),
        ("ruler", {"answer": 10**400}, "answer must be text, got 1000"),
        ("ruler", {"answer": True}, "answer must be text, got True"),
        ("ruler", {"answer": {"a": 1}}, r"answer must be text, got \{'a': 1\}"),
        ("ruler", {"answer": ["\ud800"]}, "answer must be text that UTF-8 can hold"),
        ("longbench", {"answers": []}, "answers must not be empty"),
        ("longbench", {"answers": [None]}, "answers must be text, got None"),
        ("longbench", {"task": "passage_retrieval_en"}, r"answers must name a paragraph .*got '111'"),
        ("longbench", {"task": "trec", "all_classes": None}, "all_classes must be a list of class names for trec"),
        ("longbench", {"task": "trec", "all_classes": []}, "all_classes must be a list of class names for trec"),
        *(
            (benchmark, {name: value}, f"{name} must be text, got ")
            for benchmark in BENCHMARKS for name in ("context", "question", "answer_prefix")
            for value in (None, 3, ["x"])
        ),
        *(
            (benchmark, {"max_new_tokens": value}, "max_new_tokens must be (at least 1.*|a whole number), got ")
            for benchmark in BENCHMARKS for value in (0, -3, 0.5, 2.5, "8", None, True, [8], 10**400, 10**30)
        ),
        ("ruler", {"context": "a\ud800b"}, "context must be text that UTF-8 can hold"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_cells_are_named_with_their_row(tmp_path, benchmark, change, message):
    good = ruler_rows(1)[0] if benchmark == "ruler" else longbench_row()
    path = write_rows(tmp_path / "rows.jsonl", [good, good, good | change])
    with pytest.raises(ValueError, match=message):
        load_examples(benchmark, str(path), count_tokens=count)
    with pytest.raises(ValueError, match=r"row 3 of 'here'|line 3"):
        checked_table(benchmark, read_table(path), "here")


def test_tokens_are_a_finite_number(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [ruler_rows(1)[0] | {"max_new_tokens": "HERE"}])
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace('"HERE"', "1e400"))
    with pytest.raises(ValueError, match=r"row 1 of .*: max_new_tokens must be at least 1 and below 2\^63, got inf"):
        load_examples("ruler", str(tmp_path / "rows.jsonl"), count_tokens=count)


def test_a_checked_table_is_a_new_one():
    table = pd.DataFrame([row | {"answer": "7"} for row in ruler_rows(2)])
    found = checked_table("ruler", table, "here")
    assert found["answer"].tolist() == [["7"], ["7"]]
    assert table["answer"].tolist() == ["7", "7"]
    arrays = table.assign(answer=[np.array(["7", "8"]), np.array(["9"])])
    assert checked_table("ruler", arrays, "here")["answer"].tolist() == [["7", "8"], ["9"]]


@pytest.mark.parametrize("separator", "\r\v\f\x1c\x85\u2028\u2029", ids=lambda c: f"U+{ord(c):04X}")
def test_lines_of_data_end_at_line_feeds(tmp_path, separator):
    """Scenario S55, in data that was written without escapes."""
    rows = [row | {"question": f"a{separator}b?", "answer": [f"x{separator}y"]} for row in ruler_rows(3)]
    # JSON itself escapes control characters; the others stand as they are.
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8", newline="")
    examples = load_examples("ruler", str(tmp_path / "rows.jsonl"), count_tokens=count)
    assert {example.question for example in examples} == {f"a{separator}b?"}
    assert all(example.answers == [f"x{separator}y"] for example in examples)


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"a": NaN}', '{"a": Infinity}', '{"a": 1, "a": 2}'])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    rows = [json.dumps(row) for row in ruler_rows(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:2], "", line, rows[2]]))
    with pytest.raises(ValueError, match=r"data must be readable, got '.*rows.jsonl': .*line 4: must be"):
        read_table(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("answers", [[], "111"])
def test_scores_need_a_list_of_answers(answers):
    for benchmark, task in (("ruler", "vt"), ("longbench", "qasper")):
        with pytest.raises(ValueError, match="answers must be a list of at least one text, got"):
            score_prediction(benchmark, task, "111", answers)
