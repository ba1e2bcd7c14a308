"""Accounting: pairs at matched bytes, wins and losses, bytes over a reference, target and achieved ratio."""

import pandas as pd
import pytest

from benchmarks.accounting import main
from kvpress_prob.plots.accounting import bytes_over_reference
from kvpress_prob.plots.style import press_styles
from kvpress_prob.records.accounting import bytes_over, matched_pairs, ratio_table, tally
from kvpress_prob.records.frames import read_frame, records_frame
from tests.helpers.records import made_up_run

COLUMNS = [
    "model",
    "length",
    "task",
    "context",
    "example",
    "press",
    "ratio",
    "seed",
    "score",
    "cache_bytes",
    "dense_bytes",
]


def frame_of(*policies, contexts=6):
    """Rows of (press, ratio, bytes, scores) over contexts of one task."""
    rows = [
        ("m", 1, "t", f"c{i}", f"e{i}", press, ratio, -1, scores[i % len(scores)], held, 100)
        for press, ratio, held, scores in policies
        for i in range(contexts)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def test_pairs_match_bytes_not_ratios():
    frame = frame_of(
        ("no_press", 0.0, 100, [100.0]), ("ours", 0.5, 54, [80.0]), ("ours", 0.9, 13, [60.0]),
        ("snap", 0.5, 50, [70.0]), ("snap", 0.45, 55, [75.0]), ("snap", 0.9, 10, [60.0]), ("zip", 0.5, 199, [90.0]),
    )  # fmt: skip
    pairs = matched_pairs(frame, "ours", tolerance=0.1).set_index("other")
    assert pairs.index.tolist() == ["snap"]
    assert pairs.loc["snap", ["ratio", "other_ratio", "margin"]].tolist() == [0.5, 0.45, 5.0]
    assert pairs.loc["snap", ["low", "high"]].tolist() == pytest.approx([5.0, 5.0])
    wide = matched_pairs(frame, "ours", tolerance=0.3)
    assert wide[["ratio", "other_ratio", "margin"]].values.tolist() == [[0.5, 0.45, 5.0], [0.9, 0.9, 0.0]]
    assert "zip" in set(matched_pairs(frame, "ours", tolerance=5)["other"])
    assert matched_pairs(frame, "ours", tolerance=0).empty
    assert tally(matched_pairs(frame, "ours", tolerance=0)).empty


def test_tally_counts_signs():
    frame = pd.concat(
        frame_of(("ours", 0.5, 50, [score]), ("snap", 0.5, 50, [50.0])).assign(task=f"t{score}")
        for score in (40.0, 50.0, 50.0 + 1e-12, 51.0, 70.0)
    )
    frame["example"] = frame["task"] + frame["example"]
    line = tally(matched_pairs(frame, "ours")).iloc[0]
    assert line[["win", "tie", "loss"]].tolist() == [2, 2, 1]
    assert line[["smallest", "largest"]].tolist() == [-10, 20]
    assert line["margin"] == pytest.approx(11 / 5)
    mirrored = tally(matched_pairs(frame, "snap")).iloc[0]
    assert mirrored[["win", "tie", "loss"]].tolist() == [1, 2, 2]


def test_margins_are_over_shared_requests_and_context_intervals():
    frame = frame_of(("ours", 0.5, 50, [0.0, 100.0]), ("snap", 0.5, 50, [50.0]), contexts=8)
    missing = frame[~((frame["press"] == "snap") & (frame["context"] == "c0"))]
    pair = matched_pairs(missing, "ours").iloc[0]
    assert pair["requests"] == 7
    assert pair["margin"] == pytest.approx(400 / 7 - 50)
    assert pair["low"] < pair["margin"] < pair["high"]
    twice = pd.concat([frame, frame.assign(example=frame["example"] + "b")])
    one, both = (matched_pairs(part, "ours").iloc[0] for part in (frame, twice))
    assert (both["low"], both["high"]) == pytest.approx((one["low"], one["high"]))
    assert both["requests"] == 16


def test_seeds_are_averaged():
    frame = frame_of(("ours", 0.5, 50, [0.0]), ("snap", 0.5, 50, [50.0]))
    seeded = pd.concat([frame, frame[frame["press"] == "ours"].assign(seed=1, score=100.0)])
    assert matched_pairs(seeded, "ours").iloc[0]["margin"] == 0


def test_bytes_over_and_figure():
    frame = frame_of(("no_press", 0.0, 100, [1.0]), ("snapkv", 0.5, 50, [1.0]), ("snapkv", 0.9, 10, [1.0]),
                     ("kvzip", 0.9, 199, [1.0]), ("kvzip", 0.7, 199, [1.0]))  # fmt: skip
    times = bytes_over(frame)
    assert times[["press", "ratio"]].values.tolist() == [["snapkv", 0.5], ["snapkv", 0.9], ["kvzip", 0.9]]
    assert times["times"].tolist() == pytest.approx([1, 1, 19.9])
    axes = bytes_over_reference(times, press_styles(["snapkv", "kvzip"], {"kvzip"}, set())).axes[0]
    assert axes.get_yscale() == "log"
    assert [line.get_ydata().tolist() for line in axes.get_lines()[:2]] == [[1.0, 1.0], [pytest.approx(19.9)]]
    with pytest.raises(ValueError, match=r"reference must be among \['kvzip', 'no_press', 'snapkv'\], got 'tova'"):
        bytes_over(frame, "tova")


def test_ratio_table():
    frame = frame_of(("no_press", 0.0, 1, [1.0]), ("b", 0.5, 1, [1.0]), ("a", 0.5, 1, [1.0]), contexts=2)
    frame["achieved_ratio"] = [0, 0, 0.4, 0.6, 0.5, 0.5]
    table = ratio_table(frame)
    assert table.loc[0.5].to_dict() == {"b": "0.5000 ± 0.1000", "a": "0.5000 ± 0.0000"}
    assert table.columns.tolist() == ["b", "a"]


def test_refusals():
    frame = frame_of(("a", 0.5, 50, [1.0]))
    with pytest.raises(ValueError, match=r"press must be among \['a'\], got 'b'"):
        matched_pairs(frame, "b")
    with pytest.raises(ValueError, match="tolerance must be at least 0, got -1"):
        matched_pairs(frame, "a", tolerance=-1)


def test_script(tmp_path, capsys):
    _, _, records = made_up_run(3, seeds=(0, 1))
    frame = records_frame(records).drop(columns=["layer_ratios", "prediction"])
    frame.assign(seed=frame["seed"].where(frame["seed"] >= 0)).to_csv(tmp_path / "records.csv", index=False)
    main([str(tmp_path), "--tolerance", "0.05"])
    assert "prob_best at matched bytes" in capsys.readouterr().out
    tally_ = pd.read_csv(tmp_path / "tally.csv").set_index("other")
    assert set(tally_.index) == {"prob_min_h", "snapkv", "knorm"}
    assert (tally_[["win", "tie", "loss"]].sum(axis=1) == 9).all()
    assert pd.read_csv(tmp_path / "wins.csv")["win"].between(0, 1).all()
    assert "±" in (tmp_path / "table_1.csv").read_text()
    assert (tmp_path / "bytes_over_snapkv.png").read_bytes().startswith(b"\x89PNG")
    assert read_frame(tmp_path)["seed"].isin([-1, 0, 1]).all()
