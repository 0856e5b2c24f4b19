"""One job at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autobatch.errors import RunError


@contextmanager
def exclusive(path: Path, *, refusal: str) -> Iterator[None]:
    """Hold a lock file while the block runs; it ends with this process, however that ends.

    Raises:
        RunError: with `refusal` if another process holds it, or if it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise RunError(
            f"cannot make {path}: {error.strerror or error}; choose another folder"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(refusal) from error
        yield
