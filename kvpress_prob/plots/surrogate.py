"""How well a surrogate predicts what it was fitted to, on windows that were held out."""

from typing import Any

import pandas as pd

from kvpress_prob.extras import extra
from kvpress_prob.plots.figures import SIZE

with extra("plots", "Drawing figures"):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

TOP = "0.1"
"""Fraction whose recall the figure shows."""


def held_out_table(held_out: dict[str, Any]) -> pd.DataFrame:
    """One line an output: mean R^2 of the layers, and recall of the largest scores of all layers together."""
    rows = []
    for output, r_squared in held_out["r_squared"].items():
        known = [it for it in r_squared if it is not None]
        recall = {f"top {float(part):.0%}": it["all"] for part, it in held_out["recall"][output].items()}
        rows.append({"output": output, "R^2": sum(known) / len(known) if known else None, **recall})
    return pd.DataFrame(rows)


def held_out_figure(held_out: dict[str, Any]) -> Figure:
    """R^2 and recall of the largest tenth, by layer."""
    figure = Figure(figsize=(2 * SIZE[0], SIZE[1]), layout="constrained")
    left, right = figure.subplots(1, 2)
    for output, r_squared in held_out["r_squared"].items():
        recall = held_out["recall"][output][TOP]["layers"]
        for axes, values in ((left, r_squared), (right, recall)):
            known = [(x, y) for x, y in zip(held_out["layers"], values, strict=True) if y is not None]
            axes.plot([x for x, _ in known], [y for _, y in known], marker="o", markersize=3, label=output)
    for axes, name in ((left, "R^2"), (right, f"recall of the top {float(TOP):.0%}")):
        axes.set_xlabel("layer")
        axes.set_ylabel(f"held-out {name}")
        axes.set_ylim(min(0, axes.get_ylim()[0]), 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.legend(frameon=False)
    return figure
