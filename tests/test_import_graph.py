"""The checker of the import graph sees every kind of import, every length of circle, and shadowed names."""

import sys

import pytest

from tests.helpers import import_graph

PLAIN = "from {package}.{target} import anything\n"
HIDDEN = {
    "plain": PLAIN,
    "whole module": "import {package}.{target}\n",
    "checked types": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    " + PLAIN,
    "function": "def late():\n    " + PLAIN,
    "method of a class in a function": "def late():\n    class Inner:\n        def later(self):\n            " + PLAIN,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package of the given files."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"drawn_{tmp_path.name}"

    def make(files: dict[str, str]) -> str:
        for path, text in {"__init__.py": "", **files}.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.format(package=name) if "{" in text else text)
        return name

    yield make
    sys.modules.pop(name, None)


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_circle_is_found(package, kind, length):
    files = {f"m{i}.py": PLAIN.replace("{target}", f"m{i + 1}") for i in range(length - 1)}
    open_end = package({**files, f"m{length - 1}.py": ""})
    assert import_graph.main(open_end) == 0
    closed = package({**files, f"m{length - 1}.py": HIDDEN[kind].replace("{target}", "m0")})
    assert import_graph.main(closed) == 1
    with pytest.raises(ValueError, match=r"circle, got .*\.m0 <- "):
        import_graph.drawn(import_graph.imports_of(closed))


def test_a_circle_through_a_package_is_found(package):
    name = package({"room/__init__.py": "from {package}.room.door import Door\n", "room/door.py": "Door = 1\n"})
    assert import_graph.main(name) == 0
    package({"room/__init__.py": "from {package}.room.door import Door\n", "room/door.py": "import {package}.room\n"})
    assert import_graph.main(name) == 1


def test_a_file_comes_after_what_it_imports(package, capsys):
    name = package({"a.py": "import {package}.b", "b.py": "from {package} import c", "c.py": ""})
    assert import_graph.main(name) == 0
    order = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [order.index(f"{name}.{module}") for module in "cba"] == sorted(
        order.index(f"{name}.{module}") for module in "cba"
    )


@pytest.mark.parametrize("folder", ["", "deep/"])
def test_a_shadowed_module_is_found(package, folder, capsys):
    inside = f"{{package}}{'.deep' if folder else ''}"
    name = package({f"{folder}act.py": "def act(): ...\n", f"{folder}__init__.py": f"from {inside}.act import act\n"})
    assert import_graph.main(name) == 1
    assert "act is shadowed" in capsys.readouterr().err
    package({f"{folder}__init__.py": f"from {inside}.act import act as play\n"})
    assert import_graph.main(name) == 0


def test_a_long_file_is_found(package, capsys):
    lines = "x = 1\n" * import_graph.MOST_LINES
    name = package({"long.py": lines, "triton_kernel.py": 2 * lines})
    assert import_graph.main(name) == 0
    package({"long.py": lines + "x = 1\n"})
    assert import_graph.main(name) == 1
    assert "(301 lines)" in capsys.readouterr().err
