"""Walk over the rows of all files, or count them without reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autobatch.dataset.rows.files import (
    DataFile,
    batch_rows,
    count_rows,
    read_batches,
    read_rows,
)
from autobatch.dataset.rows.formats import RowFormat

Row = tuple[int, int, Mapping[str, Any]]  # file index, row in that file, what it holds

_COUNTED_BYTES = 64 * 2**20  # of a file of lines; a longer one is taken to go on like that
_CHUNK_BYTES = 2**20
_PART_BYTES = 1_000_000  # several parts are read ahead for every worker


def all_rows(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row]:
    """Yield the rows of all files in order, with the columns that the format names.

    Raises:
        DataError: as `read_rows`.
    """
    for file_index, file in enumerate(files):
        for row_index, row in enumerate(read_rows(file, fmt.columns)):
            yield file_index, row_index, row


@dataclass(frozen=True, kw_only=True)
class ArrowRows:
    """Rows of a file as Arrow has them, to be read by whichever process renders them."""

    file: DataFile
    file_index: int
    first_row: int
    num_rows: int
    stream: bytes  # of Arrow's IPC format, one record batch

    def rows(self) -> list[Row]:
        """Return the rows.

        Raises:
            DataError: if a value cannot be read.
        """
        import pyarrow as pa

        with pa.ipc.open_stream(self.stream) as reader:
            found = [row for batch in reader for row in batch_rows(self.file, batch)]
        return [(self.file_index, self.first_row + i, row) for i, row in enumerate(found)]


def all_parts(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row | ArrowRows]:
    """Yield the rows of all files in order, several at once where they need not be parsed.

    Raises:
        DataError: as `read_rows`.
    """
    for file_index, file in enumerate(files):
        if not file.has_schema:
            for row_index, row in enumerate(read_rows(file, fmt.columns)):
                yield file_index, row_index, row
            continue
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
