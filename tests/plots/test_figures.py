"""Figures that stand alone."""

from kvpress_prob.plots.figures import score_curves, with_legend
from kvpress_prob.plots.style import GREY, styles_of
from kvpress_prob.records import NO_PRESS
from kvpress_prob.records.statistics import tabulate
from tests.helpers.records import PRESSES, made_up_run


def test_of_many_presses_some_are_named_and_the_others_counted():
    records = made_up_run(2)[2]
    styles, named = styles_of(records), PRESSES[1:2]
    axes = with_legend(score_curves(tabulate(records).scores, styles), styles, named).axes[0]
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == [NO_PRESS, *named, f"{len(styles) - 2} others"]
    colours = {line.get_gid(): line.get_color() for line in axes.get_lines()}
    for press, style in styles.items():
        wanted = style.colour if press in named else GREY
        assert colours[f"series-{style.index}"] == wanted
    everyone = with_legend(score_curves(tabulate(records).scores, styles), styles).axes[0]
    assert {text.get_text() for text in everyone.get_legend().get_texts()} == set(styles)
