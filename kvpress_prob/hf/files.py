"""Files that are there whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    The file gets the permissions that any new file of this user gets there, whatever the writer gave it: writers that
    go through a private temporary file leave it readable to its owner alone.

    Raises
    ------
    FileNotFoundError
        For a path in a folder that does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in an existing folder, got {path}")
    temporary = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}")
    try:
        temporary.touch(exist_ok=False)
        permissions = temporary.stat().st_mode & 0o777
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(permissions)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
