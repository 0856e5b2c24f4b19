"""`autobatch profile` as people run it: interrupted, sampled, run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_dataset_parallel import descendants
from tests.tiny import train_tokenizer, write_jsonl, write_parquet

ROOT = Path(__file__).parent.parent
ROW = {"question": "What is two plus two?", "answer": "Two plus two is four. " * 4}


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """Take interrupts, here and in children: a job in the background of a script ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer directory."""
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def environment(tmp_path):
    """Variables of a command: its own cache, this very checkout."""
    return {**os.environ, "AUTOBATCH_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}


def command(*arguments: str) -> list[str]:
    """Return a call of the command line."""
    return [sys.executable, "-m", "autobatch", *arguments]


def test_an_interrupt_leaves_what_is_done(tmp_path, tokenizer, environment):
    """Exit 130, a sentence with the rows, a record that says it is a part; tune refuses it."""
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps(ROW) + "\n") * 200_000)
    out = str(tmp_path / "out")
    process = subprocess.Popen(
        command("profile", str(file), "--tokenizer", tokenizer, "--out", out, "--json"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "rows/s" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    record = json.loads(stdout)
    assert 130 == process.returncode
    assert 0 < record["num_rows"] == record["num_samples"] < 200_000
    assert not record["complete"]
    assert json.loads((tmp_path / "out" / "profile.json").read_text()) == record
    assert f"interrupted after {record['num_rows']:,} rows" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    whole, part = tmp_path / "cache" / "tokens" / record["data"]["fingerprint"], record["cache_dir"]
    assert not whole.exists()
    assert json.loads((Path(part) / "meta.json").read_text())["num_samples"] == record["num_rows"]
    refused = subprocess.run(
        command("tune", "--device", "cpu", "--out", out), env=environment, capture_output=True
    )
    assert (1, b"") == (refused.returncode, refused.stdout)
    assert b"a part of the data only" in refused.stderr


def test_a_second_run_takes_no_part_for_the_whole(tmp_path, tokenizer, environment, monkeypatch):
    """What an interrupt left is neither the answer of the next run nor in its way."""
    from autobatch.dataset.lengths.interrupting import ProfileInterrupted
    from autobatch.dataset.lengths.profiling import profile_lengths

    monkeypatch.setenv("AUTOBATCH_CACHE", environment["AUTOBATCH_CACHE"])
    file = write_parquet(tmp_path / "a.parquet", [ROW] * 5000)

    def interrupt(num_done: int, num_total: int | None) -> None:
        if num_done:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(ProfileInterrupted) as caught:
        profile_lengths([file], tokenizer_dir=tokenizer, progress=interrupt)
    part = caught.value.profile
    assert (False, 2048) == (part.complete, part.num_rows)  # asked during the second batch
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole = profile_lengths([file], tokenizer_dir=tokenizer)
    assert (True, 5000) == (whole.complete, whole.num_rows)
    assert whole.num_tokens == part.num_tokens // 2016 * 5000


def test_an_answer_from_the_cache_reads_no_row(tmp_path, tokenizer, environment):
    """It needs neither transformers nor torch, and shows no progress of rows."""
    file = write_jsonl(tmp_path / "a.jsonl", [ROW] * 50)
    arguments = ["profile", file, "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    code = (
        "import sys; from autobatch.cli import main; main(standalone_mode=False); "
        "print([m for m in ('transformers', 'torch') if m in sys.modules])"
    )
    lines = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert 0 == ran.returncode
        lines.append((ran.stdout.splitlines()[-1], ran.stderr))
    assert "['transformers']" == lines[0][0]
    assert ("[]", "") == lines[1]
    assert "rows 50/50" in lines[0][1]


def test_a_sample_is_said(tmp_path, tokenizer, environment):
    """The table says that it is an estimate, and how wrong it may be; tune wants every row."""
    rows = [{"text": "two plus" * (1 + i % 50)} for i in range(2000)]
    file, out = write_jsonl(tmp_path / "a.jsonl", rows), str(tmp_path / "out")
    ran = subprocess.run(
        command("profile", file, "--tokenizer", tokenizer, "--out", out, "--sample", "200"),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert 0 == ran.returncode
    assert "estimated from" in ran.stdout
    assert "error at 95 %" in ran.stdout
    record = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert (False, 2000) == (record["complete"], record["num_rows"])
    assert {"p50", "p90", "p95", "p99"} == set(record["sampled"]["error_tokens"])
    refused = subprocess.run(
        command("tune", "--device", "cpu", "--out", out), env=environment, capture_output=True
    )
    assert 1 == refused.returncode
    assert b"without --sample" in refused.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_end_with_their_parent(tmp_path, tokenizer, environment):
    """A parent that is killed leaves no process behind."""
    file = tmp_path / "a.jsonl"
    file.write_text((json.dumps(ROW) + "\n") * 400_000)
    process = subprocess.Popen(
        command("profile", str(file), "--tokenizer", tokenizer, "--out", str(tmp_path / "out")),
        env=environment | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    workers: set[int] = set()
    # the one that loads, and those it forks
    while len(workers) < 3 and process.poll() is None and time.monotonic() < deadline:
        workers = descendants(process.pid)
        time.sleep(0.05)
    process.kill()
    process.wait()
    if len(os.sched_getaffinity(0)) > 1:
        assert workers
    while time.monotonic() < deadline and any(map(is_running, workers)):
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def is_running(pid: int) -> bool:
    """Return whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
