"""Reading a results folder.

A results folder is named by its configuration's hash and holds::

    config.json      the configuration of the run
    examples.jsonl   one ``Example`` a line, without its context
    records.jsonl    one ``Record`` a line: one prediction, or one measurement, of one press on one example

Records refer to examples by name. Everything later (tables, figures, the report page) reads these files and nothing
else. Lines end at a line feed and nowhere else: texts hold every other separator of Unicode as it is. A run that was
killed leaves at most half a line at the end; it is left out and named.
"""

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from kvpress_prob.records.provenance import config_hash
from kvpress_prob.records.schema import RANGES, Example, Key, Record
from kvpress_prob.values import fits, said

CONFIG, EXAMPLES, RECORDS = "config.json", "examples.jsonl", "records.jsonl"
logger = logging.getLogger(__name__)
Row = TypeVar("Row", Example, Record)


@dataclass(frozen=True)
class Results:
    """What a results folder holds.

    Attributes
    ----------
    config : dict
        The configuration of the run, as plain values.
    examples : list of Example
        ``context`` is the context's hash.
    records : list of Record
        Of these examples under this configuration.
    """

    config: dict[str, Any]
    examples: list[Example]
    records: list[Record]


def read_results(folder: Path) -> Results:
    """A whole results folder.

    Raises
    ------
    ValueError
        If a file is missing or cannot be read, or its files are not of one run.
    """
    records, examples, config = read_records(folder), read_examples(folder), read_config(folder)
    names, made_by = {example.name for example in examples}, config_hash(config)
    for record in records:
        if record.example not in names:
            raise ValueError(f"'{folder / EXAMPLES}' must hold the examples of all records, got no {record.example!r}")
        if record.config != made_by:
            raise ValueError(
                f"'{folder / RECORDS}' must hold records of the configuration {made_by}, which is that of {CONFIG}, "
                f"got one of {record.config}"
            )
    return Results(config, examples, records)


def read_records(folder: Path) -> list[Record]:
    """All records of a results folder; half a line at the end is left out, with a warning that names it.

    Raises
    ------
    ValueError
        If the folder has no records, a line is not a record of this schema, or a record comes twice.
    """
    path = folder / RECORDS
    found: dict[Key, tuple[int, Record]] = {}
    for number, line in lines_of(_content(path)):
        try:
            record = parse_line(Record, line, path, number)
        except ValueError:
            if line.endswith(b"\n"):
                raise
            logger.warning("'%s', line %d, is half a line and left out: the run was stopped there", path, number)
            continue
        if record.key in found:
            raise ValueError(f"'{path}', line {number}: must be another record than line {found[record.key][0]}")
        found[record.key] = number, record
    if not found:
        raise ValueError(f"'{path}' must hold records, got none")
    return [record for _, record in found.values()]


def read_examples(folder: Path) -> list[Example]:
    """The examples of a results folder; ``context`` is the context's hash."""
    path = folder / EXAMPLES
    return [parse_line(Example, line, path, number) for number, line in lines_of(_content(path))]


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a results folder, as plain values."""
    path = folder / CONFIG
    config = _value(_content(path), f"'{path}'")
    if not isinstance(config, dict) or not isinstance(config.get("name"), str):
        raise ValueError(f"'{path}' must hold a configuration with a name")
    return config


def lines_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, line feeds included.

    A line ends at a line feed. ``str.splitlines`` also ends one at U+2028, U+2029, U+0085 and others, which JSON text
    may contain.
    """
    yield from enumerate(io.BytesIO(content), 1)


def parse_object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """A line of a JSON Lines file; ``ValueError`` names file and line if it is not a JSON object."""
    row = _value(line, f"'{path}', line {number}")
    if not isinstance(row, dict):
        raise ValueError(f"'{path}', line {number}: must be a JSON object, got {type(row).__name__}")
    return row


def parse_line(kind: type[Row], line: bytes, path: Path, number: int) -> Row:
    """An example or a record from its line; ``ValueError`` names file, line and field if it is none."""
    row, hints = parse_object(line, path, number), _hints(kind)
    needed = {entry.name for entry in fields(kind) if entry.default is MISSING}
    if not needed <= set(row) <= set(hints):
        odd = sorted((set(row) - set(hints)) | (needed - set(row)))
        raise ValueError(f"'{path}', line {number}: fields must be the schema's, got a difference in {odd}")
    for name, value in row.items():
        if not fits(value, hints[name]):
            raise ValueError(f"'{path}', line {number}: {name} must be {said(hints[name])}, got {value!r}")
        if name in RANGES and value is not None and not RANGES[name][1](value):
            raise ValueError(f"'{path}', line {number}: {name} must be {RANGES[name][0]}, got {value!r}")
    return kind(**row)


def to_line(row: dict[str, Any]) -> str:
    """One line of JSON, line end included."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"'{path.parent}' must be a results folder, got no {path.name}")
    return path.read_bytes()


def _value(content: bytes, place: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: must be JSON in UTF-8, got {content[:60]!r}: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"keys of an object must be different from each other, got {twice!r} twice")
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
