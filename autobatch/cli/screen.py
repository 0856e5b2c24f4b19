"""What the commands say: talk and progress to stderr, the result to stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.console import RenderableType

from autobatch.api import TuneReport
from autobatch.dataset.lengths.interrupting import ProfileInterrupted
from autobatch.errors import AutobatchError, DataError
from autobatch.records import LengthProfile, Trial
from autobatch.reporting import ProfileProgress, RunProgress, profile_table, show, trial_line
from autobatch.reporting.words import printable
from autobatch.storage import to_plain


def talk(message: str) -> None:
    """Say a line on stderr."""
    click.echo(message, err=True)


def print_result(record: Any, renderable: RenderableType | None, *, as_json: bool) -> None:
    """Print the record as one JSON document, or what people read."""
    try:
        if as_json:
            click.echo(json.dumps(to_plain(record), indent=1, ensure_ascii=False))
        elif renderable is not None:
            _show(renderable)
        if sys.stdout is not None:  # `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _settle_stdout()
        raise AutobatchError(
            f"cannot print the result: {error.strerror or error}; send it to another place"
        ) from error


def _show(renderable: RenderableType) -> None:
    if sys.stdout is not None:
        show(renderable, sys.stdout)


def say_trial(trial: Trial, note: str) -> None:
    """Say a trial as it lands."""
    talk(f"{trial_line(trial)}{f' ({note})' if note else ''}")


def callbacks(rows: Rows, steps: Steps, *, quiet: bool) -> dict[str, Any]:
    """Return the callbacks of a chain of commands; `quiet`: stdout is kept for one record."""

    def on_profile(profile: LengthProfile) -> None:
        rows.close()
        if not quiet:
            _show(profile_table(profile))

    def on_tuned(report: TuneReport) -> None:
        if not quiet:
            from autobatch.cli.views import tune_view

            show(tune_view(report), sys.stdout)

    return {
        "talk": talk,
        "on_profile": on_profile,
        "on_tuned": on_tuned,
        "on_trial": say_trial,
        "on_row": steps.update,
        "on_start": steps.start,
    }


class Rows:
    """Progress of reading rows; silent until there is something to read."""

    def __init__(self) -> None:
        self._progress: ProfileProgress | None = None

    def update(self, num_done: int, num_total: int | None) -> None:
        """Show the rows done."""
        if self._progress is None:
            self._progress = ProfileProgress()
        self._progress.update(num_done, num_total)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._progress is not None:
            self._progress.close()


class Steps:
    """Progress of a run, from its first row on."""

    def __init__(self) -> None:
        self._progress: RunProgress | None = None

    def start(self, num_steps: int) -> None:
        """Begin a run of this many optimizer steps."""
        self._progress = RunProgress(num_steps)

    def update(self, row: dict[str, Any]) -> None:
        """Show one row of metrics.jsonl."""
        if self._progress is not None:
            self._progress.update(row)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._progress is not None:
            self._progress.close()


@contextmanager
def whole_or_part(show_part: Callable[[LengthProfile], None], rows: Rows) -> Iterator[None]:
    """Show what an interrupted profile knows, say that it is a part, and exit with 130."""
    try:
        yield
    except ProfileInterrupted as interrupt:
        rows.close()
        show_part(interrupt.profile)
        talk(
            f"autobatch: interrupted after {interrupt.profile.num_rows:,} rows; the profile is of "
            "these alone, run it again for the whole"
        )
        raise SystemExit(128 + signal.SIGINT) from interrupt


@contextmanager
def plain_errors(*parts: Rows | Steps) -> Iterator[None]:
    """Turn our errors into one sentence and an exit code; end children on a signal.

    Exit: 1 ours, 3 nothing fits, 4 stale, 128 + n for signal n.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {
        number: signal.signal(number, on_signal)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup: the user's wish
    }
    try:
        yield
    except AutobatchError as error:
        _close(parts)
        click.echo(f"autobatch: {_words(error)}", err=True)
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as error:
        _close(parts)
        notes = getattr(error, "__notes__", [])
        click.echo("; ".join(["autobatch: interrupted", *map(printable, notes)]), err=True)
        raise SystemExit(128 + signal.SIGINT) from error
    except BrokenPipeError as error:
        _settle_stdout()
        raise SystemExit(128 + signal.SIGPIPE) from error
    except OSError as error:  # the machine's answer, not our fault
        _close(parts)
        _settle_stdout()
        named = f"cannot use {error.filename}" if error.filename else "the system refuses"
        click.echo(
            f"autobatch: {named}: {error.strerror or error}; check the path, its permissions and "
            "the free space",
            err=True,
        )
        raise SystemExit(1) from error
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        # The last resort, here alone: whatever nobody foresaw is our fault, so the user gets
        # a sentence, and the traceback goes where a bug report can fetch it.
        _close(parts)
        click.echo(f"autobatch: {_own_fault(error)}", err=True)
        raise SystemExit(1) from error
    finally:
        _close(parts)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _words(error: AutobatchError) -> str:
    """Return its sentence, in which a name from data neither breaks the line nor moves a cursor."""
    if isinstance(error, DataError):
        return printable(str(error))
    return "\n".join(map(printable, str(error).split("\n")))  # preflight says several


def _own_fault(error: Exception) -> str:
    first = (str(error).strip().splitlines() or ["no message"])[0][:200]
    said = f"this is a fault of autobatch, {type(error).__name__}: {first}"
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            prefix="autobatch-fault-",
            suffix=".txt",
            delete=False,
        ) as stream:
            traceback.print_exception(error, file=stream)
    except OSError as reason:
        return f"{said}; please report it (no traceback could be written: {reason.strerror})"
    return f"{said}; please report it with the traceback in {stream.name}"


def _settle_stdout() -> None:
    """Send what stdout refuses to nowhere, so that leaving Python does not fail again."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (ValueError, AttributeError):
        pass  # closed, or none


def _close(parts: tuple[Rows | Steps, ...]) -> None:
    for part in parts:
        part.close()
