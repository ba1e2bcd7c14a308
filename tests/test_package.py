"""The package's requirements: bounded where drift is known, pinned for the tests, met by what is installed."""

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
REQUIREMENTS = [Requirement(it) for group in GROUPS for it in group]
PINS = {
    canonicalize_name(name): pin
    for name, pin in re.findall(r"^([\w.\-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}


# Our own extras and kvpress' need no bounds of their own.
@pytest.mark.parametrize("requirement", [it for it in REQUIREMENTS if not it.extras or it.specifier], ids=str)
def test_every_requirement_has_a_pin_in_its_range(requirement):
    """Scenario S31."""
    assert requirement.specifier, "a requirement without bounds"
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_kvpress_and_transformers_are_bounded_from_above():
    """Scenario S31: both change what this package builds on; kvpress' own range bounds transformers."""
    bounded = [it for it in REQUIREMENTS if it.name == "kvpress" and it.specifier]
    bounded += [it for it in map(Requirement, requires("kvpress") or ()) if it.name == "transformers"]
    assert [it.name for it in bounded] == ["kvpress", "transformers"]
    for requirement in bounded:
        assert "<" in {it.operator for it in requirement.specifier}
        assert requirement.specifier.contains(version(requirement.name))
