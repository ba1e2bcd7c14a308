"""The figures: one panel each, from the tables of ``records.statistics`` (see there for columns).

A panel has no legend of its own; ``with_legend`` adds one for files that stand alone. Lines and intervals carry the
group id ``series-INDEX`` and ``band-INDEX`` of their press, which the report page uses.
"""

from collections.abc import Collection
from typing import Any

import pandas as pd

from kvpress_prob.extras import extra
from kvpress_prob.plots.style import GREY, Style
from kvpress_prob.records import NO_PRESS
from kvpress_prob.records.statistics import ALL

with extra("plots", "Drawing figures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

SIZE = (5.2, 3.5)
LONGEST_LABEL, LEGEND_ROWS = 40, 16
"""Characters of a press' label that a legend shows, and labels in a column."""
Styles = dict[str, Style]


def score_curves(scores: pd.DataFrame, styles: Styles, task: str = ALL) -> Figure:
    """Score against target ratio (figures 3, 5, 6, 8 of arXiv 2608.28293); the dense cache is a level line."""
    figure, axes = _panel("target compression ratio", "score")
    part = scores[scores["task"] == task]
    _curves(axes, part[part["press"] != NO_PRESS], styles, "ratio", "score")
    dense = part[part["press"] == NO_PRESS]
    if len(dense):
        level = float(dense["score"].iloc[0])
        axes.axhline(level, color=styles[NO_PRESS].colour, linewidth=1, gid=f"series-{styles[NO_PRESS].index}")
    top = float(part["score"].max()) if len(part) else 0.0
    axes.set_ylim(-0.03 * max(top, 10), 1.08 * max(top, 10))
    return figure


def win_curves(wins: pd.DataFrame, styles: Styles) -> Figure:
    """Win score against target ratio (figures 4 and 7)."""
    figure, axes = _panel("target compression ratio", "win score")
    _curves(axes, wins, styles, "ratio", "win")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def score_against_bytes(scores: pd.DataFrame, budgets: pd.DataFrame, styles: Styles) -> Figure:
    """Total score against the cache's measured bytes, as a share of the dense cache's."""
    figure, axes = _panel("measured bytes of the cache (share of dense)", "score")
    part = scores[scores["task"] == ALL].merge(budgets, on=["press", "ratio"])
    _curves(axes, part, styles, "bytes_fraction", "score")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure


def layer_curves(layers: pd.DataFrame, styles: Styles, press: str) -> Figure:
    """Evicted share of every layer at each target ratio (figure 9)."""
    figure, axes = _panel("layer", "achieved compression ratio")
    for ratio, part in layers[layers["press"] == press].groupby("ratio"):
        target = float(str(ratio))
        axes.plot(
            part["layer"], part["layer_ratio"], color=styles[press].colour, alpha=0.35 + 0.6 * target, linewidth=1.5
        )
        axes.axhline(target, color="#808080", linestyle="dashed", linewidth=0.8)
        axes.annotate(f"r = {target:g}", (float(part["layer"].max()), target), textcoords="offset points",
                      xytext=(4, 0), va="center", fontsize=8)  # fmt: skip
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def error_curves(errors: pd.DataFrame, styles: Styles, value: str = "error") -> Figure:
    """Attention error against target ratio: relative, or ``value="error_abs"`` as in figure 2."""
    names = {"error": "relative attention error", "error_abs": "mean absolute error"}
    figure, axes = _panel("target compression ratio", names[value])
    _curves(axes, errors[errors["press"] != NO_PRESS], styles, "ratio", value)
    axes.set_yscale("log")
    return figure


def with_legend(figure: Figure, styles: Styles, named: Collection[str] | None = None) -> Figure:
    """The figure with its presses named beside it, without the intervals, which would hide each other.

    Of many presses some may be ``named``; the others are thin and grey then, and counted.
    """
    axes = figure.axes[0]
    for band in axes.collections:
        band.set_visible(False)
    shown = {line.get_gid(): line for line in axes.get_lines()}
    lines = {
        press: shown[f"series-{style.index}"] for press, style in styles.items() if f"series-{style.index}" in shown
    }
    others = [line for press, line in lines.items() if named is not None and press not in {NO_PRESS, *named}]
    for line in others:
        line.set(color=GREY, linewidth=0.8, linestyle="solid", marker="", alpha=0.6, zorder=1)
    entries = [(line, press) for press, line in lines.items() if line not in others]
    if others:
        entries.append((others[0], f"{len(others)} others"))
    if entries:
        columns = -(-len(entries) // LEGEND_ROWS)
        figure.set_size_inches(SIZE[0] + 2.2 * columns, SIZE[1])
        handles, names = zip(*entries, strict=True)
        shown_names = [name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL - 1]}…" for name in names]
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "ncols": columns}
        legend = axes.legend(handles, shown_names, frameon=False, fontsize=8, handlelength=3, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a label is text, dollars too
    return figure


def _panel(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.15)
    axes.set_axisbelow(True)
    return figure, axes


def _curves(axes: Axes, table: pd.DataFrame, styles: Styles, x: str, y: str) -> None:
    for press, style in styles.items():
        part = table[table["press"] == press].sort_values(x)
        if part.empty:
            continue
        xs = part[x].to_numpy()
        axes.plot(
            xs, part[y].to_numpy(), color=style.colour, marker=style.marker or "o", linestyle=style.dash, linewidth=1.8,
            markersize=4.5, gid=f"series-{style.index}",
        )  # fmt: skip
        if y != "error_abs":
            low, high = part["low"].to_numpy(), part["high"].to_numpy()
            axes.fill_between(xs, low, high, color=style.colour, alpha=0.18, linewidth=0, gid=f"band-{style.index}")
