r"""From the records of a sweep to an operating point with a finite-sample guarantee, or to the dense cache.

A *policy* is a press at a ratio. A request is *degraded* under a policy when it scores more than a tolerance below the
dense cache on the same request; the policy's *risk* is how often that happens to requests like these. Of ``n`` requests
``k`` were degraded; the exact upper bound of the risk at confidence ``C`` is the ``p`` with ::

    P(Binomial(n, p) <= k) = 1 - C      p = quantile of Beta(k + 1, n - k) at C, and 1 for k = n

(Clopper and Pearson, The use of confidence or fiducial limits illustrated in the case of the binomial, 1934). The
policies of a press are tested from the least eviction to the most and the first bound above the limit ends the
sequence, which costs no confidence (Maurer, Hothorn and Lehmacher, 1995; Bauer, 1991); several presses share the doubt
``1 - C`` evenly (Bonferroni). So the chance that *any* policy is certified whose risk is above the limit is at most
``1 - C``. Of the procedure that arXiv texts call risk-controlled eviction we know an abstract only; these are the
standard statistics for what it describes.

One *context* is one request: its questions share a cache, so a degraded answer to any of them is one event. A press
that draws is judged by one seed a context, chosen by the context's hash, never by an average over seeds, since a user
gets one draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import pandas as pd

from kvpress_prob.extras import extra
from kvpress_prob.records.certifiable import certifiable
from kvpress_prob.records.provenance import text_hash
from kvpress_prob.records.schema import NO_PRESS

with extra("eval", "Certifying"):
    from scipy.stats import beta

SLACK = 1e-9
"""Points by which a difference may exceed the tolerance through rounding."""


@dataclass(frozen=True)
class Certificate:
    """What was asked, what was found, and what to do.

    Attributes
    ----------
    risk, confidence, tolerance : float
    press : str
        The certified policy with the fewest measured bytes; "no_press" if none holds fewer than the dense cache.
    ratio : float
    requests : int
        Contexts.
    unsolved : int
        Contexts in which the dense cache itself scores 0 everywhere: nothing can get worse there.
    table : columns press, ratio, requests, degraded, rate, bound, tested, certified, bytes
        Every policy; ``bytes`` is the measured size of the cache over the dense one's, ``bound`` is empty where the
        sequence had ended before.
    """

    risk: float
    confidence: float
    tolerance: float
    press: str
    ratio: float
    requests: int
    unsolved: int
    table: pd.DataFrame

    @property
    def presses(self) -> int:
        return int(self.table["press"].nunique())

    @property
    def bytes(self) -> float:
        """Measured size of the recommended cache over the dense one's."""
        row = self.table[(self.table["press"] == self.press) & (self.table["ratio"] == self.ratio)]
        return float(row["bytes"].iloc[0]) if len(row) else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        rows = self.table.astype(object).where(self.table.notna(), cast(Any, None)).to_dict("records")
        return {
            "policy": {"press": self.press, "ratio": self.ratio, "bytes": self.bytes},
            "risk": self.risk,
            "confidence": self.confidence,
            "tolerance": self.tolerance,
            "requests": self.requests,
            "table": rows,
        }


@lru_cache(maxsize=4096)
def upper_bound(degraded: int, requests: int, confidence: float) -> float:
    """The largest risk that ``degraded`` events in ``requests`` leave possible at this confidence.

    Raises
    ------
    ValueError
        Unless ``0 <= degraded <= requests``, ``requests >= 1`` and ``confidence`` is in (0, 1).
    """
    if requests < 1 or not 0 <= degraded <= requests:
        raise ValueError(f"degraded must be in [0, requests] and requests at least 1, got {degraded} of {requests}")
    _check_share("confidence", confidence)
    return 1.0 if degraded == requests else float(beta.ppf(confidence, degraded + 1, requests - degraded))


def requests_needed(risk: float, confidence: float, presses: int = 1) -> int:
    """Requests without a single degraded one that certify a policy."""
    return math.ceil(math.log((1 - confidence) / presses) / math.log1p(-risk))


