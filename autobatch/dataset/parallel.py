"""Render rows on all cores."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, islice
from typing import Any

from autobatch.dataset.encoding import Trust
from autobatch.dataset.formats import RowFormat
from autobatch.dataset.rendering import Renderer
from autobatch.dataset.row_checks import RowChecks
from autobatch.dataset.rows import Row
from autobatch.dataset.samples import SampleBatch
from autobatch.dataset.tokenizer import Tokenizer
from autobatch.dataset.turns import Tally
from autobatch.errors import DataError
from autobatch.hardware.environment import child_environment, num_cores

_BATCH_ROWS = 1000
_BATCH_BYTES = 1_000_000  # pickled; bounds memory where rows are huge
_PICKLED_ROWS = 16  # at a time: few, since one row may hold a megabyte
_LEARNING_BATCHES = 4  # rendered here at most, for rows to be compared with the slow ways
# A worker needs two seconds to start, as long as a core needs for some two megabytes of rows
# (measured on 2 cores of an EPYC, Qwen3 tokenizer, 2026-12-01).
_WORTH_BYTES = 8_000_000
_WAITING = 2  # batches a worker that are read ahead

Batch = tuple[int, list[bytes]]  # the number of its first row; pickled lists of rows


def render_rows(
    rows: Iterable[Row],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    tally: Tally,
    checks: RowChecks,
    *,
    num_rows: int | None = None,
    num_workers: int | None = None,
) -> Generator[SampleBatch]:
    """Yield the samples of rows in order, batch by batch; others are in the tally.

    `checks` looks at each row, here or where it is rendered, and adds up what it saw.

    `num_rows` is about how many there are; small data are rendered in this process, as all are
    where `num_workers` (None: one a core) is below 2. The samples are the same.

    Raises:
        DataError: if rows are conversations and the tokenizer has no chat template.
    """
    renderer = Renderer(fmt, tokenizer, checks)
    batches = _batches(rows)
    num_workers = num_cores() if num_workers is None else num_workers
    num_bytes = 0
    for number, batch in enumerate(batches):
        yield _render(renderer, batch, tally)
        num_bytes += sum(map(len, batch[1]))
        learned = renderer.trust.is_settled or number + 1 >= _LEARNING_BATCHES
        left = 0 if num_rows is None else num_bytes * (num_rows / max(1, tally.num_rows) - 1)
        if num_workers > 1 and learned and left >= _WORTH_BYTES:
            break
    with ExitStack() as stack:
        first = list(_some(batches, 1))
        if first:
            workers = _Workers(fmt, tokenizer, renderer.trust, checks, num_workers)
            stack.callback(workers.close)
            yield from workers.render(chain(first, batches), tally, checks)


def _render(renderer: Renderer, batch: Batch, tally: Tally) -> SampleBatch:
    own = Tally()
    first, blobs = batch
    rows = [row for blob in blobs for row in pickle.loads(blob)]
    samples = renderer.render(rows, own, first=first)
    tally.add(own)
    return samples


def _some(batches: Iterator[Batch], number: int) -> Iterator[Batch]:
    for _, batch in zip(range(number), batches, strict=False):
        yield batch


def _batches(rows: Iterable[Row]) -> Iterator[Batch]:
    first = num_rows = num_bytes = 0
    blobs: list[bytes] = []
    for some in _in_lists(rows):
        blobs.append(pickle.dumps(some, protocol=pickle.HIGHEST_PROTOCOL))
        num_bytes += len(blobs[-1])
        num_rows += len(some)
        if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield first, blobs
            first, num_rows, num_bytes, blobs = first + num_rows, 0, 0, []
    if blobs:
        yield first, blobs


def _in_lists(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while some := list(islice(remaining, _PICKLED_ROWS)):
        yield some


class _Workers:
    """Processes that render; each is spoken to by one thread."""

    def __init__(
        self,
        fmt: RowFormat,
        tokenizer: Tokenizer,
        trust: Trust,
        checks: RowChecks,
        num_workers: int,
    ) -> None:
        environment = {**os.environ, **child_environment(num_workers, device="cpu")}
        command = [sys.executable, "-m", "autobatch.dataset.render_worker"]
        self._threads = ThreadPoolExecutor(num_workers)
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._num_waiting = num_workers * (1 + _WAITING)
        hello = pickle.dumps((fmt, tokenizer.directory, trust, (checks.mode, checks.num_rows)))
        for _ in range(num_workers):
            worker = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._all.append(worker)
            assert worker.stdin is not None
            worker.stdin.write(hello)
            self._free.put(worker)

    def render(
        self, batches: Iterable[Batch], tally: Tally, checks: RowChecks
    ) -> Iterator[SampleBatch]:
        """Yield the samples of batches in order."""
        waiting: deque[Future[Any]] = deque()
        for batch in batches:
            waiting.append(self._threads.submit(self._ask, batch))
            if len(waiting) > self._num_waiting:
                yield _taken(waiting.popleft().result(), tally, checks)
        while waiting:
            yield _taken(waiting.popleft().result(), tally, checks)

    def _ask(self, batch: Batch) -> Any:
        worker = self._free.get()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            pickle.dump(batch, worker.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            worker.stdin.flush()
            return pickle.load(worker.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            code = worker.wait()
            raise DataError(
                f"a process that renders rows ended by {f'signal {-code}' if code < 0 else code}, "
                "perhaps for want of memory; free memory, or allow fewer cores (taskset -c 0)"
            ) from error
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.wait()
        self._threads.shutdown(wait=True)
        for worker in self._all:
            for stream in (worker.stdin, worker.stdout):
                assert stream is not None
                with suppress(OSError):  # what was still to be sent
                    stream.close()


def _taken(answer: Any, tally: Tally, checks: RowChecks) -> SampleBatch:
    if isinstance(answer, Exception):
        raise answer
    if isinstance(answer, str):
        raise RuntimeError(answer)
    batch, own, seen = answer
    tally.add(own)
    checks.tally.add(seen)
    assert isinstance(batch, SampleBatch)
    return batch
