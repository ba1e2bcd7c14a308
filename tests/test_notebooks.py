"""The notebooks run from top to bottom, cell by cell, on the demo model."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, capsys):
    scope: dict = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), scope)
    assert scope["report"].bytes_after < 0.35 * scope["report"].bytes_before
    assert "equal: True" in capsys.readouterr().out
