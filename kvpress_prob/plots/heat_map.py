"""How much every head of every layer keeps, as a picture."""

from torch import Tensor

from kvpress_prob.extras import extra

with extra("plots", "Drawing figures"):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter


def kept_heat_map(kept: dict[str, Tensor]) -> Figure:
    """One panel a title: KV heads across, layers down, colour for the kept fraction (the same scale in all panels).

    Parameters
    ----------
    kept : dict of str to Float[Tensor, "layers hkv"]
        Kept fractions in [0, 1] by panel title.

    Raises
    ------
    ValueError
        If there is nothing to show.
    """
    if not kept:
        raise ValueError("kept must not be empty")
    figure = Figure(figsize=(1.5 + 2 * len(kept), 5), layout="constrained")
    panels = figure.subplots(1, len(kept), sharey=True, squeeze=False)[0]
    for axes, (title, fractions) in zip(panels, kept.items(), strict=True):
        axes.imshow(fractions.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        axes.set(title=title, xlabel="KV head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("layer")
    figure.colorbar(panels[0].images[0], ax=list(panels), label="kept entries", format=PercentFormatter(1, decimals=0))
    return figure
