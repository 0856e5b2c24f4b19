"""Read the rows that a sample draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from autobatch.dataset.lengths.sampling import CONTAINER, Draw, draw_rows, picked, text_size
from autobatch.dataset.rows.files import DataFile, read_rows
from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import all_rows
from autobatch.dataset.tokens.parallel import render_rows
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.dataset.tokens.tokenizer import Tokenizer
from autobatch.dataset.tokens.turns import Tally

_ARROW_ROWS = 4096  # of one batch


def row_sizes(files: Sequence[DataFile], fmt: RowFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the text size of every row, int64 (N,), and where each file begins among them."""
    parts = [_file_sizes(file, fmt) for file in files]
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts), np.cumsum(counts) - counts


def draw_samples(
    files: Sequence[DataFile],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    tally: Tally,
    checks: RowChecks,
    *,
    num_rows: int,
    sizes: np.ndarray,
    begins: np.ndarray,
    progress: Callable[[int, int | None], None] | None,
) -> tuple[Draw, SampleBatch, np.ndarray]:
    """Return the draw, its samples in row order, and for how many rows each of them stands."""
    batches: list[SampleBatch] = []

    def read(wanted: np.ndarray) -> np.ndarray:
        tokens = np.full(len(wanted), -1, dtype=np.int64)
        rows = picked(all_rows(files, fmt), wanted)
        expected = tally.num_rows + len(wanted)
        rendering = render_rows(rows, fmt, tokenizer, tally, checks, num_rows=len(wanted))
        with closing(rendering) as rendered:
            for batch in rendered:
                tokens[np.searchsorted(wanted, _numbers(batch, begins))] = batch.table[:, 0]
                batches.append(batch)
                if progress is not None:
                    progress(tally.num_rows, expected)
        return tokens

    if progress is not None:
        progress(0, num_rows)
    draw = draw_rows(sizes, read, num_rows=num_rows)
    for places in tally.examples.values():  # numbers over all files, not over the rows read
        places[:] = [(int(begins[file]) + row, file, row) for _, file, row in places]
    merged = _merge(batches, begins)
    numbers = _numbers(merged, begins)
    return draw, merged, draw.weights[np.searchsorted(draw.rows, numbers)]


def _numbers(batch: SampleBatch, begins: np.ndarray) -> np.ndarray:
    return begins[batch.table[:, 2]] + batch.table[:, 3]


def _merge(batches: Iterable[SampleBatch], begins: np.ndarray) -> SampleBatch:
    """Return one batch in the order of the rows."""
    table = np.concatenate([batch.table for batch in batches])
    ends = np.cumsum(table[:, 0])
    order = np.argsort(begins[table[:, 2]] + table[:, 3], kind="stable")
    lengths = table[order, 0]
    shift = np.repeat((ends - table[:, 0])[order] - (np.cumsum(lengths) - lengths), lengths)
    places = shift + np.arange(int(lengths.sum()))
    return SampleBatch(
        table=np.ascontiguousarray(table[order]),
        ids=np.concatenate([batch.ids for batch in batches])[places],
        labels=np.concatenate([batch.labels for batch in batches])[places],
    )


def _file_sizes(file: DataFile, fmt: RowFormat) -> np.ndarray:
    if file.kind == "parquet":
        try:
            return _parquet_sizes(file, fmt)
        except Exception:  # a remote file, an odd type, damage: the rows say it
            pass
    return np.fromiter((text_size(row) for row in read_rows(file, fmt.columns)), dtype=np.int64)


def _parquet_sizes(file: DataFile, fmt: RowFormat) -> np.ndarray:
    import pyarrow.parquet as pq

    parts = [np.empty(0, dtype=np.int64)]
    with pq.ParquetFile(file.local_path or file.path) as parquet:
        for batch in parquet.iter_batches(batch_size=_ARROW_ROWS, columns=list(fmt.columns)):
            sizes = np.full(batch.num_rows, CONTAINER, dtype=np.int64)
            for column in batch.columns:
                sizes += _array_sizes(column)
            parts.append(sizes)
    return np.concatenate(parts)


def _array_sizes(array: Any) -> np.ndarray:
    """Return what `text_size` says of each value of an Arrow array, null fields left out."""
    import pyarrow.compute as pc
    import pyarrow.types as t

    kind = array.type
    if t.is_dictionary(kind):
        return _array_sizes(array.dictionary_decode())
    if t.is_string(kind) or t.is_large_string(kind):
        sizes = np.asarray(pc.fill_null(pc.utf8_length(array), 0), dtype=np.int64)
    elif t.is_struct(kind):
        sizes = np.full(len(array), CONTAINER, dtype=np.int64)
        for field in array.flatten():
            sizes += _array_sizes(field)
    elif t.is_list(kind) or t.is_large_list(kind):
        items = np.bincount(
            np.asarray(pc.list_parent_indices(array)),
            weights=_array_sizes(array.flatten()),
            minlength=len(array),
        )
        sizes = CONTAINER + items.astype(np.int64)
    elif t.is_nested(kind) or t.is_string_view(kind):
        raise NotImplementedError(str(kind))  # its rows are counted one by one
    else:
        sizes = np.ones(len(array), dtype=np.int64)
    return np.where(np.asarray(array.is_valid()), sizes, 0)
