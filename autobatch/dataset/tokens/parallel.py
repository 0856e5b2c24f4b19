"""Render rows on all cores."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, groupby, islice

from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import Row, UnreadRows
from autobatch.dataset.rows.stored import DataFile
from autobatch.dataset.tokens.rendering import Renderer
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.dataset.tokens.tokenizer import Tokenizer, with_bpe
from autobatch.dataset.tokens.turns import Tally
from autobatch.dataset.tokens.workers import Batch, Workers, unpacked
from autobatch.hardware.environment import num_cores

_BATCH_ROWS = 1000
_BATCH_BYTES = 1_000_000  # pickled; bounds memory where rows are huge
_PICKLED_ROWS = 16  # at a time: few, since one row may hold a megabyte
_LEARNING_BATCHES = 4  # rendered here at most, for rows to be compared with the slow ways
# Of files on disk, or of pickled rows still to come. Workers need two to five seconds of a core
# to start, as long as it needs for two megabytes of rows (measured on 2 cores of an EPYC, Qwen3
# tokenizer, 2026-12-01); meanwhile rows go on here.
_WORTH_BYTES = 8_000_000


@contextmanager
def early_workers(files: Sequence[DataFile], tokenizer_dir: str) -> Iterator[Workers | None]:
    """Give workers that load the tokenizer while this process does, None for small files."""
    num_workers = num_cores()
    is_large = sum(file.size_bytes for file in files) >= _WORTH_BYTES
    workers = Workers(tokenizer_dir, num_workers) if is_large and num_workers > 1 else None
    try:
        yield workers
    finally:
        if workers is not None:
            workers.close()


def render_rows(
    rows: Iterable[Row | UnreadRows],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    tally: Tally,
    checks: RowChecks,
    *,
    num_rows: int | None = None,
    num_workers: int | None = None,
    workers: Workers | None = None,
) -> Generator[SampleBatch]:
    """Yield the samples of rows in order, batch by batch; others are in the tally.

    `checks` looks at each row, here or where it is rendered, and adds up what it saw.

    `num_rows` is about how many there are; small data are rendered in this process, as all are
    where `num_workers` (None: one a core) is below 2. The samples are the same. `workers` are
    what `early_workers` gave.

    Raises:
        DataError: if rows are conversations and the tokenizer has no chat template.
    """
    renderer = Renderer(fmt, tokenizer, checks)
    batches = _batches(rows)
    num_workers = num_cores() if num_workers is None else num_workers
    num_bytes, is_quick = 0, False
    try:
        for i, batch in enumerate(batches, start=1):
            if workers is not None and workers.is_taught and workers.are_ready():
                yield from workers.render(chain([batch], batches), tally, checks)
                break
            yield _render(renderer, batch, tally)
            num_bytes += sum(map(len, batch[1]))
            is_learned = renderer.trust.is_settled or i >= _LEARNING_BATCHES
            left = 0 if num_rows is None else num_bytes * (num_rows / max(1, tally.num_rows) - 1)
            if workers is None and is_learned and left >= _WORTH_BYTES:
                if num_workers > 1:
                    workers = Workers(tokenizer.directory, num_workers)
                elif not is_quick:
                    is_quick, trust = True, renderer.trust
                    renderer = Renderer(fmt, with_bpe(tokenizer), checks)
                    renderer.trust = trust
            if workers is not None and is_learned and not workers.is_taught:
                workers.teach(fmt, renderer.trust, checks)
        if workers is not None:
            workers.dismiss()
    finally:
        if workers is not None:
            workers.close()


def _render(renderer: Renderer, batch: Batch, tally: Tally) -> SampleBatch:
    number, blobs = batch
    return renderer.render(unpacked(blobs), tally, first_number=number)


def _batches(rows: Iterable[Row | UnreadRows]) -> Iterator[Batch]:
    """Yield rows by the batch, pickled few at a time: their objects take several times more."""
    blobs: list[bytes] = []
    num_before = num_rows = num_bytes = 0
    for num_some, blob in _pickled(rows):
        blobs.append(blob)
        num_bytes += len(blob)
        num_rows += num_some
        if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield num_before, blobs
            num_before += num_rows
            blobs, num_rows, num_bytes = [], 0, 0
    if blobs:
        yield num_before, blobs


def _pickled(rows: Iterable[Row | UnreadRows]) -> Iterator[tuple[int, bytes]]:
    """Yield a number of rows with their pickle, see `unpacked`."""
    for is_unread, same in groupby(rows, key=lambda part: isinstance(part, UnreadRows)):
        while some := list(islice(same, 1 if is_unread else _PICKLED_ROWS)):
            num_rows = sum(part.num_rows if isinstance(part, UnreadRows) else 1 for part in some)
            yield num_rows, pickle.dumps(some, protocol=pickle.HIGHEST_PROTOCOL)
