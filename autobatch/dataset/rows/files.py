"""Stream rows and columns out of data files of every kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from autobatch.dataset.rows.arrow_rows import (
    add_columns,
    arrow_batches,
    arrow_schema,
    count_arrow_rows,
    rows_of_batch,
)
from autobatch.dataset.rows.json_lines import line_parts, rows_of_lines
from autobatch.dataset.rows.remote import broken_off
from autobatch.dataset.rows.sources import find_files
from autobatch.dataset.rows.stored import DataFile, check_unchanged
from autobatch.dataset.rows.text_rows import text_rows
from autobatch.errors import AutobatchError

__all__ = [
    "SAMPLED_ROWS",
    "DataFile",
    "batch_rows",
    "count_rows",
    "find_files",
    "line_rows",
    "read_batches",
    "read_columns",
    "read_lines",
    "read_rows",
    "revision_of",
]

SAMPLED_ROWS = 64  # rows looked at to learn the columns of a file without a schema
_MOST_STEPS = 16  # of a dotted path: deeper fields of a row are no columns


def revision_of(files: Sequence[DataFile]) -> str | None:
    """Return the commit that files of the Hub were read at, None for other files."""
    return ", ".join(dict.fromkeys(f.revision for f in files if f.revision)) or None


def count_rows(file: DataFile) -> int | None:
    """Return the number of rows where the file states it (parquet, Arrow file), else None.

    Raises:
        DataError: if the file is damaged.
    """
    return count_arrow_rows(file) if file.has_schema else None


def read_columns(file: DataFile) -> dict[str, str]:
    """Return every column by dotted path with its kind, in file order.

    Kinds: text, turns (a list of messages), list, struct, number, binary, null. A file
    without a schema shows the columns of its first rows.

    Raises:
        DataError: if the file is damaged.
    """
    columns: dict[str, str] = {}
    if file.has_schema:
        for field in arrow_schema(file):
            add_columns(columns, field.name, field.type)
    else:
        for row in islice(read_rows(file), SAMPLED_ROWS):
            for name, value in row.items():
                _add_value(columns, name, value)
    return columns


def read_rows(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in bounded memory.

    Only `columns` (dotted paths, all if None) are decoded where the file has a schema. Null
    struct fields of Arrow columns are dropped at every depth, because row schemas were merged
    to make them; nulls of JSON files are what the author wrote, so they stay.

    Raises:
        DataError: if the file is damaged, a line is no JSON object, the file changed since it
            was found, or its server breaks off.
    """
    if file.has_schema:
        for batch in read_batches(file, columns):
            yield from batch_rows(file, batch)
        return
    with _change_told(file):
        yield from text_rows(file)
    check_unchanged(file)


def read_batches(file: DataFile, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield the rows of a file with a schema as record batches, see `batch_rows`.

    Raises:
        DataError: as `read_rows`.
    """
    with _change_told(file):
        yield from arrow_batches(file, columns)
    check_unchanged(file)


def batch_rows(file: DataFile, batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch, as `read_rows` gives them.

    Raises:
        DataError: as `read_rows`.
    """
    with _change_told(file):
        return [_drop_nulls(row) for row in rows_of_batch(file, batch)]


def read_lines(
    file: DataFile, *, num_bytes: int, num_rows: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines of a jsonl file by the part, see `line_parts`, and `line_rows`.

    Raises:
        DataError: as `read_rows`, but for what the lines hold.
    """
    with _change_told(file):
        yield from line_parts(file, num_bytes=num_bytes, num_rows=num_rows)
    check_unchanged(file)


def line_rows(file: DataFile, lines: bytes, *, first_line: int) -> list[dict[str, Any]]:
    """Return the rows of a part of a jsonl file, as `read_rows` gives them.

    Raises:
        DataError: as `read_rows`.
    """
    with _change_told(file):
        return rows_of_lines(file, lines, first_line=first_line)


@contextmanager
def _change_told(file: DataFile) -> Iterator[None]:
    try:
        yield
    except AutobatchError:
        check_unchanged(file)  # a file that is being written looks damaged
        raise
    except Exception as error:  # fsspec's plug-ins raise errors of their own kinds
        if file.local_path is not None:
            raise
        raise broken_off(file.path, error) from error


def _drop_nulls(value: Any) -> Any:
    """Return a value without the null fields of its mappings, at every depth."""
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_drop_nulls(v) for v in value]
    return value


def _add_value(columns: dict[str, str], path: str, value: Any) -> None:
    if columns.get(path, "null") in ("null", "list"):
        if isinstance(value, list):
            first = value[0] if value and isinstance(value[0], dict) else {}
            columns[path] = "turns" if {"role", "from"} & first.keys() else "list"
        elif isinstance(value, dict):
            columns[path] = "struct"
        elif value is None:
            columns.setdefault(path, "null")
        else:
            columns[path] = "text" if isinstance(value, str) else "number"
    if isinstance(value, dict) and path.count(".") < _MOST_STEPS:
        for name, inner in value.items():
            _add_value(columns, f"{path}.{name}", inner)
