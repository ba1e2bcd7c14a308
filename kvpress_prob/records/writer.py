"""Writing a results folder so that a run can be killed at any moment and continued.

Rows are appended unit by unit: all rows of a unit in one write, then synced. Only the unit that was being written when
a run died can be incomplete; opening the folder again cuts it off. One process writes at a time (an advisory lock).
"""

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpress_prob.records.files import CONFIG, EXAMPLES, RECORDS, lines_of, parse_line, to_line
from kvpress_prob.records.provenance import config_hash
from kvpress_prob.records.schema import Example, Key, Record


def results_folder(output: Path, config: dict[str, Any]) -> Path:
    """``output/NAME-HASH``."""
    return output / f"{config['name']}-{config_hash(config)}"


class RecordWriter:
    """The records of one run: what is there already, and appending to it.

    Parameters
    ----------
    folder : Path
        Made if missing.
    config : dict
        Plain values.
    examples : list of Example
        Must be those that the folder was begun with.
    unit_of : callable
        Maps a record's key to the set of keys that are written together.

    Raises
    ------
    ValueError
        If the folder belongs to other examples, or another process is writing to it.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        examples: list[Example],
        unit_of: Callable[[Key], frozenset[Key]],
    ):
        self.folder = folder
        lines = "".join(to_line(example.as_row()) for example in examples)
        if (folder / EXAMPLES).exists() and (folder / EXAMPLES).read_bytes() != lines.encode():
            raise ValueError(
                f"data must hold the examples that '{folder}' was begun with, got others: delete the "
                "folder or choose another output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / RECORDS, "ab+")  # noqa: SIM115 (closed by __exit__)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(f"output must not be in use, got '{folder}', which another process writes to") from error
        _write_once(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        _write_once(folder / EXAMPLES, lines)
        try:
            self.done = self._cut_to_whole_units(unit_of)
        except ValueError:
            self._file.close()
            raise

    def _cut_to_whole_units(self, unit_of: Callable[[Key], frozenset[Key]]) -> set[Key]:
        """Drop an unfinished last unit; returns the keys that are kept."""
        self._file.seek(0)
        path, done, pending = self.folder / RECORDS, set[Key](), set[Key]()
        end = whole = 0
        for number, line in lines_of(self._file.read()):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            key = parse_line(Record, line, path, number).key
            pending.add(key)
            try:
                unit = unit_of(key)
            except KeyError as error:
                raise ValueError(f"'{path}', line {number}: must be a record of this sweep, got {key}") from error
            if pending == unit:
                done |= pending
                pending, whole = set(), end
        self._file.truncate(whole)
        return done

    def append(self, records: list[Record]) -> None:
        """Write one unit."""
        data = memoryview("".join(to_line(asdict(record)) for record in records).encode())
        while data:
            data = data[os.write(self._file.fileno(), data) :]
        os.fsync(self._file.fileno())
        self.done |= {record.key for record in records}

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _write_once(path: Path, text: str) -> None:
    """Write a file whole or not at all; leave an existing one."""
    if path.exists():
        return
    scratch = path.with_suffix(".part")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
