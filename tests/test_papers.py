"""docs/papers.md and the pages about certificates and diagnostics name what exists."""

import re
from pathlib import Path

import pandas as pd
import pytest

from kvpress_prob import PRESSES
from kvpress_prob.cli import COMMANDS
from kvpress_prob.maths import forced_weights

ROOT = Path(__file__).parents[1]
PAGES = ["papers.md", "certifying.md", "diagnostics.md"]


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    words = re.findall(r"`([\w./*]+/[\w./*]*)`", (ROOT / "docs" / page).read_text())
    assert words or page == "certifying.md"
    for word in words:
        places = [ROOT / "docs", ROOT, ROOT / "kvpress_prob"]
        assert any(list(place.glob(word.rstrip("/"))) for place in places), word


def test_names_exist():
    text = (ROOT / "docs" / "papers.md").read_text()
    named = set(re.findall(r"`(prob_\w+|contourkv\w*|lore)`", text))
    assert {"prob_min_h", "contourkv", "lore"} <= named <= set(PRESSES)
    for name in ("balance", "group_vote", "candidate_pool", "best_subset", "free_weight_error", "weighted_error"):
        assert f"`{name}`" in text
        assert hasattr(forced_weights, name)
    commands = set(re.findall(r"kvpress-prob (\w+)", "".join((ROOT / "docs" / page).read_text() for page in PAGES)))
    assert commands <= set(COMMANDS)


def test_diagnostics_page_has_the_measured_figures():
    """Every row of its table from summary.csv, to the digits that it shows."""
    summary = pd.read_csv(ROOT / "benchmarks" / "results" / "diagnose" / "summary.csv")
    text = (ROOT / "docs" / "diagnostics.md").read_text()
    shown = {
        "closable": ("median share of the error that the best subset closes", ".3f"),
        "ratio_up_to_1.5": ("rows with a ratio of at most 1.5", ".0%"),
        "auc": ("AUC of dropped mass", ".2f"),
        "spearman": ("Spearman's correlation of Phi", ".2f"),
        "free_ratio": ("best error over that with free weights", ".2f"),
        "vote": ("one vote of a group", ".2f"),
        "weighted_deviation": ("**weighted sample of s keys", ".2f"),
        "weighted_mass": ("**the same, drawn by p**", ".2f"),
        "weighted_below_best": ("rows where the weighted sample is the better", ".0%"),
    }
    for column, (begin, form) in shown.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| {begin}"))
        cells = [cell.strip(" *") for cell in line.split("|")[2:6]]
        want = [format(value, form).lstrip("0").replace("%", " %") for value in summary[column]]
        assert cells == want, column
