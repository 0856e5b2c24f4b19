"""Turn an interrupt into a question that long work asks when it can stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
