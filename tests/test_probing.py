"""Real steps in real children: peaks, limits, and every way a child can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import tiny_model

from autobatch.config import candidate_of, load_config, resolve
from autobatch.errors import ConfigError, RunError
from autobatch.jobs import Ending
from autobatch.probing.answers import judge
from autobatch.probing.runner import (
    NUM_EARLY_CHILDREN,
    ProbeRunner,
    error_of,
    toggle_set_name,
)
from autobatch.records import Candidate, Load, Toggles, Trial, fits

ROOT = Path(__file__).parent.parent
LIMIT = 12 * 2**20
LENGTH = 100
SMALL, HUGE = 2, 200  # rows that fit in LIMIT, rows that do not


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads that wait for one another are slow where cores are shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def config_of(model: Path, *overrides: str):
    return load_config(
        None,
        [
            f"model.path={model}",
            "trainer.device=cpu",
            "data.max_token_len_per_gpu=1000",
            *overrides,
        ],
    )


def runner_of(out_dir: Path, config, *, num_ranks: int = 1, limit=LIMIT) -> ProbeRunner:
    return ProbeRunner(
        out_dir=out_dir,
        config=config,
        num_ranks=num_ranks,
        memory_limit_bytes=limit,
        environment={"device": "cpu"},
    )


def step(runner: ProbeRunner, config, num_rows: int, *, timeout_secs: float = 120) -> Trial:
    load = Load(micro_batches=((LENGTH,) * num_rows,) * 2)
    return runner.run(candidate_of(resolve(config)), load, timeout_secs=timeout_secs)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture(scope="module", params=["single", "fsdp2"])
def around_an_oom(request, model, tmp_path_factory):
    """One child that steps a small load, runs out of memory, and steps the small load again."""
    config = config_of(model, f"engine.strategy={request.param}")
    with runner_of(tmp_path_factory.mktemp("probes"), config) as runner:
        trials, pids = [], []
        for num_rows in (SMALL, HUGE, SMALL):
            trials.append(step(runner, config, num_rows))
            pids.append(runner.pids)
    return trials, pids


def test_a_trial_steps_twice_and_says_what_it_took(around_an_oom):
    """A trial is two optimizer steps, and its peaks and times are measured."""
    (trial, *_), _ = around_an_oom
    assert ("ok", 2, 2) == (trial.outcome, len(trial.step_secs), len(trial.micro_batch_secs))
    assert {"forward", "backward", "optimizer"} == set(trial.phase_peaks)
    assert trial.peak_reserved_bytes == max(trial.phase_peaks.values())
    assert fits(trial)


def test_out_of_memory_is_an_outcome(around_an_oom):
    """A load past the limit is told as out of memory, with the peak that it reached."""
    (_, trial, _), _ = around_an_oom
    assert "oom" == trial.outcome
    assert trial.message.startswith("OutOfMemoryError: CPU account: ")
    assert trial.peak_reserved_bytes > LIMIT == trial.memory_limit_bytes


def test_a_child_is_sound_after_out_of_memory(around_an_oom):
    """On one CPU rank the child goes on, and a load peaks as it does in a fresh process."""
    (fresh, _, again), pids = around_an_oom
    assert 1 == len(set(pids))
    assert ("ok", fresh.peak_reserved_bytes) == (again.outcome, again.peak_reserved_bytes)


def test_a_hanging_child_is_killed_and_the_next_trial_runs(model, tmp_path):
    """A stopped worker is a timeout; a new child takes its place."""
    config = config_of(model, "engine.strategy=single")
    with runner_of(tmp_path, config) as runner:
        step(runner, config, SMALL)
        (hanging,) = runner.pids
        os.kill(hanging, signal.SIGSTOP)
        began = time.monotonic()
        outcome = step(runner, config, SMALL, timeout_secs=1).outcome
        assert ("timeout", False) == (outcome, is_alive(hanging))
        assert time.monotonic() - began < 5
        assert "ok" == step(runner, config, SMALL).outcome


def test_a_setting_that_the_engine_refuses_is_the_users_sentence(model, tmp_path):
    """A wrong config is no out-of-memory: its own sentence comes back."""
    config = config_of(model, "engine.strategy=single", "model.quantization=nf4")
    with runner_of(tmp_path, config) as runner:
        trial = step(runner, config, SMALL)
    error = error_of(trial, out_dir=tmp_path)
    assert "error" == trial.outcome
    assert isinstance(error, ConfigError)
    assert str(error).startswith("model.quantization=nf4 does not work")


def test_one_rank_out_of_memory_ends_the_trial_of_all(model, tmp_path):
    """When only rank 1 runs out of memory, rank 0 is not waited for, and nothing survives."""
    config = config_of(model)
    with runner_of(tmp_path, config, num_ranks=2, limit=[LIMIT * 10, LIMIT]) as runner:
        assert "ok" == step(runner, config, SMALL).outcome
        pids = runner.pids
        began = time.monotonic()
        outcome = step(runner, config, HUGE // 4).outcome
        assert "oom" == outcome
        assert time.monotonic() - began < 10
    assert [False, False] == [is_alive(pid) for pid in pids]


def test_children_end_with_a_parent_that_is_killed(model, tmp_path):
    """A SIGKILL of the parent leaves no child after two seconds."""
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from test_probing import config_of, runner_of, step
config = config_of(Path({str(model)!r}))
with runner_of(Path({str(tmp_path)!r}), config) as runner:
    step(runner, config, 2)
    print(*runner.pids, flush=True)
    while True:
        step(runner, config, 40)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 2
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [False] == [is_alive(pid) for pid in pids]


def ending_of(log_tail: str, **changes) -> Ending:
    values = {
        "exit_codes": (1,),
        "signal": None,
        "first_failed_rank": 0,
        "killed": False,
        "killed_by_kernel": False,
        **changes,
    }
    return Ending(log_tail=log_tail, **values)


def failure(outcome: str, message: str, failed_at: float) -> dict:
    return {"outcome": outcome, "message": message, "failed_at": failed_at}


def test_out_of_memory_of_one_rank_outweighs_the_errors_of_the_others():
    """A lost connection after another rank's out-of-memory is no error."""
    answers = {0: failure("error", "lost", 1.0), 1: failure("oom", "OOM", 2.0)}
    assert ("oom", "OOM") == judge(answers, None)


