"""Walk over the rows of all files, or count them without reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autobatch.dataset.rows.files import (
    DataFile,
    batch_rows,
    count_rows,
    line_rows,
    read_batches,
    read_lines,
    read_rows,
)
from autobatch.dataset.rows.formats import RowFormat

Row = tuple[int, int, Mapping[str, Any]]  # file index, row in that file, what it holds

_COUNTED_BYTES = 64 * 2**20  # of a file of lines; a longer one is taken to go on like that
_CHUNK_BYTES = 2**20
_PART_BYTES = 1_000_000  # several parts are read ahead for every worker
_PART_LINES = 1000  # short ones: a part is rendered as one batch


def all_rows(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row]:
    """Yield the rows of all files in order, with the columns that the format names.

    Raises:
        DataError: as `read_rows`.
    """
    for file_index, file in enumerate(files):
        for row_index, row in enumerate(read_rows(file, fmt.columns)):
            yield file_index, row_index, row


@dataclass(frozen=True, kw_only=True)
class UnreadRows(ABC):
    """Rows as their file has them, to be made by whichever process renders them."""

    file: DataFile
    file_index: int
    first_row: int
    num_rows: int

    def rows(self) -> list[Row]:
        """Return the rows.

        Raises:
            DataError: if a value or a line cannot be read.
        """
        return [
            (self.file_index, self.first_row + i, value) for i, value in enumerate(self._values())
        ]

    @abstractmethod
    def _values(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class ArrowRows(UnreadRows):
    """Rows of a file with a schema."""

    stream: bytes  # of Arrow's IPC format, one record batch

    def _values(self) -> list[dict[str, Any]]:
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            return [row for batch in reader for row in batch_rows(self.file, batch)]


@dataclass(frozen=True, kw_only=True)
class LineRows(UnreadRows):
    """Rows of a jsonl file, one a line."""

    lines: bytes
    first_line: int

    def _values(self) -> list[dict[str, Any]]:
        return line_rows(self.file, self.lines, first_line=self.first_line)


def all_parts(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row | UnreadRows]:
    """Yield the rows of all files in order, several at once where another process can make them.

    Raises:
        DataError: as `read_rows`; what the lines of a jsonl file hold is not looked at.
    """
    for file_index, file in enumerate(files):
        if file.has_schema:
            yield from _arrow_parts(file, file_index, fmt)
        elif file.kind == "jsonl":
            yield from _line_parts(file, file_index)
        else:
            for row_index, row in enumerate(read_rows(file, fmt.columns)):
                yield file_index, row_index, row


def _arrow_parts(file: DataFile, file_index: int, fmt: RowFormat) -> Iterator[Row | ArrowRows]:
    first_row = 0
    for batch in read_batches(file, fmt.columns):
        if _shares_buffers(batch.schema):
            for i, row in enumerate(batch_rows(file, batch), start=first_row):
                yield file_index, i, row
            first_row += batch.num_rows
            continue
        step = max(1, batch.num_rows * _PART_BYTES // max(_PART_BYTES, batch.nbytes))
        for start in range(0, batch.num_rows, step):
            part = batch.slice(start, step)
            yield ArrowRows(
                file=file,
                file_index=file_index,
                first_row=first_row + start,
                num_rows=part.num_rows,
                stream=_stream_of(part),
            )
        first_row += batch.num_rows


def _line_parts(file: DataFile, file_index: int) -> Iterator[LineRows]:
    first_row = 0
    for first_line, num_rows, lines in read_lines(
        file, num_bytes=_PART_BYTES, num_rows=_PART_LINES
    ):
        yield LineRows(
            file=file,
            file_index=file_index,
            first_row=first_row,
            num_rows=num_rows,
            lines=lines,
            first_line=first_line,
        )
        first_row += num_rows


def _shares_buffers(schema: Any) -> bool:
    """Return whether every part of a batch would carry buffers of the whole."""
    return any(word in str(field.type) for field in schema for word in ("dictionary", "_view"))


def _stream_of(batch: Any) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


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
