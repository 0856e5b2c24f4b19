"""Progress of long work, as a bar on a terminal or a plain line now and then."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autobatch.units import format_gib, format_secs

PLAIN_EVERY_SECS = 10.0
_RECENT_UPDATES = 100  # of rows, that their rate is judged by
_RECENT_STEPS = 50  # steps that the remaining time is judged by
_POLL_SECS = 0.2


class _Line:
    """One line of progress: drawn in place on a terminal, else printed every ten seconds."""

    def __init__(
        self, name: str, total: int | None, stream: TextIO | None, clock: Callable[[], float]
    ) -> None:
        self._name, self._total = name, total
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._said_at: float | None = None
        self._unsaid: str | None = None
        self._bar: Progress | None = None
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[words]}", markup=False),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task(name, total=total, words="")
            self._bar.start()

    def say(self, done: int, words: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self._total, words=words)
            return
        now = self._clock()
        self._unsaid = f"{self._name} {words}"
        if self._said_at is None or now - self._said_at >= PLAIN_EVERY_SECS:
            self._flush()
            self._said_at = now

    def total_is(self, total: int | None) -> None:
        self._total = total

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._flush()

    def _flush(self) -> None:
        if self._unsaid is not None:
            print(self._unsaid, file=self._stream, flush=True)
            self._unsaid = None


class RunProgress:
    """The progress of a training run, fed with its metrics rows."""

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (None: stderr); `total_steps` None leaves the end unknown."""
        self._total_steps = total_steps
        self._line = _Line("step", total_steps, stream, clock)
        self._recent_secs: deque[float] = deque(maxlen=_RECENT_STEPS)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show one row of metrics.jsonl; a missing or non-finite value is shown as `-`."""
        step = int(row["step"])
        step_secs = _finite(row.get("step_secs"))
        if step_secs is not None:
            self._recent_secs.append(step_secs + (_finite(row.get("data_wait_secs")) or 0.0))
        loss, speed = _finite(row.get("loss")), _finite(row.get("tokens_per_sec"))
        words = [
            _of(step, self._total_steps),
            f"loss {'-' if loss is None else f'{loss:.4f}'}",
            f"{'-' if speed is None else f'{speed:,.0f}'} tokens/s",
            format_gib(_finite(row.get("peak_reserved_bytes"))),
            f"{self._remaining(step)} left",
        ]
        self._line.say(step, "  ".join(words))

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._line.close()

    def _remaining(self, step: int) -> str:
        if self._total_steps is None or not self._recent_secs:
            return "-"
        secs_per_step = sum(self._recent_secs) / len(self._recent_secs)
        return format_secs(max(0, self._total_steps - step) * secs_per_step)


class ProfileProgress:
    """The progress of reading rows, with their rate and the time that is left."""

    def __init__(
        self,
        total_rows: int | None = None,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (None: stderr)."""
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_RECENT_UPDATES)
        self._total_rows = total_rows
        self._line = _Line("rows", total_rows, stream, clock)

    def update(self, num_done: int, num_total: int | None = None) -> None:
        """Show the rows done; `num_total` replaces the total once it is known.

        No rows done begins the count: what came before, such as loading a tokenizer, is no part
        of the rate.
        """
        if num_total is not None:
            self._total_rows = num_total
            self._line.total_is(num_total)
        if not num_done:
            self._seen.clear()
        self._seen.append((self._clock(), num_done))
        if num_done:
            self._line.say(num_done, self._words(num_done))

    def _words(self, num_done: int) -> str:
        (begun_at, before), (now, _) = self._seen[0], self._seen[-1]
        rate = (num_done - before) / (now - begun_at) if now > begun_at else 0.0
        words = f"{_of(num_done, self._total_rows)}  {f'{rate:,.0f}' if rate else '-'} rows/s"
        num_left = 0 if self._total_rows is None else self._total_rows - num_done
        return f"{words}  {format_secs(num_left / rate)} left" if rate and num_left > 0 else words

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._line.close()


class MetricsTail:
    """The rows that a metrics.jsonl gains; a file cut back by a resume is read anew."""

    def __init__(self, path: Path, *, skip_present: bool = False) -> None:
        """Read `path`, which need not exist yet; `skip_present` leaves out rows of earlier runs."""
        self._path = path
        self._inode = path.stat().st_ino if path.exists() else None
        self._offset_bytes = path.stat().st_size if skip_present and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the whole rows written since the last call."""
        try:
            with self._path.open("rb") as stream:
                inode = os.fstat(stream.fileno()).st_ino
                if stream.seek(0, 2) < self._offset_bytes or inode != self._inode:
                    self._offset_bytes = 0
                self._inode = inode
                stream.seek(self._offset_bytes)
                new = stream.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None for one that a resume cut while it was read."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "step" in row else None


def _finite(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _of(done: int, total: int | None) -> str:
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"
