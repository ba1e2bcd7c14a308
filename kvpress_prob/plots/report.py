"""The report page: one HTML file that opens from disk and loads nothing else.

Figures are inline SVG in the page's own colours; tables and examples are data in the page, drawn by ``report.js``.
"""

import hashlib
import io
import json
import re
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

import pandas as pd

from kvpress_prob.extras import extra
from kvpress_prob.plots import figures
from kvpress_prob.plots.style import Style, styles_of
from kvpress_prob.records import NO_PRESS, Results
from kvpress_prob.records.statistics import ALL, Tables

with extra("plots", "The report page"):
    import matplotlib as mpl
    from jinja2 import Environment
    from markupsafe import Markup, escape
    from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour until the SVG is in the page."""
FIGURES = "figures"


@dataclass(frozen=True)
class Panel:
    """A figure with the name of its file and a caption."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """A headed group of panels."""

    anchor: str
    title: str
    text: str
    panels: list[Panel]


def write_report(folder: Path, results: Results, tables: Tables) -> Path:
    """Write ``report.html`` and ``figures/*.png, *.csv`` into a results folder.

    Parameters
    ----------
    folder : Path
    results : Results
        A run, complete or not.
    tables : Tables
        Its tables.

    Returns
    -------
    Path
        The page.
    """
    styles = styles_of(results.records)
    page = folder / "report.html"
    (folder / FIGURES).mkdir(exist_ok=True)
    for name, table in _frames(tables).items():
        if len(table):
            table.to_csv(folder / FIGURES / f"{name}.csv", index=False, float_format="%.6g")
    with mpl.rc_context({"svg.fonttype": "none", "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
                         "xtick.color": INK, "ytick.color": INK, "font.size": 10}):  # fmt: skip
        sections = _sections(tables, styles)
        page.write_text(_html(results, tables, styles, sections), encoding="utf-8")
        for section in sections:
            for panel in section.panels:
                file = folder / FIGURES / f"{panel.name}.png"
                figures.with_legend(panel.figure, styles).savefig(file, dpi=150, facecolor="white")
    return page


def _frames(tables: Tables) -> dict[str, pd.DataFrame]:
    values = {field.name: getattr(tables, field.name) for field in fields(tables)}
    return {name: value for name, value in values.items() if isinstance(value, pd.DataFrame)}


def _sections(tables: Tables, styles: dict[str, Style]) -> list[Section]:
    """The figures that the tables have data for."""
    scores, layers, errors = tables.scores, tables.layers, tables.errors
    sections = []
    if len(scores):
        sections.append(
            Section(
                "scores", "Scores", "Mean score over all examples, and the win score: the share of other presses that "
                "a press is not worse than, averaged over examples, then over tasks. Shaded: 95 % bootstrap interval "
                "over examples.",
                [
                    Panel("score", "Average total score", figures.score_curves(scores, styles)),
                    Panel("win", "Win score (ties count as wins)", figures.win_curves(tables.wins, styles)),
                    Panel("score_bytes", "Score against measured bytes; a press that only masks holds everything",
                          figures.score_against_bytes(scores, tables.budgets, styles)),
                ],
            )
        )  # fmt: skip
        tasks = [task for task in dict.fromkeys(scores["task"]) if task != ALL]
        panels = [Panel(f"task_{_file_name(task)}", task, figures.score_curves(scores, styles, task)) for task in tasks]
        sections.append(Section("tasks", "Scores by task", "", panels))
    if len(errors):
        sections.append(
            Section(
                "errors", "Attention error", "Error of the attention output over the question's tokens, against the "
                "dense cache, mean of all heads and layers.",
                [
                    Panel("error", "Relative error, all tokens of the question", figures.error_curves(errors, styles)),
                    Panel("error_abs", "Mean absolute error, first token",
                          figures.error_curves(errors, styles, "error_abs")),
                ],
            )
        )  # fmt: skip
    uneven = [str(press) for press, part in layers.groupby("press", sort=False) if part["layer_ratio"].std() > 0
              and part.groupby("ratio")["layer_ratio"].std().max() > 0.01]  # fmt: skip
    if uneven:
        panels = [Panel(f"layers_{_file_name(press)}", press, figures.layer_curves(layers, styles, press))
                  for press in uneven]  # fmt: skip
        text = "Evicted share of every layer, for presses that share one budget over all layers. Dashed: the target."
        sections.append(Section("layers", "Budget by layer", text, panels))
    return sections


def _file_name(label: str) -> str:
    """A label as a part of a file's name; labels that lose something get a hash, so that none overwrites another's."""
    kept = re.sub(r"[^\w.=-]+", "_", label).strip("_")[:80]
    return kept if kept == label.replace(" ", "_") else f"{kept}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _svg(panel: Panel) -> Markup:
    """The figure as an SVG element: the page's ink, classes instead of ids, and a text for screen readers."""
    buffer = io.StringIO()
    # The salt keeps clip paths of different figures in one page apart.
    with mpl.rc_context({"svg.hashsalt": panel.name}):
        panel.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'id="((?:series|band)-\d+)"', r'class="\1"', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # pyright: ignore[reportOptionalMemberAccess]
    opening = f'<svg role="img" aria-label="{escape(panel.caption)}" viewBox="0 0 {width} {height}">'
    return Markup(opening + svg.partition(">")[2])


def _html(results: Results, tables: Tables, styles: dict[str, Style], sections: list[Section]) -> str:
    resources = files("kvpress_prob.plots")
    template = Environment(autoescape=True).from_string((resources / "report.html.j2").read_text(encoding="utf-8"))
    scores = tables.scores
    dense = scores[(scores["press"] == NO_PRESS) & (scores["task"] == ALL)].to_dict("records")
    return template.render(
        config=results.config,
        config_text=json.dumps(results.config, indent=2),
        overview=tables.overview,
        dense=dense[0] if dense else None,
        styles=styles,
        masked=sorted({record.press for record in results.records if record.masked}),
        sections=sections,
        svg=_svg,
        style=Markup((resources / "report.css").read_text(encoding="utf-8")),
        script=Markup((resources / "report.js").read_text(encoding="utf-8")),
        data=_data(results, tables, list(styles)),
    )


def _data(results: Results, tables: Tables, presses: list[str]) -> Markup:
    """What ``report.js`` draws, as JSON that is safe inside a script element."""
    place = {example.name: index for index, example in enumerate(results.examples)}
    data = {
        "presses": presses,
        "dense": NO_PRESS,
        "all": ALL,
        "tables": {
            name: json.loads(table.to_json(orient="records", double_precision=6))
            for name, table in _frames(tables).items()
            if name != "layers"
        },
        "examples": [
            {"name": example.name, "task": example.task, "question": example.question, "prefix": example.answer_prefix,
             "answers": example.answers}
            for example in results.examples
        ],
        "rows": [
            [place[record.example], presses.index(record.press), record.ratio, record.seed, record.score,
             record.prediction, record.cache_bytes, record.generated_tokens]
            for record in results.records
            if record.prediction is not None
        ],
    }  # fmt: skip
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
