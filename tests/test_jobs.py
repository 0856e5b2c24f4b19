"""No process of a job outlives its launcher, and a job's ending names the first real error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autobatch.errors import RunError
from autobatch.jobs import end_with_launcher, free_port, start_process, start_ranks
from autobatch.jobs.processes import start_time

REPO = str(Path(__file__).parents[1])
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process trees are read in /proc")

# A worker in a session of its own, which notes its pid and then waits for ever.
WORKER = "import os,sys,time,pathlib; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAIT = "time.sleep(600)"


def _python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def _middle(worker: str) -> str:
    """Return a program that starts a worker in its own session, then waits."""
    return (
        "import subprocess,sys,time\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}, sys.argv[1]],"
        " start_new_session=True)\n"
        "if sys.argv[2:] == ['leave']: time.sleep(0.5); sys.exit(0)\n"
        f"{WAIT}\n"
    )


def _eventually(condition: Callable[[], object], secs: float = 20.0) -> bool:
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())


def _pid_in(path: Path) -> int:
    assert _eventually(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def test_a_free_port_can_be_listened_on() -> None:
    """Nothing holds the port."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_ranks_get_the_environment_of_a_process_group(tmp_path: Path) -> None:
    """Each rank knows its place, the size, one common address; the caller's variables too."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    code = f"import os,json; print(json.dumps([os.environ[n] for n in {[*names, 'OWN']}]))"
    job = start_ranks(_python(code), num_ranks=2, job_dir=tmp_path, env={"OWN": "x"})
    assert job.wait(20)
    seen = [json.loads((tmp_path / f"rank{rank}.log").read_text()) for rank in range(2)]
    port = seen[0][5]
    assert [[str(r), str(r), "2", "2", "127.0.0.1", port, "x"] for r in range(2)] == seen


def test_a_job_that_ends_well_says_so(tmp_path: Path) -> None:
    """Exit codes of 0, no failed rank, rank 0's words."""
    job = start_ranks(_python("print('done')"), num_ranks=2, job_dir=tmp_path)
    assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert (
        ending.exit_codes,
        ending.signal,
        ending.first_failed_rank,
        ending.log_tail,
        ending.killed,
    ) == ((0, 0), None, None, "done", False)


def test_a_running_job_has_no_ending_and_times_out(tmp_path: Path) -> None:
    """wait is False after its time; the context manager then kills."""
    with start_ranks(_python("import time;" + WAIT), num_ranks=1, job_dir=tmp_path) as job:
        assert job.ended() is None
        assert not job.wait(0.1)
    ending = job.ended()
    assert ending is not None
    assert (ending.killed, ending.signal, ending.killed_by_kernel) == (True, signal.SIGTERM, False)


def test_one_failed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    """Rank 1 fails, the rest hang as in a collective: they are killed, rank 1's words kept."""
    code = (
        "import os,time,sys\n"
        "if os.environ['RANK'] == '1': sys.exit('ValueError: the real one')\n" + WAIT
    )
    job = start_ranks(_python(code), num_ranks=3, job_dir=tmp_path)
    assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert (ending.first_failed_rank, ending.signal, ending.killed) == (1, None, False)
    assert ending.exit_codes == (-signal.SIGTERM, 1, -signal.SIGTERM)
    assert ending.log_tail == "ValueError: the real one"


def test_a_rank_that_only_lost_its_peer_is_not_the_reason(tmp_path: Path) -> None:
    """The peer may die first; the out-of-memory that made it die is told."""
    code = (
        "import os,time,sys\n"
        "if os.environ['RANK'] == '0': sys.exit('RuntimeError: Connection closed by peer')\n"
        "time.sleep(0.3); sys.exit('torch.OutOfMemoryError: CUDA out of memory.')"
    )
    job = start_ranks(_python(code), num_ranks=2, job_dir=tmp_path)
    assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert ending.first_failed_rank == 1
    assert "out of memory" in ending.log_tail


def test_a_signal_is_told(tmp_path: Path) -> None:
    """A child that died of SIGKILL from elsewhere was not killed by us nor, here, for memory."""
    code = "import os,signal; os.kill(os.getpid(), signal.SIGKILL)"
    job = start_ranks(_python(code), num_ranks=1, job_dir=tmp_path)
    assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert (ending.signal, ending.killed) == (signal.SIGKILL, False)


def test_a_later_job_appends_to_the_log_but_tells_its_own_words(tmp_path: Path) -> None:
    """Nothing written earlier is lost, and nothing earlier is mistaken for the reason."""
    for word in ("first", "second"):
        job = start_ranks(_python(f"print('{word}')"), num_ranks=1, job_dir=tmp_path)
        assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert ending.log_tail == "second"
    assert (tmp_path / "rank0.log").read_text() == "first\nsecond\n"


