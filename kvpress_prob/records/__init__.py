"""Floor 0: what an evaluation leaves behind: the schema of its records, the files that hold them, and their
statistics."""

from kvpress_prob.records.schema import (
    CONFIG,
    EXAMPLES,
    RECORDS,
    TIMINGS,
    DecodeMode,
    Example,
    Record,
    config_hash,
    git_commit,
    read_config,
    read_examples,
    read_records,
    text_hash,
    to_line,
    versions,
)

__all__ = [
    "CONFIG",
    "EXAMPLES",
    "RECORDS",
    "TIMINGS",
    "DecodeMode",
    "Example",
    "Record",
    "config_hash",
    "git_commit",
    "read_config",
    "read_examples",
    "read_records",
    "text_hash",
    "to_line",
    "versions",
]
