"""Floor 0: what an evaluation leaves behind: the schema of its records, the files that hold them, and their
statistics."""

from kvpress_prob.records.files import (
    CONFIG,
    EXAMPLES,
    RECORDS,
    Results,
    read_config,
    read_examples,
    read_records,
    read_results,
    to_line,
)
from kvpress_prob.records.provenance import config_hash, git_commit, text_hash, versions
from kvpress_prob.records.schema import NO_PRESS, TIMINGS, Benchmark, DecodeMode, Example, Key, Record

__all__ = [
    "CONFIG",
    "EXAMPLES",
    "NO_PRESS",
    "RECORDS",
    "TIMINGS",
    "Benchmark",
    "DecodeMode",
    "Example",
    "Key",
    "Record",
    "Results",
    "config_hash",
    "git_commit",
    "read_config",
    "read_examples",
    "read_records",
    "read_results",
    "text_hash",
    "to_line",
    "versions",
]
