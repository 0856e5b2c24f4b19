"""Let an interrupt end long work in good order, with what is done until then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType

from autobatch.dataset.lengths.findings import nothing_left
from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.dataset.tokens.turns import Tally
from autobatch.errors import DataError
from autobatch.records import LengthProfile

Progress = Callable[[int, int | None], None]  # rows done, rows in all or None


class ProfileInterrupted(KeyboardInterrupt):
    """The user's interrupt; `profile` tells of the rows that were done."""

    def __init__(self, profile: LengthProfile) -> None:
        """Keep the profile."""
        super().__init__(f"{profile.num_rows} rows done")
        self.profile = profile


@contextmanager
def interrupt_asked() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C came; a second one interrupts as ever.

    Outside the main thread, where no signal arrives, it always says no.
    """
    asked = False

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):  # whoever set a handler of his own (or ignores the signal) knows why
        yield lambda: False
        return
    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def watched(
    batches: Generator[SampleBatch],
    tally: Tally,
    where: str,
    is_asked: Callable[[], bool],
    progress: Progress | None,
    total: int | None,
) -> Iterator[SampleBatch]:
    """Pass batches on until an interrupt is asked for, and say how many rows are done.

    Fail at the end, before the cache is named, if no row can be trained on.
    """
    num_samples = num_label_tokens = 0
    with closing(batches):
        if progress is not None:
            progress(0, total)
        for batch in batches:
            num_samples += batch.num_samples
            num_label_tokens += int(batch.table[:, 1].sum())
            yield batch
            if is_asked():
                break
            if progress is not None and tally.num_rows != total:
                # the count may be an estimate, which rows overtake
                progress(tally.num_rows, total if total and total > tally.num_rows else None)
        else:
            if progress is not None:
                progress(tally.num_rows, tally.num_rows)
    if not num_label_tokens:
        if is_asked():
            raise KeyboardInterrupt
        raise DataError(nothing_left(tally, num_samples=num_samples, where=where))