def test_the_first_error_has_the_reason():
    """Of two errors the earlier one is told."""
    answers = {0: failure("error", "lost peer", 2.0), 1: failure("error", "bug", 1.0)}
    assert ("error", "bug") == judge(answers, None)


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (ending_of("x\nRuntimeError: CUDA error: out of memory\n"), "oom"),
        (ending_of("", signal=9, exit_codes=(-9,), killed_by_kernel=True), "oom"),
        (ending_of("", signal=9, exit_codes=(-9,)), "error"),
        (ending_of("ValueError: bad memory format"), "error"),
        (ending_of("KeyboardInterrupt"), "error"),
    ],
)
def test_a_death_without_an_answer_is_judged_by_its_last_words(ending, expected):
    """Only a real out-of-memory counts as one."""
    assert expected == judge({}, ending)[0]


def test_an_error_is_told_by_the_line_that_names_it():
    """The message is the error's own line, not the last line of the log."""
    tail = "Traceback (most recent call last):\n  File x\nValueError: shapes differ\nbye"
    assert ("error", "ValueError: shapes differ") == judge({}, ending_of(tail))


def test_a_bug_is_no_setting_of_the_users():
    """Any other error is a failed run that names trial and log."""
    trial = Trial(
        trial_id="t003",
        candidate=Candidate(toggles=Toggles(), max_token_len_per_gpu=8),
        load=Load(micro_batches=((8,),)),
        data_parallel_size=1,
        measured=True,
        stand_in_for=None,
        simulated_ranks=None,
        outcome="error",
        message="RuntimeError: shape mismatch",
        memory_limit_bytes=1,
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        non_torch_bytes=None,
        phase_peaks={},
        step_secs=(),
        num_alloc_retries=None,
        seconds=1.0,
    )
    error = error_of(trial, out_dir=Path("probes"))
    assert isinstance(error, RunError)
    assert "trial t003 failed: RuntimeError: shape mismatch; its log is in probes/children" == str(
        error
    )


def test_a_toggle_set_has_a_readable_name():
    """Form, loss kernel, gradient checkpointing, then what is switched on."""
    toggles = Toggles(use_remove_padding=False, loss_kernel="logits", reshard_after_forward=True)
    assert "padded-logits-none-reshard" == toggle_set_name(toggles)


def test_the_next_child_waits_ready_and_none_is_left(model, tmp_path):
    """A child started early serves the next toggle set; closing ends it too."""
    config = config_of(model, "engine.strategy=single")
    other = config_of(model, "engine.strategy=single", "model.loss_kernel=logits")
    runner = ProbeRunner(
        out_dir=tmp_path,
        config=config,
        num_ranks=1,
        memory_limit_bytes=LIMIT,
        environment={"device": "cpu"},
        starts_early=True,
    )
    with runner:
        assert "ok" == step(runner, config, SMALL).outcome
        first = runner.pids
        folder = str(tmp_path / "children" / "002")
        waiting = [pid for pid in map(int, _pids()) if folder in _words(pid)]
        assert 1 == len(waiting)
        assert NUM_EARLY_CHILDREN == len(list((tmp_path / "children").iterdir())) - 1
        assert "ok" == step(runner, other, SMALL).outcome
        assert (waiting[0],) == runner.pids
        assert first != runner.pids
    assert [] == [pid for pid in map(int, _pids()) if str(tmp_path) in _words(pid)]


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").glob("[0-9]*")]


def _words(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