def shared_confidence(confidence: float, presses: int) -> float:
    """What each of several presses is tested at, so that all verdicts hold together."""
    return 1 - (1 - confidence) / presses


def sequence_bounds(counts: Sequence[tuple[int, int]], risk: float, confidence: float) -> list[float]:
    """Upper bounds of (degraded, requests) pairs in order, up to and with the first above ``risk``."""
    bounds: list[float] = []
    for degraded, requests in counts:
        bounds.append(upper_bound(degraded, requests, confidence))
        if bounds[-1] > risk:
            break
    return bounds


def fixed_sequences(counts: pd.DataFrame, risk: float, confidence: float) -> pd.DataFrame:
    """Bounds and verdicts.

    Parameters
    ----------
    counts : columns press, ratio, requests, degraded
        Every policy of the family, in any order.
    risk, confidence : float

    Returns
    -------
    DataFrame
        By press (in order of appearance) and ratio, with ``rate``, ``bound``, ``tested`` and ``certified``.
    """
    presses = list(dict.fromkeys(counts["press"]))
    level = shared_confidence(confidence, len(presses))
    tables = []
    for press in presses:
        table = counts[counts["press"] == press].sort_values("ratio").reset_index(drop=True)
        pairs = list(zip(table["degraded"].tolist(), table["requests"].tolist(), strict=True))
        table["bound"] = pd.Series(sequence_bounds(pairs, risk, level), dtype=float)
        tables.append(table)
    whole = pd.concat(tables, ignore_index=True)
    return whole.assign(
        rate=whole["degraded"] / whole["requests"], tested=whole["bound"].notna(), certified=whole["bound"] <= risk
    )


def certify(
    frame: pd.DataFrame, *, risk: float, confidence: float, tolerance: float, presses: list[str] | None = None
) -> Certificate:
    """Test every policy of a sweep.

    Parameters
    ----------
    frame : DataFrame
        ``frames.read_frame``.
    risk : float
        Largest share of degraded requests, in (0, 1).
    confidence : float
        In (0, 1).
    tolerance : float
        Points below the dense score that do not count as a degradation, at least 0.
    presses : list of str, optional
        The presses to choose between; default: all. To pick them after having seen their scores breaks the guarantee.

    Raises
    ------
    ValueError
        For a number outside its range, records that certify nothing (``certifiable``), or a context of which a press
        has answered only some questions.
    """
    _check_share("risk", risk)
    _check_share("confidence", confidence)
    if not (tolerance >= 0 and math.isfinite(tolerance)):
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    judged, dense = certifiable(frame, presses)
    once = dense.set_index("example")
    counts = _counts(_one_seed(judged, dense), once["score"], tolerance)
    best = once.groupby("context")["score"].max()
    table = fixed_sequences(counts, risk, confidence)
    fit = table[table["certified"] & (table["bytes"] < 1)].sort_values("bytes", kind="stable")
    press, ratio = (fit["press"].iloc[0], float(fit["ratio"].iloc[0])) if len(fit) else (NO_PRESS, 0.0)
    columns = ["press", "ratio", "requests", "degraded", "rate", "bound", "tested", "certified", "bytes"]
    contexts = judged["context"].unique()
    return Certificate(
        risk, confidence, tolerance, press, ratio, len(contexts), int((best.loc[contexts] <= 0).sum()), table[columns]
    )


