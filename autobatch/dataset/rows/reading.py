"""Walk over the rows of all files, or count them without reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autobatch.dataset.rows.files import DataFile, count_rows, read_rows
from autobatch.dataset.rows.formats import RowFormat

Row = tuple[int, int, Mapping[str, Any]]  # file index, row in that file, what it holds

_COUNTED_BYTES = 64 * 2**20  # of a file of lines; a longer one is taken to go on like that
_CHUNK_BYTES = 2**20


def all_rows(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row]:
    """Yield the rows of all files in order, with the columns that the format names."""
    for file_index, file in enumerate(files):
        for row_index, row in enumerate(read_rows(file, fmt.columns)):
            yield file_index, row_index, row


def count_all(files: Sequence[DataFile]) -> int | None:
    """Return about how many rows files have, None where one cannot tell."""
    counts = [count_rows(file) if file.kind != "jsonl" else _count_lines(file) for file in files]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count_lines(file: DataFile) -> int | None:
    num_lines = num_bytes = 0
    last = b"\n"
    if file.local_path is None:
        return None
    try:
        with open(file.local_path, "rb") as stream:
            while num_bytes < _COUNTED_BYTES and (chunk := stream.read(_CHUNK_BYTES)):
                if not num_bytes and not chunk.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                    return None  # compressed
                num_lines += chunk.count(b"\n")
                num_bytes += len(chunk)
                last = chunk[-1:]
    except OSError:
        return None  # gone: reading the rows says so
    if num_bytes < file.size_bytes:
        return round(num_lines * file.size_bytes / num_bytes)
    return num_lines + (last != b"\n")