def test_the_tail_stops_before_torchrun_talks_about_its_kills(tmp_path: Path) -> None:
    """The worker's error is told, not the SIGTERM sent to its peers."""
    log = (
        "ValueError: the real one\n"
        "W1201 10:00:00.000 7 torch/x/api.py:900] Sending process 8 closing signal SIGTERM\n"
        "E1201 10:00:00.000 7 torch/x/api.py:800] failed (exitcode: 1) local_rank: 1 of x\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError\n"
    )
    code = f"import sys; sys.stderr.write({log!r}); sys.exit(1)"
    job = start_process(_python(code), job_dir=tmp_path, capture=True)
    assert job.wait(20)
    ending = job.ended()
    assert ending is not None
    assert ending.log_tail == "ValueError: the real one"


def test_kill_reaches_grandchildren_in_their_own_session(tmp_path: Path) -> None:
    """Even one that ignores SIGTERM."""
    code = _middle(STUBBORN + WORKER + WAIT)
    job = start_process(_python(code, tmp_path / "pid"), job_dir=tmp_path, capture=True)
    worker = _pid_in(tmp_path / "pid")
    job.kill(grace_secs=0.2)
    assert [start_time(pid) for pid in (worker, *job.pids)] == [None, None]


def test_orphans_of_an_ended_process_are_ended(tmp_path: Path) -> None:
    """A middle process that leaves its worker behind leaves nothing behind."""
    code = _middle(WORKER + WAIT)
    job = start_process(_python(code, tmp_path / "pid", "leave"), job_dir=tmp_path, capture=True)
    assert job.wait(20)
    assert start_time(_pid_in(tmp_path / "pid")) is None


def test_words_appear_as_they_come_unless_captured(tmp_path: Path) -> None:
    """The log holds them in both cases."""
    code = (
        "import sys,pathlib; from autobatch.jobs import start_process\n"
        "argv = [sys.executable, '-c', 'print(\"hello\")']\n"
        "for capture in (False, True):\n"
        "    job = start_process(argv, job_dir=pathlib.Path(sys.argv[1]), capture=capture,\n"
        "                        log_name=f'{capture}.log')\n"
        "    job.wait(20); job.ended()\n"
    )
    done = subprocess.run(
        _python(code, tmp_path), cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "hello\n")
    assert (tmp_path / "True.log").read_text() == (tmp_path / "False.log").read_text() == "hello\n"


def test_a_missing_program_is_one_sentence(tmp_path: Path) -> None:
    """The name and the next move, no traceback."""
    with pytest.raises(RunError, match=r"cannot start '/no/such/program'.*installed"):
        start_process(["/no/such/program"], job_dir=tmp_path)


def test_a_job_survives_the_thread_that_started_it(tmp_path: Path) -> None:
    """The death signal is the launcher's, not a passing thread's."""
    jobs = []
    argv = _python("import time;" + WAIT)
    thread = threading.Thread(
        target=lambda: jobs.append(start_process(argv, job_dir=tmp_path, capture=True))
    )
    thread.start()
    thread.join()
    with jobs[0] as job:
        assert not job.wait(0.5)


@pytest.mark.parametrize("threaded", [False, True], ids=["main_thread", "other_thread"])
def test_all_ends_within_two_secs_of_the_launcher_death(tmp_path: Path, threaded: bool) -> None:
    """SIGKILL to the launcher ends the ranks, the middle process, its worker in its own session."""
    worker = f"import sys; sys.path.insert(0, {REPO!r}); "
    worker += "from autobatch.jobs import end_with_launcher; end_with_launcher(); " + WORKER + WAIT
    launcher = (
        "import sys,time,pathlib,threading\n"
        f"sys.path.insert(0, {REPO!r})\n"
        "from autobatch.jobs import start_process, start_ranks\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "def start():\n"
        f"    argv = [sys.executable, '-c', {_middle(worker)!r}, str(folder / 'worker')]\n"
        "    middle = start_process(argv, job_dir=folder, capture=True)\n"
        "    waiting = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    ranks = start_ranks(waiting, num_ranks=2, job_dir=folder)\n"
        "    (folder / 'part').write_text(' '.join(map(str, middle.pids + ranks.pids)))\n"
        "    (folder / 'part').rename(folder / 'pids')\n"
        "    time.sleep(600)\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        + ("threading.Thread(target=start).start()\n" if threaded else "start()\n")
    )
    process = subprocess.Popen(_python(launcher, tmp_path))
    try:
        worker_pid = _pid_in(tmp_path / "worker")
        assert _eventually((tmp_path / "pids").exists)
        pids = [worker_pid, *map(int, (tmp_path / "pids").read_text().split())]
        assert all(start_time(pid) for pid in pids)
    finally:
        process.kill()  # not waited for: a launcher that nobody reaps is dead all the same
    assert _eventually(lambda: not any(start_time(pid) for pid in pids), secs=2.0)
    process.wait()


def test_without_a_launcher_nothing_is_watched() -> None:
    """A worker started by hand runs on."""
    assert "AUTOBATCH_LAUNCHER" not in os.environ
    before = threading.active_count()
    end_with_launcher()
    assert before == threading.active_count()