def _one_seed(judged: pd.DataFrame, dense: pd.DataFrame) -> pd.DataFrame:
    """The rows of one seed of every policy and context, complete with all of the context's questions."""
    questions = dense.groupby("context")["example"].nunique()
    answered = judged.groupby(["press", "ratio", "context", "seed"])["example"].nunique().reset_index()
    whole = answered[answered["example"] == answered["context"].map(questions)]
    partial = answered[["press", "ratio", "context"]].drop_duplicates().merge(
        whole[["press", "ratio", "context"]].drop_duplicates(), how="left", indicator=True
    )  # fmt: skip
    partial = partial[partial["_merge"] == "left_only"]
    if len(partial):
        press, ratio, context = partial.iloc[0][["press", "ratio", "context"]]
        raise ValueError(
            f"a press must have answered all questions of a context, got {press!r} at ratio {ratio:g} with some of the "
            f"{questions[context]} of {context!r}"
        )

    keys = ["press", "ratio", "context"]
    whole = whole.sort_values("seed")
    groups = whole.groupby(keys)["seed"]
    number = {context: int(text_hash(str(context))[:12], 16) for context in questions.index}
    chosen = groups.cumcount() == whole["context"].map(number) % groups.transform("size")
    return judged.merge(whole.loc[chosen, [*keys, "seed"]], on=[*keys, "seed"])


def _counts(judged: pd.DataFrame, dense: pd.Series, tolerance: float) -> pd.DataFrame:
    """Requests and degraded requests of every policy, one a context, and its measured bytes over the dense cache's."""
    lost = judged["example"].map(dense) - judged["score"] > tolerance + SLACK
    contexts = judged.assign(lost=lost).groupby(["press", "ratio", "context"], sort=False)
    events = contexts.agg(lost=("lost", "any"), cache=("cache_bytes", "first"), whole=("dense_bytes", "first"))
    policies = events.reset_index().groupby(["press", "ratio"], sort=False)
    counts = policies.agg(requests=("lost", "size"), degraded=("lost", "sum"), cache=("cache", "sum"),
                          whole=("whole", "sum")).reset_index()  # fmt: skip
    return counts.assign(bytes=counts["cache"] / counts["whole"])


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value}")


def describe(certificate: Certificate) -> str:
    """The certificate in words, for a reader who knows what a percentage is."""
    it = certificate
    worse = f"more than {it.tolerance:g} points below" if it.tolerance else "below"
    doubt = "" if it.presses == 1 else f", shared by the {it.presses} presses that are compared"
    lines = [
        f"A request counts as degraded when its answer scores {worse} the dense cache's answer to the same request.",
        f"Wanted: at most {100 * it.risk:.3g} % degraded in use, with a chance of at most "
        f"{100 * (1 - it.confidence):.3g} % of being wrong about it{doubt}.",
        f"Measured: {it.requests} requests (different contexts)."
        + (f" In {it.unsolved} of them the dense cache scores 0, and nothing can get worse." if it.unsolved else ""),
        "",
        _shown(it.table),
        "",
        "'at most' is the largest share of degraded requests in use that these measurements leave possible. A press is",
        "tested from the least eviction on, until its share may be above the wanted one; '-' was not tested any more.",
        "",
    ]
    if it.press != NO_PRESS:
        lines.append(
            f"USE {it.press} at compression ratio {it.ratio:g}: its cache holds {it.bytes:.0%} of the dense cache's "
            "bytes, the fewest of what is certified."
        )
        return "\n".join(lines)
    masking = it.table[it.table["certified"]]
    lines.append("USE THE DENSE CACHE: nothing that frees memory is certified.")
    if len(masking):
        lines.append(f"Certified, but not smaller than the dense cache: {', '.join(masking['press'].unique())}.")
    needed = requests_needed(it.risk, it.confidence, it.presses)
    if needed > it.requests:
        lines.append(f"Even a press that never degrades anything needs {needed} requests, chosen among {it.presses}.")
    return "\n".join(lines)


def _shown(table: pd.DataFrame) -> str:
    shown = pd.DataFrame(
        {
            "press": table["press"],
            "ratio": table["ratio"].map("{:g}".format),
            "degraded": [f"{k} of {n}" for k, n in zip(table["degraded"], table["requests"], strict=True)],
            "rate": table["rate"].map("{:.1%}".format),
            "at most": ["-" if pd.isna(bound) else f"{bound:.1%}" for bound in table["bound"]],
            "certified": ["yes" if it else "no" for it in table["certified"]],
            "bytes": table["bytes"].map("{:.0%}".format),
        }
    )
    return shown.to_string(index=False)
