"""Results folders read what was written, whatever is in a text; what cannot be is named by file, line and field."""

import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.records import (
    CONFIG,
    EXAMPLES,
    RECORDS,
    Example,
    Record,
    config_hash,
    read_config,
    read_records,
    read_results,
    to_line,
)
from kvpress_prob.records.schema import TIMINGS
from kvpress_prob.records.statistics import tabulate
from kvpress_prob.records.writer import RecordWriter
from tests.helpers.records import made_up_run

SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""Everything that ``str.splitlines`` takes for the end of a line."""


def write_folder(folder: Path, config: dict, examples: list[Example], records: list[Record]) -> Path:
    with RecordWriter(folder, config, examples, lambda key: frozenset({key})) as writer:
        writer.append([replace(record, config=config_hash(config)) for record in records])
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "run", *made_up_run(2))


def test_separators_are_the_ones_of_python():
    assert [c for c in map(chr, range(0x11000)) if len(f"a{c}b".splitlines()) == 2] == sorted(SEPARATORS)


@pytest.mark.parametrize("separator", SEPARATORS, ids=lambda c: f"U+{ord(c):04X}")
@pytest.mark.parametrize("kind", ["example", "record"])
def test_texts_hold_any_separator(tmp_path, kind, separator):
    """Scenario S55: in every text field of either file."""
    config, examples, records = made_up_run(1)
    text = f"{separator}a{separator}{separator}b{separator}"
    if kind == "example":
        examples = [
            replace(it, question=text, answer_prefix=text, answers=[text, "x"], context=text) for it in examples
        ]
    else:
        records = [replace(it, prediction=text, versions=text, git_commit=text) for it in records]
    folder = write_folder(tmp_path / "run", config, examples, records)
    found = read_results(folder)
    assert [asdict(it) for it in found.records] == [asdict(replace(it, config=config_hash(config))) for it in records]
    assert [it.as_row() | {"context": it.context} for it in found.examples] == [
        it.as_row() | {"context": new.context} for it, new in zip(examples, found.examples, strict=True)
    ]
    assert tabulate(found.records).overview["rows"] == len(records)
    with RecordWriter(folder, config, examples, lambda key: frozenset({key})) as writer:
        assert writer.done == {record.key for record in records}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_one_line(text):
    line = to_line({"text": text})
    assert line.count("\n") == 1
    assert json.loads(line) == {"text": text}


def test_half_a_line_is_left_out_and_named(folder, caplog):
    """Scenario S57, cut at any byte of the last two lines, in the middle of a character too."""
    content = (folder / RECORDS).read_bytes().replace(b'"made-up"', b'"x"')
    lines = content.splitlines(keepends=True)
    lines[-1] = lines[-1].replace(b'"prediction":"', '"prediction":"é\u2028'.encode())
    content, before = b"".join(lines), len(b"".join(lines[:-2]))
    for place in {before, *range(before + 1, len(content), 7), len(content) - 2, len(content) - 1, len(content)}:
        (folder / RECORDS).write_bytes(content[:place])
        whole, rest = content[:place].count(b"\n"), content[:place].rpartition(b"\n")[2]
        complete = bool(rest) and place == len(content) - 1  # all but the line feed
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(read_records(folder)) == whole + complete
        warned = [record.getMessage() for record in caplog.records]
        if rest and not complete:
            assert warned == [
                f"'{folder / RECORDS}', line {whole + 1}, is half a line and left out: the run was stopped there"
            ]
        else:
            assert warned == []


def test_a_run_stopped_in_its_first_line_has_no_records(folder):
    (folder / RECORDS).write_bytes((folder / RECORDS).read_bytes()[:50])
    with pytest.raises(ValueError, match=r"records.jsonl' must hold records, got none"):
        read_records(folder)


@pytest.mark.parametrize("file", [RECORDS, EXAMPLES])
@pytest.mark.parametrize("damage", [b"{", b"[1]\n", b"\xff\n", b"\n", b"7\n", b'{"a":NaN}\n'])
def test_a_damaged_line_is_named(folder, file, damage):
    lines = (folder / file).read_bytes().splitlines(keepends=True)
    (folder / file).write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    with pytest.raises(ValueError, match=rf"{file}', line 3: "):
        read_results(folder)


WRONG = {
    "str": [3, None, ["x"], True],
    "str | None": [3, ["x"]],
    "int": ["3", 3.5, True, None],
    "int | None": ["3", 3.5, True],
    "float": ["3", None, True, [1.0]],
    "float | None": ["3", True],
    "bool": [0, 1, "true", None],
    "list[float]": [0.5, ["0.5"], [None], None],
    "list[str]": ["answer", [3], None],
    "list[str] | None": ["a", [3]],
    "Literal": ["greedy", None, 3],
}


@pytest.mark.parametrize("kind", [Record, Example])
def test_every_field_has_its_type(folder, kind):
    file = RECORDS if kind is Record else EXAMPLES
    lines = (folder / file).read_text().split("\n")

    def write(row: dict) -> None:
        (folder / file).write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]))

    for name, hint in get_type_hints(kind).items():
        said = hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
        for value in WRONG["Literal" if get_origin(hint) is Literal else said]:
            write(json.loads(lines[1]) | {name: value})
            with pytest.raises(ValueError, match=rf"{file}', line 2: {name} must be .*, got "):
                read_results(folder)
        write({key: value for key, value in json.loads(lines[1]).items() if key != name})
        if name in {field.name for field in fields(kind) if field.default is None}:  # a field that older files lack
            read_results(folder)
            continue
        with pytest.raises(ValueError, match=rf"line 2: fields must be .*, got a difference in \['{name}'\]"):
            read_results(folder)


@pytest.mark.parametrize(
    ("file", "name", "values"),
    [
        (RECORDS, "score", (-1, 100.5, 1e6)), (RECORDS, "ratio", (-1, 1, 7)), (RECORDS, "dense_bytes", (0, -1)),
        (RECORDS, "seed", (-1,)), (RECORDS, "context_tokens", (0,)), (EXAMPLES, "max_new_tokens", (0, -8)),
        *((RECORDS, name, (-1,)) for name in ("cache_bytes", "generated_tokens")),
        *((RECORDS, name, (-0.01,)) for name in TIMINGS), (RECORDS, "batch_rows", (0,)),
    ],
)  # fmt: skip
def test_fields_have_their_range(folder, file, name, values):
    lines = (folder / file).read_text().split("\n")
    for value in values:
        row = json.loads(lines[1]) | {name: value}
        (folder / file).write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]))
        with pytest.raises(ValueError, match=rf"{file}', line 2: {name} must be (in|at least) .*, got {value}"):
            read_results(folder)


def test_files_of_different_runs_are_refused(folder):
    config, examples, records = made_up_run(2)
    (folder / RECORDS).write_text((folder / RECORDS).read_text().replace(config_hash(config), "f" * 10))
    with pytest.raises(ValueError, match=r"must hold records of the configuration .*, got one of ffffffffff"):
        read_results(folder)
    write_folder(folder.parent / "other", config, examples[1:], records)
    with pytest.raises(ValueError, match=r"must hold the examples of all records, got no 'niah_single_1/0'"):
        read_results(folder.parent / "other")


def test_a_record_that_comes_twice_is_refused(folder):
    lines = (folder / RECORDS).read_bytes().splitlines(keepends=True)
    (folder / RECORDS).write_bytes(b"".join([*lines, lines[4]]))
    with pytest.raises(ValueError, match=rf"line {len(lines) + 1}: must be another record than line 5"):
        read_records(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "{", '{"name": 3}', '{"model": "x"}', '{"name": "x", "seeds": NaN}']
)
def test_bad_configurations_are_refused(folder, content):
    (folder / CONFIG).write_text(content)
    with pytest.raises(ValueError, match=CONFIG):
        read_config(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("score", "9" * 400), ("score", "9" * 5000), ("score", "1e400"), ("cache_bytes", "9" * 400),
     ("cache_bytes", "1" + "0" * 30), ("generated_tokens", "-1" + "0" * 30), ("layer_ratios", f"[{'9' * 400}]")],
)  # fmt: skip
def test_huge_numbers_are_named(folder, name, value):
    lines = (folder / RECORDS).read_text().splitlines(keepends=True)
    row = json.loads(lines[1])
    lines[1] = json.dumps(row | {name: "HERE"}).replace('"HERE"', value) + "\n"
    (folder / RECORDS).write_text("".join(lines))
    with pytest.raises(ValueError, match=f"{RECORDS}', line 2: ({name} must be|must be JSON.* digits)"):
        read_results(folder)


@pytest.mark.parametrize("file", [CONFIG, EXAMPLES, RECORDS])
def test_a_key_that_comes_twice_is_named(folder, file):
    lines = (folder / file).read_text().splitlines(keepends=True)
    place = 0 if file == CONFIG else 2
    lines[place] = lines[place].replace("{", '{"name": "y", "x": 3, "x": 4, ', 1)
    (folder / file).write_text("".join(lines))
    where = f"{file}'" if file == CONFIG else f"{file}', line 3"
    with pytest.raises(ValueError, match=f"{where}: .*keys of an object must be different from each other, got '"):
        read_results(folder)


@pytest.mark.parametrize("file", [CONFIG, EXAMPLES, RECORDS])
def test_a_missing_file_is_named(folder, file):
    (folder / file).unlink()
    with pytest.raises(ValueError, match=f"must be a results folder, got no {file}"):
        read_results(folder)
