"""Render rows on all cores."""

from __future__ import annotations

import os
import pickle
import queue
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import Any, BinaryIO

from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import Row
from autobatch.dataset.tokens.encoding import Trust
from autobatch.dataset.tokens.rendering import Renderer
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.dataset.tokens.tokenizer import Tokenizer, with_bpe
from autobatch.dataset.tokens.turns import Tally
from autobatch.errors import DataError
from autobatch.hardware.environment import child_environment, num_cores

_BATCH_ROWS = 1000
_BATCH_BYTES = 1_000_000  # pickled; bounds memory where rows are huge
_PICKLED_ROWS = 16  # at a time: few, since one row may hold a megabyte
_LEARNING_BATCHES = 4  # rendered here at most, for rows to be compared with the slow ways
# Workers need two seconds of a core to start, as long as it needs for two megabytes of rows
# (measured on 2 cores of an EPYC, Qwen3 tokenizer, 2026-12-01); meanwhile rows go on here.
_WORTH_BYTES = 8_000_000
_GOODBYE_SECS = 5.0
_WAITING = 2  # batches a worker that are read ahead

Batch = tuple[int, list[bytes]]  # the number of its first row, pickled lists of rows


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
    workers: _Workers | None = None
    num_bytes, is_quick = 0, False
    try:
        for i, batch in enumerate(batches, start=1):
            if workers is not None and workers.are_ready():
                yield from workers.render(chain([batch], batches), tally, checks)
                break
            yield _render(renderer, batch, tally)
            num_bytes += sum(map(len, batch[1]))
            is_learned = renderer.trust.is_settled or i >= _LEARNING_BATCHES
            left = 0 if num_rows is None else num_bytes * (num_rows / max(1, tally.num_rows) - 1)
            if workers is None and is_learned and left >= _WORTH_BYTES:
                if num_workers > 1:
                    workers = _Workers(fmt, tokenizer, renderer.trust, checks, num_workers)
                elif not is_quick:
                    is_quick, trust = True, renderer.trust
                    renderer = Renderer(fmt, with_bpe(tokenizer), checks)
                    renderer.trust = trust
        if workers is not None:
            workers.dismiss()
    finally:
        if workers is not None:
            workers.close()


def _render(renderer: Renderer, batch: Batch, tally: Tally) -> SampleBatch:
    number, blobs = batch
    rows = [row for blob in blobs for row in pickle.loads(blob)]
    return renderer.render(rows, tally, first_number=number)


def _batches(rows: Iterable[Row]) -> Iterator[Batch]:
    """Yield rows by the batch, pickled few at a time: their objects take several times more."""
    blobs: list[bytes] = []
    num_before = num_rows = num_bytes = 0
    rows = iter(rows)
    while some := list(islice(rows, _PICKLED_ROWS)):
        blobs.append(pickle.dumps(some, protocol=pickle.HIGHEST_PROTOCOL))
        num_bytes += len(blobs[-1])
        num_rows += len(some)
        if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield num_before, blobs
            num_before += num_rows
            blobs, num_rows, num_bytes = [], 0, 0
    if blobs:
        yield num_before, blobs


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
        theirs: list[int] = []
        self._free: queue.SimpleQueue[tuple[BinaryIO, BinaryIO]] = queue.SimpleQueue()
        self._streams: list[BinaryIO] = []
        for _ in range(num_workers):
            (requests, ours), (answers, to_us) = os.pipe(), os.pipe()
            theirs += [requests, to_us]
            pair = os.fdopen(ours, "wb"), os.fdopen(answers, "rb")
            self._streams += pair  # requests, answers
            self._free.put(pair)
        self._num_waiting = num_workers * (1 + _WAITING)
        self._threads = ThreadPoolExecutor(num_workers)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autobatch.dataset.tokens.render_worker", *map(str, theirs)],
            env={**os.environ, **child_environment(num_workers, device="cpu")},
            pass_fds=theirs,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that all of them can be ended at once
        )
        for end in theirs:
            os.close(end)
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:
            checked = checks.mode, checks.num_rows
            stdin.write(pickle.dumps((fmt, tokenizer.directory, trust, checked)))

    def are_ready(self) -> bool:
        """Return whether they have loaded the tokenizer, or have failed to."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

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
        requests, answers = pair = self._free.get()
        try:
            pickle.dump(batch, requests, protocol=pickle.HIGHEST_PROTOCOL)
            requests.flush()
            return pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
            code = self._process.wait()
            how = f"signal {code % 128}" if code < 0 or code > 128 else f"code {code}"
            raise DataError(
                f"a process that renders rows ended by {how}, perhaps for want of memory; "
                "free memory, or allow fewer cores (taskset -c 0)"
            ) from error
        finally:
            self._free.put(pair)

    def dismiss(self) -> None:
        """Let workers without work go by themselves: their times then count as ours."""
        for stream in self._streams[::2]:
            stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECS)

    def close(self) -> None:
        """End all workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._process.returncode != 0:  # not dismissed
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._threads.shutdown(wait=True)
        for stream in (*self._streams, self._process.stdout):
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
