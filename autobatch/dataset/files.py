"""Stream rows out of data files."""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from autobatch.errors import DataError
from autobatch.storage import user_path
from autobatch.units import format_value

SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json"}
SAMPLED_ROWS = 64  # rows looked at to learn the columns of a file without a schema
_MOST_STEPS = 16  # of a dotted path: deeper fields of a row are no columns
_ROWS_PER_BATCH = 64  # small: one row may hold a megabyte


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One data file as it is on disk now."""

    path: str  # absolute
    kind: str  # parquet | jsonl | json
    size_bytes: int
    mtime_ns: int


def find_files(files: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the data files that paths, folders and globs name, folders sorted by name.

    Raises:
        DataError: if a path is missing, unreadable, no regular file or of no known kind, or a
            folder mixes kinds.
    """
    if not files:
        raise DataError("no data file was given; name a parquet or jsonl file")
    found = []
    for name in map(str, files):
        try:
            found += [_describe(path) for path in _expand(name)]
        except OSError as error:
            raise _unreadable(error.filename or name, error) from error
        except ValueError as error:  # a null character
            raise DataError(f"{format_value(name)} is no path ({error}); correct it") from error
    return tuple(found)


def _unreadable(path: object, error: OSError) -> DataError:
    return DataError(
        f"cannot read {format_value(str(path))[1:-1]}: {error.strerror or error}; "
        "check the path and its permissions"
    )


def _expand(name: str) -> list[Path]:
    path = user_path(name)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"{name} holds no parquet or jsonl file; name the files themselves")
        if len({SUFFIXES[p.suffix] for p in found}) > 1:
            raise DataError(
                f"{name} mixes parquet and JSON files, perhaps the same rows twice; "
                f"name one kind, such as {name.rstrip('/')}/*{found[-1].suffix}"
            )
        return found
    if not path.exists():
        found = [Path(p) for p in sorted(glob.glob(str(path)))]
        if not found:
            raise DataError(f"data file {name} does not exist; check the path")
        return found
    return [path]


def _describe(path: Path) -> DataFile:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe waits for ever
        raise DataError(
            f"{path} is no regular file, and rows are read more than once; "
            "write them to a parquet or jsonl file"
        )
    with path.open("rb") as stream:
        magic = stream.read(4)
    kind = "parquet" if magic == b"PAR1" else SUFFIXES.get(path.suffix)
    if kind is None:
        raise DataError(
            f"{path} is no parquet, jsonl or json file by its name; convert it to one of these"
        )
    return DataFile(
        path=os.path.abspath(path),
        kind=kind,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )


def count_rows(file: DataFile) -> int | None:
    """Return the number of rows where the file states it (parquet), else None."""
    if file.kind != "parquet":
        return None
    return _open_parquet(file).metadata.num_rows


def read_columns(file: DataFile) -> dict[str, str]:
    """Return every column by dotted path with its kind, in file order.

    Kinds: text, turns (a list of messages), list, struct, number, binary, null. A file
    without a schema shows the columns of its first rows.

    Raises:
        DataError: if the file is damaged.
    """
    columns: dict[str, str] = {}
    if file.kind == "parquet":
        for field in _open_parquet(file).schema_arrow:
            _add_arrow(columns, field.name, field.type)
    else:
        for row in islice(read_rows(file), SAMPLED_ROWS):
            for name, value in row.items():
                _add_value(columns, name, value)
    return columns


def read_rows(file: DataFile, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file in bounded memory (a `.json` list is read whole).

    Only `columns` (dotted paths, all if None) are decoded from parquet. Null struct fields
    of Arrow columns are dropped at every depth, because row schemas were merged to make
    them; nulls of JSON files are what the author wrote, so they stay.

    Raises:
        DataError: if the file is damaged, or a line is no JSON object.
    """
    if file.kind == "parquet":
        yield from _parquet_rows(file, columns)
    elif file.kind == "jsonl" or not _starts_with_list(file):
        yield from _jsonl_rows(file)
    else:
        yield from _json_list(file)


def _open_parquet(file: DataFile) -> Any:
    import pyarrow as pa  # slow to import: `autobatch --help` must answer at once
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(file.path)
    except PermissionError as error:
        raise _unreadable(file.path, error) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"file damaged or incomplete: {file.path}; download or write it again"
        ) from error


def _parquet_rows(file: DataFile, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    parquet = _open_parquet(file)
    batches = parquet.iter_batches(
        batch_size=_ROWS_PER_BATCH, columns=None if columns is None else list(columns)
    )
    names = ", ".join(read_columns(file) if columns is None else columns)
    while True:
        try:
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"file damaged or incomplete: {file.path}; download or write it again"
            ) from error
        except (ValueError, OverflowError) as error:  # a date beyond the year 9999
            raise DataError(
                f"{file.path} holds a value in {names} that cannot be read "
                f"({error}); correct it or name other columns"
            ) from error
        if batch is None:
            return
        for row in rows:
            yield drop_nulls(row)


def drop_nulls(value: Any) -> Any:
    """Return a value without the null fields of its mappings, at every depth."""
    if isinstance(value, dict):
        return {k: drop_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [drop_nulls(v) for v in value]
    return value


def _jsonl_rows(file: DataFile) -> Iterator[dict[str, Any]]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            where = f"{file.path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8 text; save the file as UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not valid JSON ({error}); correct the line") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} is no JSON object; write one object a line")
            yield row


@contextmanager
def _open(file: DataFile) -> Iterator[IO[bytes]]:
    try:
        with open(file.path, "rb") as stream:
            yield stream
    except OSError as error:
        raise _unreadable(file.path, error) from error


def _starts_with_list(file: DataFile) -> bool:
    with _open(file) as stream:
        return stream.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _json_list(file: DataFile) -> Iterator[dict[str, Any]]:
    try:
        with _open(file) as stream:
            rows = json.loads(stream.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path} is not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.path} is not valid JSON ({error}); correct it") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{file.path} item {number} is no JSON object; make each item a row")
        yield row


def _add_arrow(columns: dict[str, str], path: str, kind: Any) -> None:
    import pyarrow.types as t

    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_struct(kind):
        columns[path] = "struct"
        for i in range(kind.num_fields):
            _add_arrow(columns, f"{path}.{kind.field(i).name}", kind.field(i).type)
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        item = kind.value_type
        names = {item.field(i).name for i in range(item.num_fields)} if t.is_struct(item) else ()
        columns[path] = "turns" if {"role", "from"} & set(names) else "list"
    elif t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        columns[path] = "text"
    elif t.is_null(kind):
        columns[path] = "null"
    else:
        columns[path] = "binary" if "binary" in str(kind) else "number"


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
