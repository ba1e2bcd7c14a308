"""Where a record comes from: hashes of texts and configurations, versions of packages, the commit of the source."""

import hashlib
import json
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("kvpress-prob", "kvpress", "torch", "transformers")
"""Packages whose versions every record names."""


def config_hash(config: dict[str, Any]) -> str:
    """Ten hexadecimal digits that identify a configuration of plain values."""
    return text_hash(json.dumps(config, sort_keys=True))[:10]


def text_hash(text: str) -> str:
    """Sixteen hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def versions() -> str:
    """``package version`` of ``PACKAGES``, separated by commas."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # imported from a source tree that is not installed
            found.append(f"{package} (not installed)")
    return ", ".join(found)


@cache
def git_commit() -> str | None:
    """Commit of the source tree that this package was imported from, with ``-dirty`` for local changes; None outside
    one."""
    here = Path(__file__)
    try:
        # An installed package may lie inside a repository of somebody else's.
        tracked = _git("ls-files", "--error-unmatch", here.name, cwd=here.parent)
        commit = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=here.parent)
    except FileNotFoundError:  # no git
        return None
    return commit if tracked else None


def _git(*arguments: str, cwd: Path) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
