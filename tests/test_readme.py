"""What the READMEs say: every kind of fault has a test and every test that is named exists; presses and commands are
those of the package, and the code that needs no download runs."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import DynamicCache

from kvpress_prob import PRESSES
from kvpress_prob.cli import COMMANDS
from tests.helpers.models import tiny_llama, tokens

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


ROOT = HERE.parent
FRONT = (ROOT / "README.md").read_text()


def test_the_front_page_lists_every_press():
    table = FRONT.split("## Which press")[1].split("Everything else that can be built")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(PRESSES)
    assert len(FRONT.splitlines()) < 150


def code_of(text: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return code


def test_the_front_pages_example_runs(capsys):
    exec(code_of(FRONT), {})
    answer, report = capsys.readouterr().out.split("\n", 1)
    assert "7413" in answer
    assert float(re.search(r"achieved (0\.\d+)", report)[1]) == pytest.approx(0.8, abs=0.01)


def test_the_press_of_docs_choosing_can_be_built_and_used():
    scope = {}
    exec(code_of((ROOT / "docs" / "choosing.md").read_text()), scope)
    model, cache = tiny_llama(), DynamicCache()
    with scope["press"](model):
        model(tokens(400), past_key_values=cache)
    assert scope["press"].report.achieved_ratio == pytest.approx(0.7, abs=0.02)


def test_the_table_of_rooms_is_true():
    table = (ROOT / "docs" / "architecture.md").read_text().split("| --- | --- |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)/`", "".join(line.split("|")[1] for line in table.splitlines() if "|" in line)))
    assert named == {it.parent.name for it in (ROOT / "kvpress_prob").glob("*/__init__.py")}


def test_files_and_commands_of_the_front_page_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", FRONT):
        assert (ROOT / target).exists(), target
    for command in re.findall(r"kvpress-prob (\w+)", FRONT):
        assert command in COMMANDS
    for name in re.findall(r"python -m (benchmarks\.\w+)", FRONT):
        assert find_spec(name)
    for config in re.findall(r"configs/\w+\.yaml", FRONT):
        assert (ROOT / config).exists()
    goals = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {goal for goal in re.findall(r"^make ([\w-]+)$", FRONT, re.MULTILINE)} <= set(goals)
