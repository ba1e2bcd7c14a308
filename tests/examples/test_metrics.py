"""Scores equal kvpress' own."""

import json
from pathlib import Path

import pytest

from kvpress_prob.examples.metrics import score_prediction

GOLDEN = [json.loads(line) for line in (Path(__file__).parents[1] / "data" / "scorers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", GOLDEN, ids=[f"{i}-{row['task']}" for i, row in enumerate(GOLDEN)])
def test_equals_what_kvpress_returned(row):
    score = score_prediction(row["benchmark"], row["task"], row["prediction"], row["answers"], row["all_classes"])
    assert round(score, 2) == row["score"]


def test_golden_rows_cover_all_metrics():
    assert {row["task"] for row in GOLDEN} >= {"qasper", "gov_report", "trec", "passage_count", "lcc", "vt", "qa_1"}


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"benchmark must be one of \('ruler', 'longbench'\), got 'loogle'"):
        score_prediction("loogle", "x", "", [])
    with pytest.raises(ValueError, match=r"task must be one of \['2wikimqa', .*got 'lsht'"):
        score_prediction("longbench", "lsht", "", [])
