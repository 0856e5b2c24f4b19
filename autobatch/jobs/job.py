"""Start, watch, end a tree of child processes.

The kernel kills direct children when this process dies, however it dies; workers further down
call `end_with_launcher`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from autobatch.errors import RunError
from autobatch.jobs.endings import Ending, ending
from autobatch.jobs.processes import (
    POLL_SECS,
    end_tree,
    num_kernel_kills,
    start_time,
    tree_environment,
)

T = TypeVar("T")
# Other ranks get this long to fail by themselves after the first; then a collective hangs them.
SETTLE_SECS = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def free_port() -> int:
    """Return a TCP port that nothing on this host listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ranks(
    argv: Sequence[str], *, num_ranks: int, job_dir: Path, env: Mapping[str, str] | None = None
) -> Job:
    """Start `num_ranks` processes of one process group, each writing `job_dir/rank<N>.log`.

    `env` is added to this process's environment. When one rank fails, the rest is killed after
    SETTLE_SECS, at the next look at the job.

    Raises:
        RunError: if the program cannot be started.
    """
    assert num_ranks >= 1
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    job = Job()
    try:
        for rank in range(num_ranks):
            rank_env = {**(env or {}), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            job.add(argv, env=rank_env, log=job_dir / f"rank{rank}.log")
    except BaseException:
        job.kill(grace_secs=0)
        raise
    return job


def start_process(
    argv: Sequence[str],
    *,
    job_dir: Path,
    env: Mapping[str, str] | None = None,
    log_name: str = "process.log",
    capture: bool = False,
) -> Job:
    """Start one process that may start others (torchrun), writing `job_dir/<log_name>`.

    Its words also appear on this process's stderr as they come, unless `capture`.

    Raises:
        RunError: if the program cannot be started.
    """
    job = Job()
    job.add(argv, env=env or {}, log=job_dir / log_name)
    if not capture:
        job.echo()
    return job


class Job:
    """A running tree of processes; as a context manager it is killed on exit."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[tuple[Path, int]] = []  # file, where this job's words begin
        self._order: list[int] = []  # ranks, as they were seen to end
        self._forced: set[int] = set()  # ranks that this process killed
        self._first_failure_secs: float | None = None
        self._killed = False
        self._swept = False
        self._num_kernel_kills = num_kernel_kills()
        self._echo: threading.Thread | None = None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, by rank."""
        return tuple(process.pid for process in self._processes)

    def add(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        """Start one more process of the tree; its words are appended to `log`.

        Raises:
            RunError: if the program cannot be started.
        """
        # unbuffered: a killed process's last words are in its log
        full_env = {**os.environ, "PYTHONUNBUFFERED": "1", **env, **tree_environment(self._mark)}
        launcher = os.getpid()
        prctl = ctypes.CDLL(None).prctl

        def die_with_launcher() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the kernel was asked
                os._exit(1)

        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as stream:
                begin = stream.tell()
                process = _in_lasting_thread(
                    lambda: subprocess.Popen(
                        list(argv),
                        env=full_env,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_launcher,
                    )
                )
            self._processes.append(process)
            self._logs.append((log, begin))
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(
                f"cannot start {argv[0]!r}: {error}; check that it is installed, that {log.parent} "
                "can be written"
            ) from error

    def alive(self) -> bool:
        """Return whether the job still runs; when a rank failed, end the rest after a moment."""
        now = time.monotonic()
        for rank, process in enumerate(self._processes):
            if rank not in self._order and process.poll() is not None:
                self._order.append(rank)
                if process.returncode and self._first_failure_secs is None:
                    self._first_failure_secs = now
        if len(self._order) == len(self._processes):
            if not self._swept:
                self._swept = True
                end_tree(self._mark, set(), grace_secs=0)  # what the ended ones left behind
            return False
        if self._first_failure_secs is not None and now - self._first_failure_secs > SETTLE_SECS:
            self._kill_the_rest(grace_secs=0.5)
            return False
        return True

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Return whether the job ended within the time; None waits for as long as it runs."""
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        while self.alive():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECS)
        return True

    def kill(self, grace_secs: float = 0.5) -> None:
        """End the whole tree: SIGTERM, after the grace SIGKILL; nothing of it survives.

        Raises:
            RunError: if a process does not die.
        """
        if self.alive():
            self._killed = self._first_failure_secs is None
            self._kill_the_rest(grace_secs=grace_secs)

    def ended(self) -> Ending | None:
        """Return how the job ended, None while it runs."""
        if self.alive():
            return None
        if self._echo is not None:
            self._echo.join(timeout=2)
        return ending(
            exit_codes=[process.returncode for process in self._processes],
            order=self._order,
            forced=self._forced,
            killed=self._killed,
            kernel_killed=num_kernel_kills() > self._num_kernel_kills,
            logs=self._logs,
        )

    def echo(self) -> None:
        """Copy the first log to this process's stderr while the job runs."""
        path, begin = self._logs[0]
        pid = self._processes[0].pid

        def follow() -> None:
            with path.open("rb") as stream:
                stream.seek(begin)
                ended = False
                while not ended:
                    ended = start_time(pid) is None  # looked at before the last read
                    sys.stderr.write(stream.read().decode(errors="replace"))
                    sys.stderr.flush()
                    time.sleep(0 if ended else 0.1)

        self._echo = threading.Thread(target=follow, name="job-echo", daemon=True)
        self._echo.start()

    def _kill_the_rest(self, *, grace_secs: float) -> None:
        running = {rank for rank, p in enumerate(self._processes) if p.returncode is None}
        self._forced |= running
        self._swept = True
        end_tree(self._mark, {self._processes[r].pid for r in running}, grace_secs=grace_secs)
        for rank in sorted(running):
            self._processes[rank].wait()
            self._order.append(rank)


def _in_lasting_thread(start: Callable[[], T]) -> T:
    # The kernel sends the death signal when the *thread* that forked ends, so a short-lived
    # thread must not fork: its children would die with it.
    if threading.current_thread() is threading.main_thread():
        return start()
    done: Future[T] = Future()

    def fork() -> None:
        try:
            done.set_result(start())
        except BaseException as error:  # raised again in the thread that waits
            done.set_exception(error)

    _forking_thread().put(fork)
    return done.result()


@functools.cache
def _forking_thread() -> SimpleQueue[Callable[[], None]]:
    # No ThreadPoolExecutor: it refuses work once the main thread has run to its end.
    waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def serve() -> None:
        while True:
            waiting.get()()

    threading.Thread(target=serve, name="job-forks", daemon=True).start()
    return waiting
