"""What presses hold beside a reference."""

import pandas as pd

from kvpress_prob.extras import extra
from kvpress_prob.plots.figures import SIZE, Styles

with extra("plots", "Drawing figures"):
    from matplotlib.figure import Figure


def bytes_over_reference(times: pd.DataFrame, styles: Styles, reference: str = "snapkv") -> Figure:
    """Measured bytes over the reference's at the same target ratio, on a logarithmic axis.

    Parameters
    ----------
    times : DataFrame
        ``records.accounting.bytes_over``.
    styles : dict of str to Style
    reference : str
        Drawn as the level line at 1.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for press, part in times.groupby("press", sort=False):
        style = styles[str(press)]
        axes.plot(part["ratio"], part["times"], color=style.colour, marker=style.marker, linestyle=style.dash,
                  linewidth=1.5, markersize=4, gid=f"series-{style.index}")  # fmt: skip
    axes.axhline(1, color="#808080", linewidth=0.8, linestyle="dashed")
    axes.set(xlabel="target compression ratio", ylabel=f"measured bytes over {reference}'s", yscale="log")
    return figure
