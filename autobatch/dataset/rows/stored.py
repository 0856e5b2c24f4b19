"""Open the bytes of a data file, here or elsewhere, unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from autobatch.dataset.rows import remote
from autobatch.errors import DataError
from autobatch.units import format_value

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One data file as it is now."""

    path: str  # absolute, or its URL
    kind: str  # parquet | arrow | jsonl | json | csv | tsv
    size_bytes: int
    version: str  # changes with the content: the time of writing, or what its server calls it
    local_path: str | None  # where its bytes lie here; None: read from `path` through fsspec
    revision: str | None = None  # the commit of a file from the Hub

    @property
    def has_schema(self) -> bool:
        """Whether every row has the same columns, by the file's own word."""
        return self.kind in ("parquet", "arrow")

    @property
    def identity(self) -> list[str | int]:
        """What tells this content from any other, for fingerprints."""
        return [self.path, self.size_bytes, self.version]


def unreadable(path: object, error: BaseException) -> DataError:
    """Return the error of a path that the system does not let us read."""
    reason = getattr(error, "strerror", None) or error
    return DataError(
        f"cannot read {format_value(str(path))[1:-1]}: {reason}; check the path and its permissions"
    )


def damaged(file: DataFile) -> DataError:
    """Return the error of a file whose bytes are not what its kind promises."""
    return DataError(f"file damaged or incomplete: {file.path}; download or write it again")


def check_unchanged(file: DataFile) -> None:
    """Refuse a file that is no longer the one that was found.

    Raises:
        DataError: if its size or version differs, or it is gone.
    """
    if file.local_path is None:
        now = remote.stat(file.path)
        is_same = (now.size_bytes, now.version) == (file.size_bytes, file.version)
    else:
        try:
            status = os.stat(file.local_path)
        except OSError as error:
            raise unreadable(file.path, error) from error
        # a file of the Hub's cache is named by its content, so its time means nothing
        version = file.version if file.revision else str(status.st_mtime_ns)
        is_same = (status.st_size, version) == (file.size_bytes, file.version)
    if not is_same:
        raise DataError(
            f"{file.path} changed while it was read; wait until it is written, then run it again"
        )


@contextmanager
def open_stored(file: DataFile) -> Iterator[IO[bytes]]:
    """Give the bytes of a file as they are stored; it can seek.

    Raises:
        DataError: if it cannot be opened.
    """
    if file.local_path is None:
        with remote.open_bytes(file.path) as stream:
            yield stream
        return
    try:
        opened = open(file.local_path, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115
    except OSError as error:
        raise unreadable(file.path, error) from error
    with opened:
        yield opened


def packing_of(start: bytes) -> str | None:
    """Return the compression that the first bytes of a file tell: gzip, zstd, bzip2, xz."""
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def open_unpacked(file: DataFile) -> Iterator[IO[bytes]]:
    """Give the bytes of a file without its compression, which its first bytes tell.

    Raises:
        DataError: if it cannot be opened or read, or its compressed bytes are damaged or cut.
    """
    with open_stored(file) as stored:
        try:
            packing = packing_of(stored.read(6))
            stored.seek(0)
            with _unpack(stored, packing) as stream:
                yield stream
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise damaged(file) from error
        except OSError as error:
            if error.errno is None:  # the decompressor's, not the system's
                raise damaged(file) from error
            raise unreadable(file.path, error) from error


def _unpack(stored: IO[bytes], packing: str | None) -> Any:
    if packing == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=stored), _BUFFER_BYTES)  # type: ignore[arg-type]
    if packing == "bzip2":
        return bz2.BZ2File(stored)
    if packing == "xz":
        return lzma.LZMAFile(stored)
    if packing == "zstd":
        import pyarrow as pa  # slow to import: `autobatch --help` must answer at once

        stream = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
        return io.BufferedReader(stream, _BUFFER_BYTES)
    return _Unclosed(stored)


class _Unclosed:
    """A stream that somebody else closes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def __enter__(self) -> IO[bytes]:
        return self._stream

    def __exit__(self, *_: object) -> None:
        return None
