"""Which processes belong to a tree, read from /proc, so that each of them can be ended.

Parenthood alone forgets orphans; sessions forget those that made their own. So a tree is marked
in its environment, which every descendant inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Set
from pathlib import Path

from autobatch.errors import RunError

LAUNCHER_VARIABLE = "AUTOBATCH_LAUNCHER"  # "<pid>:<start time>": a pid alone may be used again
TREE_VARIABLE = "AUTOBATCH_JOB"
POLL_SECS = 0.02
STUCK_SECS = 10.0


def tree_environment(mark: str) -> dict[str, str]:
    """Return the variables that mark a tree and name this process as its launcher."""
    pid = os.getpid()
    return {TREE_VARIABLE: mark, LAUNCHER_VARIABLE: f"{pid}:{start_time(pid) or ''}"}


def end_with_launcher(poll_secs: float = 0.5) -> None:
    """Kill this process as soon as the launcher that started its tree is gone.

    For workers that a middle process (torchrun) starts; without a launcher it does nothing.
    """
    pid, _, started = os.environ.get(LAUNCHER_VARIABLE, "").partition(":")
    if not started:
        return

    def watch() -> None:
        while start_time(int(pid)) == started:
            time.sleep(poll_secs)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


def end_tree(mark: str, roots: Set[int], *, grace_secs: float) -> None:
    """End every process of a tree: SIGTERM, after the grace SIGKILL until none is left.

    `roots` are processes known to belong to it, marked or not.

    Raises:
        RunError: if one does not die.
    """
    members = _members(mark, roots, {})
    asked = time.monotonic()
    if grace_secs > 0:
        _signal_all(members, signal.SIGTERM)
    while members:
        waited_secs = time.monotonic() - asked
        if waited_secs > grace_secs + STUCK_SECS:
            raise RunError(
                f"processes {sorted(members)} outlive SIGKILL by {STUCK_SECS:.0f} s, stuck in a "
                "driver; look into dmesg, then restart the host"
            )
        if waited_secs >= grace_secs:
            _signal_all(members, signal.SIGKILL)
        time.sleep(POLL_SECS)
        members = _members(mark, roots, members)  # with what was being started meanwhile


def start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None once it is dead."""
    row = _stat(pid)
    return None if row is None else row[1]


def num_kernel_kills() -> int:
    """Return how often the kernel's out-of-memory killer has killed since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _members(mark: str, roots: Set[int], known: Mapping[int, str]) -> dict[int, str]:
    """Return pid -> start time of all that lives of the tree, and of what was known."""
    needle = f"{TREE_VARIABLE}={mark}".encode()
    table = _process_table()
    found = {
        pid
        for pid, (_, started) in table.items()
        if pid in roots or known.get(pid) == started or needle in _environment(pid)
    }
    grown = found
    while grown:
        grown = {pid for pid, (parent, _) in table.items() if parent in found} - found
        found = found | grown
    return {pid: table[pid][1] for pid in found}


def _process_table() -> dict[int, tuple[int, str]]:
    """Return pid -> (parent, start time) of every process that is no zombie."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    rows = {pid: _stat(pid) for pid in pids}
    return {pid: row for pid, row in rows.items() if row is not None}


def _stat(pid: int) -> tuple[int, str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # proc(5): field 2, the name in brackets, may hold spaces; 3 state, 4 parent, 22 start
    words = text.rpartition(")")[2].split()
    return None if words[0] in "ZX" else (int(words[1]), words[19])


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # another user's, or gone


def _signal_all(members: Mapping[int, str], number: int) -> None:
    for pid, started in members.items():
        if start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
