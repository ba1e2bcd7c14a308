"""How a press looks, the same in every figure: its colour, line and marker."""

from dataclasses import dataclass

from kvpress_prob.records import NO_PRESS, Record

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8569a", "#c49000", "#3d9fd6", "#7a5cc2", "#d1495b", "#6b8e23", "#8a6d5a")
"""Apart for colour-blind readers (after Okabe and Ito), and of a lightness that shows on white and on black."""
MARKERS = "osD^vPX*<>"
GREY = "#808080"


@dataclass(frozen=True)
class Style:
    """Appearance of one press.

    Attributes
    ----------
    colour, marker : str
    dash : str
        matplotlib line style: solid for this package's presses, dashed for presses that evict, dotted for presses that
        only mask.
    index : int
        Place in the legend.
    """

    colour: str
    marker: str
    dash: str
    index: int


def styles_of(records: list[Record]) -> dict[str, Style]:
    """Styles by press, in legend order; which kind of press it is follows from what its records measured."""
    presses = list(dict.fromkeys(record.press for record in records))
    masked = {record.press for record in records if record.masked}
    weighted = {record.press for record in records if record.effective_fraction is not None}
    return press_styles(presses, masked, weighted)


def press_styles(presses: list[str], masked: set[str], weighted: set[str]) -> dict[str, Style]:
    """Styles by press, in the given order; ``masked`` hold what they hide, ``weighted`` weigh what they keep."""
    styles = {}
    shown = 0
    for index, press in enumerate(presses):
        if press == NO_PRESS:
            styles[press] = Style(GREY, "", "solid", index)
            continue
        dash = "dotted" if press in masked else "solid" if press in weighted else "dashed"
        colour = COLOURS[shown % len(COLOURS)]
        # The second round of colours has other markers.
        marker = MARKERS[(shown + shown // len(COLOURS)) % len(MARKERS)]
        styles[press] = Style(colour, marker, dash, index)
        shown += 1
    return styles
