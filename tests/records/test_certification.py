"""Certificates: exact bounds, the chance of certifying what should not be, and what is counted as a request."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kvpress_prob import cli
from kvpress_prob.records import to_line
from kvpress_prob.records.certification import (
    certify,
    describe,
    fixed_sequences,
    requests_needed,
    sequence_bounds,
    shared_confidence,
    upper_bound,
)
from kvpress_prob.records.frames import read_frame, records_frame
from tests.helpers.records import made_up_run

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "ruler"


@pytest.mark.parametrize(
    ("requests", "degraded", "bound"), [(58, 0, 0.05034), (59, 0, 0.04951), (93, 1, 0.04999), (100, 2, 0.06162)]
)
def test_exact_values(requests, degraded, bound):
    assert upper_bound(degraded, requests, 0.95) == pytest.approx(bound, abs=5e-6)
    counts = pd.DataFrame([("a", 0.5, requests, degraded)], columns=["press", "ratio", "requests", "degraded"])
    assert fixed_sequences(counts, 0.05, 0.95)["certified"].tolist() == [bound <= 0.05]
    assert requests_needed(0.05, 0.95) == 59


@given(st.integers(1, 400), st.data(), st.floats(0.5, 0.999))
def test_the_bound_solves_its_equation(requests, data, confidence):
    degraded = data.draw(st.integers(0, requests))
    bound = upper_bound(degraded, requests, confidence)
    if degraded == requests:
        assert bound == 1
    else:
        assert binom.cdf(degraded, requests, bound) == pytest.approx(1 - confidence, rel=1e-6)


@pytest.mark.parametrize(
    ("presses", "risks", "requests"),
    [(1, [0.0501], 120), (1, [0.02, 0.051, 0.2], 200), (3, [0.051, 0.051], 150), (4, [0.03, 0.051, 0.06], 300)],
)
def test_policies_above_the_limit_are_rarely_certified(presses, risks, requests):
    """In 2,000 sweeps, at most 5 % certify any policy whose true risk is above 5 %."""
    drawn = np.random.default_rng(1).binomial(requests, risks, size=(2000, presses, len(risks)))
    level = shared_confidence(0.95, presses)
    first_bad = next(place for place, risk in enumerate(risks) if risk > 0.05)
    wrong = naive = 0
    for sweep in drawn.tolist():
        certified = [
            sum(bound <= 0.05 for bound in sequence_bounds([(k, requests) for k in row], 0.05, level)) for row in sweep
        ]
        wrong += max(certified) > first_bad
        # Every policy for itself, at the whole confidence.
        naive += any(upper_bound(k, requests, 0.95) <= 0.05 for row in sweep for k in row[first_bad:])
    assert wrong <= 0.05 * 2000
    assert wrong > 0
    assert naive >= wrong
    if presses > 1:
        assert naive > 0.05 * 2000


def test_sequences_end_at_the_first_failure():
    counts = pd.DataFrame(
        [("a", 0.5, 100, 0), ("a", 0.3, 100, 9), ("a", 0.1, 100, 0), ("b", 0.9, 100, 1), ("b", 0.2, 100, 0)],
        columns=["press", "ratio", "requests", "degraded"],
    )
    table = fixed_sequences(counts, 0.1, 0.95)
    assert table["ratio"].tolist() == [0.1, 0.3, 0.5, 0.2, 0.9]
    assert table["certified"].tolist() == [True, False, False, True, True]
    assert table["tested"].tolist() == [True, True, False, True, True]
    assert table["bound"].isna().tolist() == [False, False, True, False, False]
    # Two presses share the doubt.
    assert table["bound"].iloc[0] == pytest.approx(upper_bound(0, 100, 0.975))


def run(scores, *, questions=1, seeds=(None,), press="snapkv", cache=200):
    """Records of a dense cache that scores 100 and of a press whose scores are given by ratio and context."""
    _, _, records = made_up_run(1, presses=("no_press",))
    dense = []
    rows = []
    for context in range(len(next(iter(scores.values())))):
        for question in range(questions):
            name = {"example": f"e{context}.{question}", "context": f"c{context}", "dense_bytes": 1000}
            dense.append(replace(records[0], **name, score=100.0, cache_bytes=1000))
            for ratio, of_context in scores.items():
                for seed in seeds:
                    value = of_context[context]
                    value = value(question, seed) if callable(value) else value
                    rows.append(replace(records[0], **name, press=press, ratio=ratio, seed=seed, score=value,
                                        cache_bytes=int(cache * (1 - ratio))))  # fmt: skip
    return dense + rows


def test_recommends_the_fewest_measured_bytes():
    records = run({0.2: [100.0] * 60, 0.4: [100.0] * 60, 0.6: [0.0] * 60})
    found = certify(records_frame(records), risk=0.05, confidence=0.95, tolerance=0)
    assert (found.press, found.ratio, found.requests) == ("snapkv", 0.4, 60)
    assert found.bytes == pytest.approx(0.12)
    assert "USE snapkv at compression ratio 0.4: its cache holds 12% of the dense cache's" in describe(found)
    masking = [replace(record, press="kvzip", cache_bytes=1990) for record in records if record.press == "snapkv"]
    both = certify(records_frame(records + masking), risk=0.1, confidence=0.95, tolerance=0)
    assert (both.press, both.presses) == ("snapkv", 2)
    masked = [replace(record, cache_bytes=1990) for record in records if record.press == "snapkv"]
    alone = certify(records_frame(records[:60] + masked), risk=0.05, confidence=0.95, tolerance=0)
    assert (alone.press, alone.ratio, alone.bytes) == ("no_press", 0.0, 1.0)
    assert "Certified, but not smaller than the dense cache: snapkv." in describe(alone)


def test_all_degraded_is_a_bound_of_one():
    found = certify(records_frame(run({0.5: [0.0] * 4})), risk=0.5, confidence=0.9, tolerance=99.9)
    assert found.table["bound"].tolist() == [1.0]
    assert found.press == "no_press"
    assert "USE THE DENSE CACHE" in describe(found)
    few = certify(records_frame(run({0.5: [100.0] * 10})), risk=0.05, confidence=0.95, tolerance=0)
    assert "Even a press that never degrades anything needs 59 requests, chosen among 1." in describe(few)


def test_tolerance_is_not_an_event():
    scores = {0.5: [80.0, 100 - 20.0000000000001, 79.9, 100.0]}
    for tolerance, events in ((20, 1), (0, 3), (21, 0)):
        found = certify(records_frame(run(scores)), risk=0.5, confidence=0.9, tolerance=tolerance)
        assert found.table["degraded"].tolist() == [events]


def test_a_context_is_one_request_whatever_its_questions():
    scores = {0.5: [lambda question, seed: 0.0 if question == 2 else 100.0, 100.0, lambda question, seed: 0.0]}
    found = certify(records_frame(run(scores, questions=3)), risk=0.5, confidence=0.9, tolerance=0)
    assert found.table[["requests", "degraded"]].values.tolist() == [[3, 2]]
    assert found.table["bytes"].tolist() == [0.1]


def test_a_seed_a_request_never_an_average():
    """Half of the seeds fail in every context: about half of the requests are degraded, each by its own seed."""
    scores = {0.5: [lambda question, seed: 100.0 * (seed % 2)] * 200}
    records = run(scores, seeds=(0, 1, 2, 3), press="prob_best")
    found = certify(records_frame(records), risk=0.5, confidence=0.9, tolerance=40)
    degraded = int(found.table["degraded"].iloc[0])
    assert found.requests == 200
    assert abs(degraded - 100) < 4 * 50**0.5
    again = certify(records_frame(records[::-1]), risk=0.5, confidence=0.9, tolerance=40)
    assert int(again.table["degraded"].iloc[0]) == degraded


def test_refusals():
    records = run({0.5: [100.0] * 3}, questions=2)
    frame = records_frame(records)

    def refused(frame, message, **changed):
        with pytest.raises(ValueError, match=message):
            certify(frame, **{"risk": 0.1, "confidence": 0.9, "tolerance": 0.0, **changed})

    one, dense = frame["example"].eq("e1.0"), frame["press"].eq("no_press")
    refused(
        frame[~(one & dense)],
        r"every request must have its record of the dense cache \(press 'no_press'\), got none for 1: \['e1.0'\]",
    )
    refused(
        frame[~(one & ~dense)],
        "a press must have answered all questions of a context, got 'snapkv' at ratio 0.5 with some of the 2 of 'c1'",
    )
    gone = frame["context"].isin(["c1", "c2"]) & ~dense
    refused(
        frame[~gone],
        r"a press must have records of all contexts of the dense cache, got 'snapkv' at ratio 0.5 without 2 of 3: "
        r"\['c1', 'c2'\]",
    )
    refused(frame[frame["press"] == "no_press"], "records must have scores of a press")
    refused(frame, r"presses must be among \['snapkv'\], got \['tova'\]", presses=["tova"])
    refused(pd.concat((frame, frame[one & dense])), r"one record of the dense cache, got more for 1: \['e1.0'\]")
    for name, value, message in (
        ("score", math.nan, r"records must all have a score, got 1 of 12 without one, of \['snapkv'\]"),
        ("score", "high", "score must be numbers in all records, got 'high'"),
        ("score", math.inf, "score must be numbers in all records, got inf"),
        ("ratio", math.nan, r"ratio must be numbers in \[0, 1\) in all records, got nan"),
        ("ratio", 1.0, r"ratio must be numbers in \[0, 1\) in all records, got 1.0"),
        ("ratio", -0.1, r"ratio must be numbers in \[0, 1\) in all records, got -0.1"),
        ("cache_bytes", -1, "cache_bytes must be numbers >= 0 in all records, got -1"),
        ("dense_bytes", 0, "dense_bytes must be numbers > 0 in all records, got 0"),
        ("cache_bytes", math.nan, "cache_bytes must be numbers >= 0 in all records, got nan"),
    ):
        changed = frame.astype({name: object})
        changed.loc[one & ~dense, name] = value
        refused(changed, message)
    for name, value in (("risk", 0), ("risk", 1), ("confidence", 1.5), ("tolerance", -1), ("tolerance", float("nan"))):
        refused(frame, f"{name} must be", **{name: value})
    with pytest.raises(ValueError, match=r"degraded must be in \[0, requests\]"):
        upper_bound(3, 2, 0.9)


def test_presses_that_are_left_out_need_no_scores():
    frame = records_frame(run({0.5: [100.0] * 3}))
    other = frame[frame["press"] == "snapkv"].assign(press="tova", score=math.nan)
    both = pd.concat((frame, other), ignore_index=True)
    assert certify(both, risk=0.5, confidence=0.5, tolerance=0, presses=["snapkv"]).requests == 3
    with pytest.raises(ValueError, match=r"got 3 of 9 without one, of \['tova'\]"):
        certify(both, risk=0.5, confidence=0.5, tolerance=0)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\xff", b"task,score\n"])
def test_a_file_that_is_no_table_is_named(content, tmp_path, capsys):
    (tmp_path / "records.csv").write_bytes(content)
    assert cli.main(["certify", str(tmp_path)]) == 2
    assert f"{tmp_path / 'records.csv'}" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("column", "named"), [("seed", "seeds"), ("cache_bytes", "cache_bytes")])
@pytest.mark.parametrize("value", ["9" * 400, "x", "1" + "0" * 30])
def test_huge_numbers_of_a_table_are_named(column, named, value, tmp_path, capsys):
    row = {"task": "vt", "example": "e", "press": "no_press", "ratio": 0, "seed": "", "masked": False,
           "dense_bytes": 9, "cache_bytes": 9, "score": 1}  # fmt: skip
    rows = [row, row | {"press": "snapkv", "ratio": 0.5, column: value}]
    pd.DataFrame(rows).to_csv(tmp_path / "records.csv", index=False)
    assert cli.main(["certify", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert printed.count("\n") == 1


def test_command_on_a_folder_and_on_a_table(tmp_path, capsys):
    config, _, _ = made_up_run(1)
    records = run({0.3: [100.0] * 70, 0.6: [100.0] * 20 + [0.0] * 50})
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "records.jsonl").write_text("".join(to_line(vars(record)) for record in records))
    assert cli.main(["certify", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "USE snapkv at compression ratio 0.3" in printed
    assert "Clopper" not in printed
    saved = json.loads((folder / "certificate.json").read_text())
    assert saved["policy"] == {"press": "snapkv", "ratio": 0.3, "bytes": pytest.approx(0.14)}
    assert (saved["risk"], saved["confidence"], saved["tolerance"]) == (0.05, 0.95, 0)
    assert len(saved["records_sha256"]) == 64
    assert "kvpress-prob" in saved["versions"]
    columns = ["task", "example", "press", "ratio", "seed", "masked", "dense_bytes", "cache_bytes", "score"]
    records_frame(records)[columns].assign(seed=None).to_csv(tmp_path / "records.csv", index=False)
    assert cli.main(["certify", str(tmp_path), "--output", str(tmp_path / "new" / "x.json")]) == 0
    table = json.loads((tmp_path / "new" / "x.json").read_text())
    assert table["table"] == saved["table"]
    assert cli.main(["certify", str(tmp_path / "nothing")]) == 2
    assert "must be a results folder or a table of records, got no records.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="results are kept in the repository")
def test_committed_records():
    """What docs/certifying.md says of them."""
    frame = read_frame(COMMITTED)
    found = {
        (risk, tolerance): certify(frame, risk=risk, confidence=0.95, tolerance=tolerance)
        for risk in (0.05, 0.1, 0.2)
        for tolerance in (0.0, 20.0)
    }
    assert all(certificate.requests == 91 for certificate in found.values())
    assert {key: (it.press, it.ratio) for key, it in found.items() if it.press != "no_press"} == {
        (0.2, 0.0): ("prob_best", 0.7),
        (0.2, 20.0): ("prob_best", 0.7),
    }
    named = {
        risk: certify(frame, risk=risk, confidence=0.95, tolerance=20, presses=["prob_best"]) for risk in (0.1, 0.2)
    }
    assert {risk: (it.ratio, f"{it.bytes:.0%}") for risk, it in named.items()} == {0.1: (0.5, "53%"), 0.2: (0.7, "33%")}
    page = (COMMITTED.parents[2] / "docs" / "certifying.md").read_text()
    assert all(line in page for line in describe(named[0.1]).splitlines())
