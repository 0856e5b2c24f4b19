"""How a job ended, told by the rank that failed first for a reason of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from autobatch.oom import out_of_memory_kind_of_text

LOG_TAIL_CHARS = 4000
# From here on torchrun talks about workers it ended; the reason stands before.
_TORCHRUN_EPILOGUE = re.compile(
    r"^[WE]\d{4} .*(?:closing signal SIGTERM|failed \(exitcode:)", re.MULTILINE
)
_LOST_PEER = re.compile(
    r"connection (?:closed|reset) by peer|connection was likely closed|broken pipe"
    r"|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a job ended. Exit codes by rank, negative for a signal, as subprocess gives them."""

    exit_codes: tuple[int, ...]
    signal: int | None  # that ended the first failed rank
    first_failed_rank: int | None
    log_tail: str  # last words of the first failed rank, else of rank 0
    killed: bool  # by its launcher, while no rank had failed
    killed_by_kernel: bool  # SIGKILL, not by its launcher, while the out-of-memory killer ran


def ending(
    *,
    exit_codes: Sequence[int],
    order: Sequence[int],
    forced: Set[int],
    killed: bool,
    kernel_killed: bool,
    logs: Sequence[tuple[Path, int]],
) -> Ending:
    """Return the ending of a job whose ranks all ended, in `order`.

    `forced`: the ranks its launcher killed. `kernel_killed`: whether the kernel's out-of-memory
    killer ran meanwhile. `logs`: by rank, a file and where the job's words begin in it.
    """
    failed = [rank for rank in order if exit_codes[rank]]
    tails = {rank: _log_tail(*logs[rank]) for rank in failed or [0]}

    def doubt(rank: int) -> tuple[bool, bool, int]:
        # A rank that was killed, or only lost its peer, is not the reason; then the order decides.
        tail = tails[rank]
        lost_peer = bool(_LOST_PEER.search(tail)) and not out_of_memory_kind_of_text(tail)
        return rank in forced, lost_peer, order.index(rank)

    first = min(failed, key=doubt, default=None)
    code = 0 if first is None else exit_codes[first]
    return Ending(
        exit_codes=tuple(exit_codes),
        signal=-code if code < 0 else None,
        first_failed_rank=first,
        log_tail=tails[first or 0],
        killed=killed,
        killed_by_kernel=kernel_killed and code == -signal.SIGKILL and first not in forced,
    )


def _log_tail(path: Path, start: int) -> str:
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - 16 * LOG_TAIL_CHARS))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""  # the user removed it
    epilogue = _TORCHRUN_EPILOGUE.search(text)
    reason = text[: epilogue.start()].strip() if epilogue else ""
    return (reason or text.strip())[-LOG_TAIL_CHARS:]
