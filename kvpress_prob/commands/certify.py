"""``kvpress-prob certify``."""

import hashlib
from pathlib import Path


def certify(
    results: Path,
    risk: float = 0.05,
    confidence: float = 0.95,
    tolerance: float = 0.0,
    press: list[str] | None = None,
    output: Path | None = None,
) -> None:
    """Find the press and ratio that free most memory and, with a guarantee, seldom degrade an answer; else say so.

    Parameters
    ----------
    results
        A folder that ``sweep`` has written with the press no_press among its presses, or a table records.csv.
    risk
        Largest share of requests, between 0 and 1, that may be degraded in use.
    confidence
        How sure to be of that, between 0 and 1. It holds for requests like those of the sweep.
    tolerance
        Points that an answer may score below the dense cache's and not count as degraded.
    press
        A press to choose from; may be given several times. Default: all. Fewer presses need fewer requests, but they
        must be named before their scores are looked at.
    output
        Where to write the certificate; by default certificate.json beside the records.
    """
    from kvpress_prob.records import certification, frames, to_line, versions

    file = frames.records_file(results)
    found = certification.certify(
        frames.read_frame(results), risk=risk, confidence=confidence, tolerance=tolerance, presses=press
    )
    print(certification.describe(found))
    output = file.with_name("certificate.json") if output is None else output
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(to_line({**found.as_dict(), "records_sha256": digest, "versions": versions()}), encoding="utf-8")
    print(f"\n{output}")
