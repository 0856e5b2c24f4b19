"""Processes that render rows."""

from __future__ import annotations

import fcntl
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import Row, UnreadRows
from autobatch.dataset.tokens.encoding import Trust
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.dataset.tokens.turns import Tally
from autobatch.errors import DataError
from autobatch.hardware.environment import child_environment

_GOODBYE_SECS = 5.0
_MOST_WORKERS = 64  # each takes four descriptors at first, of the 1,024 that a process may have
_PIPE_BYTES = 2**20  # as large as a user may make one
_ALL_PIPES_BYTES = 2**25  # half of what Linux gives a user for all pipes together
_WAITING = 2  # batches a worker that are read ahead

Batch = tuple[int, list[bytes]]  # the number of its first row, pickled lists of rows


def unpacked(blobs: Iterable[bytes]) -> list[Row]:
    """Return the rows of a batch.

    Raises:
        DataError: if a value of a column, or a line, cannot be read.
    """
    parts = (part for blob in blobs for part in pickle.loads(blob))
    return [
        row for part in parts for row in (part.rows() if isinstance(part, UnreadRows) else [part])
    ]


class Workers:
    """Processes that render; each is spoken to by one thread.

    They load the tokenizer at once, and begin when they were taught what rows are.
    """

    def __init__(self, tokenizer_dir: str, num_workers: int) -> None:
        """Start them."""
        self.is_taught = self._is_closed = False
        num_workers = min(num_workers, _MOST_WORKERS)
        pipe_bytes = min(_PIPE_BYTES, _ALL_PIPES_BYTES // (2 * num_workers))
        theirs: list[int] = []
        self._free: queue.SimpleQueue[tuple[BinaryIO, BinaryIO]] = queue.SimpleQueue()
        self._streams: list[BinaryIO] = []
        for _ in range(num_workers):
            (requests, ours), (answers, to_us) = os.pipe(), os.pipe()
            theirs += [requests, to_us]
            for end in (requests, to_us):  # a batch in one go: each piece waits for Python's lock
                with suppress(OSError, AttributeError):  # more than a user may have; not Linux
                    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, pipe_bytes)
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
        self._tell(tokenizer_dir)

    def teach(self, fmt: RowFormat, trust: Trust, checks: RowChecks) -> None:
        """Tell them of the rows to come."""
        self.is_taught = True
        self._tell((fmt, trust, (checks.mode, checks.num_rows)))

    def _tell(self, value: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(pickle.dumps(value))
            self._process.stdin.flush()

    def are_ready(self) -> bool:
        """Return whether they have learned everything, or have failed to."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return bool(selector.select(0))

    def render(
        self, batches: Iterable[Batch], tally: Tally, checks: RowChecks
    ) -> Iterator[SampleBatch]:
        """Yield the samples of batches in order.

        Raises:
            DataError: if a row cannot be read, or a worker ended.
            RuntimeError: if a worker failed by our fault.
        """
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
        """Let workers that are done go by themselves: their times then count as ours."""
        if not (self.is_taught and self.are_ready()):
            return  # they have done nothing: `close` ends them
        for stream in self._streams[::2]:
            stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECS)

    def close(self) -> None:
        """End all workers; a second time does nothing."""
        if self._is_closed:
            return  # their number may be another's by now
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._process.returncode != 0:  # not dismissed
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._threads.shutdown(wait=True)
        for stream in (*self._streams, self._process.stdin, self._process.stdout):
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
