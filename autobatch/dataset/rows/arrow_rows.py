"""Stream rows out of parquet and Arrow files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from autobatch.dataset.rows.stored import DataFile, damaged, open_stored
from autobatch.errors import DataError

_ROWS_PER_BATCH = 64  # small: one row may hold a megabyte
_PARQUET_BUFFER_BYTES = 4 * 2**20  # of a column: a row group may be larger than memory


def arrow_schema(file: DataFile) -> Any:
    """Return the schema (pyarrow) of a parquet or Arrow file.

    Raises:
        DataError: if the file is damaged.
    """
    if file.kind == "parquet":
        with _open_parquet(file) as parquet:
            return parquet.schema_arrow
    with _open_arrow(file) as reader:
        return reader.schema


def count_arrow_rows(file: DataFile) -> int | None:
    """Return the number of rows where the file states it, None for an Arrow stream.

    Raises:
        DataError: if the file is damaged.
    """
    if file.kind == "parquet":
        with _open_parquet(file) as parquet:
            return int(parquet.metadata.num_rows)
    with _open_arrow(file) as reader:
        if not hasattr(reader, "count_rows"):
            return None
        with _damage_told(file):
            return int(reader.count_rows())


def arrow_batches(file: DataFile, columns: Sequence[str] | None) -> Iterator[Any]:
    """Yield record batches (pyarrow) of at most 64 rows, in bounded memory.

    Only `columns` (dotted paths, all if None) are read. A batch may hold more than was asked
    for, as Arrow files are cut by whole columns.

    Raises:
        DataError: if the file is damaged, or a column to be read is there twice.
    """
    if file.kind == "parquet":
        with _open_parquet(file) as parquet:
            _check_single(file, parquet.schema_arrow.names, columns)
            batches = parquet.iter_batches(
                batch_size=_ROWS_PER_BATCH,
                columns=None if columns is None else list(columns),
                use_threads=False,  # as fast on small batches; the cores are for the tokenizer
            )
            while True:
                with _damage_told(file):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
    with _open_arrow(file) as reader:
        for batch in _ipc_batches(file, reader):
            names = batch.schema.names
            _check_single(file, names, columns)
            if columns is not None:
                wanted = {c if c in names else c.split(".")[0] for c in columns}
                batch = batch.select([name for name in names if name in wanted])
            for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
                yield batch.slice(start, _ROWS_PER_BATCH)


def _check_single(file: DataFile, names: Sequence[str], columns: Sequence[str] | None) -> None:
    """Refuse columns of one name, of which a row would hold the last."""
    for column in names if columns is None else columns:
        name = column if column in names else column.split(".")[0]
        if (num_columns := names.count(name)) > 1:
            raise DataError(f"{file.path} has {num_columns} columns named {name!r}; rename them")


def rows_of_batch(file: DataFile, batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a record batch; nulls stay as Arrow has them.

    Raises:
        DataError: if a value is damaged, or beyond what Python can hold.
    """
    try:
        with _damage_told(file):
            return list(batch.to_pylist(maps_as_pydicts="strict"))
    except (ValueError, OverflowError, KeyError) as error:  # the year 10000, a key twice
        names = ", ".join(batch.schema.names)
        raise DataError(
            f"{file.path} holds a value in {names} that cannot be read "
            f"({error}); correct it or name other columns"
        ) from error


@contextmanager
def _damage_told(file: DataFile) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:  # some are ValueErrors
        raise damaged(file) from error
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(file) from error


@contextmanager
def _open_parquet(file: DataFile) -> Iterator[Any]:
    import pyarrow as pa  # slow to import: `autobatch --help` must answer at once
    import pyarrow.parquet as pq

    with open_stored(file) as stored:
        try:
            parquet = pq.ParquetFile(
                stored if file.local_path is None else file.local_path,
                buffer_size=_PARQUET_BUFFER_BYTES,
                pre_buffer=False,  # holds a whole row group
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(file) from error
        with parquet:
            yield parquet


@contextmanager
def _open_arrow(file: DataFile) -> Iterator[Any]:
    """Give the reader of an Arrow file or, as `datasets` writes them, an Arrow stream."""
    import pyarrow as pa

    with open_stored(file) as stored:
        is_file = stored.read(6) == b"ARROW1"
        stored.seek(0)
        with _damage_told(file):
            # mapped, not read: the batch of a file may be larger than memory
            mapped = file.local_path is not None and file.size_bytes
            source = pa.memory_map(file.local_path) if mapped else pa.PythonFile(stored, mode="r")
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        with source, reader:
            yield reader


def _ipc_batches(file: DataFile, reader: Any) -> Iterator[Any]:
    number = 0
    while True:
        with _damage_told(file):
            if hasattr(reader, "num_record_batches"):
                done = number == reader.num_record_batches
                batch = None if done else reader.get_batch(number)
            else:
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    batch = None
            if batch is None:
                return
            # what lies in a damaged buffer may lead beyond it, which would end the process
            batch.validate(full=True)
        yield batch
        number += 1


def add_columns(columns: dict[str, str], path: str, kind: Any) -> None:
    """Add a column of Arrow type `kind` by its dotted path, and those inside it."""
    import pyarrow.types as t

    if t.is_dictionary(kind):
        kind = kind.value_type
    if t.is_struct(kind):
        columns[path] = "struct"
        for i in range(kind.num_fields):
            add_columns(columns, f"{path}.{kind.field(i).name}", kind.field(i).type)
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
