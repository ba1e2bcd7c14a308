"""Layers by heads: what frozen-head diagnostics found."""

import pandas as pd

from kvpress_prob.extras import extra

with extra("plots", "Drawing figures"):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

PANELS = (
    ("dropped", "mass outside the largest s", "viridis"),
    ("closable", "share of the error that a better set closes", "magma"),
    ("weighted_ratio", "weighted estimate's error over the best set's", "cividis"),
)


def head_map(cells: pd.DataFrame, s: int) -> Figure:
    """Query heads across, layers down; flat cells carry a dot.

    Parameters
    ----------
    cells : DataFrame
        ``records.heads.cells``.
    s : int
        Budget that is shown.

    Raises
    ------
    ValueError
        If there are no cells of that budget.
    """
    part = cells[cells["s"] == s]
    if part.empty:
        raise ValueError(f"s must be a budget of the cells, {sorted(set(cells['s']))}, got {s}")
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (column, title, colours) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS, strict=True):
        grid = part.pivot_table(index="layer", columns="head", values=column)
        extent = (-0.5, grid.shape[1] - 0.5, grid.shape[0] - 0.5, -0.5)
        image = axes.imshow(grid.to_numpy(), cmap=colours, aspect="auto", interpolation="nearest", extent=extent)
        flat = part[part["flat"]]
        rows = [grid.index.get_loc(layer) for layer in flat["layer"]]
        columns = [grid.columns.get_loc(head) for head in flat["head"]]
        axes.scatter(columns, rows, s=6, color="white", edgecolors="black", linewidths=0.5)
        axes.set(title=f"{title}\n(s = {s})", xlabel="query head")
        axes.title.set_fontsize(9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes)
    figure.axes[0].set_ylabel("layer (in order)")
    return figure
