"""The tables of `tests/README.md`: every kind has a test, and every test that is named exists."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEXT = (HERE / "README.md").read_text()
OURS = re.sub(r"## kvpress' own tests.*?(?=^## )", "", TEXT, flags=re.MULTILINE | re.DOTALL)
KINDS = dict(re.findall(r"^\| (S\d+) \|[^|]+\|(.*)\|$", TEXT, re.MULTILINE))


def named(text: str) -> list[tuple[str, str]]:
    """Files and tests of a row; a name without a file is in the file before it."""
    file, found = "", []
    for path, name in re.findall(r"`([\w/]+\.py)?(?:::(\w+))?`", text):
        file = path or file
        if file:
            found.append((file, name))
    return found


@pytest.mark.parametrize("kind", [f"S{index}" for index in range(1, 34)])
def test_every_kind_names_a_test(kind):
    assert named(KINDS[kind])


@pytest.mark.parametrize(("file", "name"), sorted({pair for line in OURS.splitlines() for pair in named(line)}))
def test_named_tests_exist(file, name):
    source = (HERE / file).read_text()
    assert name == "" or re.search(rf"^(def|class) {name}\b", source, re.MULTILINE)
