"""Packages beyond the base install: they are named in one line where something needs a missing one."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Around imports of packages that an optional extra brings.

    Parameters
    ----------
    name : str
        The extra, a key of ``optional-dependencies`` in pyproject.toml.
    purpose : str
        What needs it, as the beginning of a sentence.

    Raises
    ------
    ModuleNotFoundError
        If one of the packages is missing; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "kvpress_prob":
            raise
        message = f'{purpose} needs the package {error.name}: pip install "kvpress-prob[{name}]"'
        raise ModuleNotFoundError(message, name=error.name) from error
