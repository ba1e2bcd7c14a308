"""Accounting of a results folder or a pooled table: ``python -m benchmarks.accounting RESULTS --press prob_best``.

Writes win scores (``wins.csv``, figures 4 and 7 of arXiv 2608.28293), target and achieved ratio as mean and standard
deviation (``table_1.csv``), one press against every other at matched measured bytes (``pairs.csv``) with wins, ties and
losses (``tally.csv``), and, where SnapKV ran, measured bytes over its (``bytes_over_snapkv.csv`` and ``.png``).
"""

import argparse
from pathlib import Path

from benchmarks.running import show
from kvpress_prob.plots.accounting import bytes_over_reference
from kvpress_prob.plots.figures import with_legend
from kvpress_prob.plots.style import press_styles
from kvpress_prob.records.accounting import bytes_over, matched_pairs, ratio_table, tally
from kvpress_prob.records.frames import read_frame
from kvpress_prob.records.statistics import win_scores


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results folder of a sweep, or a folder with records.csv")
    parser.add_argument("--press", default="prob_best", help="press that the others are compared with")
    parser.add_argument("--reference", default="snapkv", help="press whose bytes are 1 (default: snapkv)")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, help="largest difference of bytes of a pair, as a share"
    )
    parser.add_argument("--output", type=Path, help="folder of the tables (default: RESULTS)")
    options = parser.parse_args(argv)
    output = options.output or options.results
    frame = read_frame(options.results)
    pairs = matched_pairs(frame, options.press, tolerance=options.tolerance)
    counts = tally(pairs)
    wins = win_scores(frame[frame["score"].notna()])
    ratios = ratio_table(frame)
    output.mkdir(parents=True, exist_ok=True)
    for name, table in (("wins", wins), ("pairs", pairs), ("tally", counts)):
        table.to_csv(output / f"{name}.csv", index=False, float_format="%.6g")
    ratios.to_csv(output / "table_1.csv")
    show("win score (ties count as wins)", wins.pivot_table(index="press", columns="ratio", values="win"), 2)
    show(f"{options.press} at matched bytes", counts.set_index("other"), 1)
    show("target and achieved ratio", ratios)
    presses = list(dict.fromkeys(frame["press"]))
    if options.reference in presses:
        times = bytes_over(frame, options.reference)
        times.to_csv(output / f"bytes_over_{options.reference}.csv", index=False, float_format="%.6g")
        drawn = {press for press in presses if press.startswith("prob_")}  # what a pooled table still says
        styles = press_styles(presses, set(frame.loc[frame["masked"], "press"]), drawn)
        figure = with_legend(bytes_over_reference(times, styles, options.reference), styles)
        figure.savefig(output / f"bytes_over_{options.reference}.png", dpi=150)
        show(f"bytes over {options.reference}'s", times.pivot_table(index="press", columns="ratio", values="times"), 2)


if __name__ == "__main__":
    main()
