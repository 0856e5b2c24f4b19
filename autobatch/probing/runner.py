"""Candidates stepped in child processes, seen from the parent: one child tree a toggle set."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.config import candidate_values, save_config, with_values
from autobatch.errors import AutobatchError, ConfigError, RunError
from autobatch.hardware.environment import allocator_environment, thread_environment
from autobatch.jobs import Ending, Job, start_ranks
from autobatch.oom import out_of_memory_kind_of_text
from autobatch.records import Candidate, Load, Toggles, Trial
from autobatch.storage import append_jsonl, read_jsonl, write_json

POLL_SECS = 0.02
SETTLE_SECS = 1.0  # after one rank failed, the others get this long before they count as stuck
_ERROR_LINE = re.compile(r"^(?:\[\w+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")
_USER_ERRORS = ("ConfigError", "ModelError")

Answers = dict[int, dict[str, Any]]  # by rank


def toggle_set_name(toggles: Toggles) -> str:
    """Return a readable name, such as `packed-chunked-none` (the last: gradient checkpointing)."""
    form = "packed" if toggles.use_remove_padding else "padded"
    parts = [form, toggles.loss_kernel, toggles.gradient_checkpointing]
    if toggles.loss_chunk_tokens is not None:
        parts.append(f"chunk{toggles.loss_chunk_tokens}")
    switches = {
        "liger": toggles.use_liger,
        "compile": toggles.compile,
        "reshard": toggles.reshard_after_forward,
        "offload": toggles.cpu_offload,
    }
    return "-".join(parts + [name for name, is_on in switches.items() if is_on])


class ProbeRunner:
    """Steps loads under a memory limit; as a context manager it leaves no child behind.

    The child of a toggle set is kept between its trials. It is replaced for another toggle set,
    after a timeout, and whenever it died.
    """

    def __init__(
        self,
        *,
        out_dir: Path,
        config: DictConfig,
        num_ranks: int,
        memory_limit_bytes: int | Sequence[int],
        environment: Mapping[str, Any],
        stand_in_for: str | None = None,
        simulated_ranks: int | None = None,
    ) -> None:
        """Keep what all trials share. `memory_limit_bytes`: of every rank, or rank by rank.

        With `simulated_ranks` one process stands for rank 0 of so many, and `num_ranks` is 1.
        """
        assert simulated_ranks is None or num_ranks == 1
        self._simulated_ranks = simulated_ranks
        self._out_dir = out_dir
        self._config = config
        self._num_ranks = num_ranks
        self._limits = (
            memory_limit_bytes if isinstance(memory_limit_bytes, int) else list(memory_limit_bytes)
        )
        self._environment = dict(environment)
        self._stand_in_for = stand_in_for
        self._num_trials = 0
        self._toggles: Toggles | None = None
        self._job: Job | None = None

    def __enter__(self) -> ProbeRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the running child tree, by rank."""
        return () if self._job is None else self._job.pids

    def close(self) -> None:
        """End the child tree."""
        if self._job is not None:
            self._job.kill(grace_secs=0)
            self._job = None

    def run(self, candidate: Candidate, load: Load, *, timeout_secs: float) -> Trial:
        """Step the load under the candidate's toggles, the worst rank counts.

        Out of memory, a timeout and any other error are outcomes: see `error_of` for the last.

        Raises:
            RunError: if no child can be started.
        """
        began = time.monotonic()
        self._num_trials += 1
        trial_id = f"t{self._num_trials:03d}"
        job_dir = self._out_dir / toggle_set_name(candidate.toggles)
        job = self._child(candidate, job_dir)
        append_jsonl(job_dir / "requests.jsonl", {"trial_id": trial_id, **_plain_load(load)})
        answers, timed_out = self._await(job, job_dir, trial_id, began + timeout_secs)
        said = _outcome(answers)
        is_over = said == "error" or (said == "oom" and self._is_over_after_oom())
        if len(answers) < self._num_ranks or is_over:
            job.kill(grace_secs=0)
        outcome: str
        message: str | None
        if timed_out and _outcome(answers) == "ok":
            outcome, message = "timeout", f"no answer within {timeout_secs:.0f} s"
        else:
            ending = None if len(answers) == self._num_ranks else job.ended()
            outcome, message = judge(answers, ending)
        return Trial(
            trial_id=trial_id,
            candidate=candidate,
            load=load,
            data_parallel_size=self._simulated_ranks or self._num_ranks,
            measured=True,
            stand_in_for=self._stand_in_for,
            simulated_ranks=self._simulated_ranks,
            outcome=outcome,
            message=message,
            memory_limit_bytes=(
                self._limits if isinstance(self._limits, int) else min(self._limits)
            ),
            seconds=time.monotonic() - began,
            environment=self._environment,
            **_worst(list(answers.values())),
        )

    def _is_over_after_oom(self) -> bool:
        """Alone on the CPU a child goes on after an out-of-memory; others end."""
        is_cuda = self._config.trainer.device == "cuda"
        return self._num_ranks > 1 or self._simulated_ranks is not None or is_cuda

    def _child(self, candidate: Candidate, job_dir: Path) -> Job:
        if self._job is not None and self._toggles == candidate.toggles and self._job.alive():
            return self._job
        self.close()
        job_dir.mkdir(parents=True, exist_ok=True)
        for stale in (job_dir / "requests.jsonl", *job_dir.glob("rank*.jsonl")):
            stale.unlink(missing_ok=True)
        values = {**candidate_values(candidate), "tuning": None}
        save_config(with_values(self._config, values), job_dir / "config.yaml")
        write_json(
            job_dir / "job.json",
            {
                "memory_limit_bytes": self._limits,
                "simulated_ranks": self._simulated_ranks,
                "poll_secs": POLL_SECS,
            },
        )
        # -P: a file in the user's folder that is called like a module is no part of the child
        self._job = start_ranks(
            [sys.executable, "-P", "-m", "autobatch.probing.worker", str(job_dir)],
            num_ranks=self._num_ranks,
            job_dir=job_dir,
            env={
                **thread_environment(self._num_ranks),
                **allocator_environment(),
                "PYTHONPATH": _python_path(),
            },
        )
        self._toggles = candidate.toggles
        return self._job

    def _await(
        self, job: Job, job_dir: Path, trial_id: str, deadline: float
    ) -> tuple[Answers, bool]:
        """Return the answers by rank, and whether the time was over before they were all there."""
        failed_at: float | None = None
        while True:
            ended = not job.alive()  # looked at before the last read
            answers = self._answers(job_dir, trial_id)
            now = time.monotonic()
            if len(answers) == self._num_ranks or ended:
                return answers, False
            if failed_at is None and any(a["outcome"] != "ok" for a in answers.values()):
                failed_at = now
            if failed_at is not None and now - failed_at > SETTLE_SECS:
                return answers, False
            if now > deadline:
                return answers, True
            time.sleep(POLL_SECS)

    def _answers(self, job_dir: Path, trial_id: str) -> Answers:
        answers = {}
        for rank in range(self._num_ranks):
            for row in read_jsonl(job_dir / f"rank{rank}.jsonl"):
                if row["trial_id"] in (trial_id, None):  # None: failed outside of any trial
                    answers[rank] = row
        return answers


def judge(answers: Answers, ending: Ending | None) -> tuple[str, str | None]:
    """Return the outcome of a trial and its message, from what ranks said and how they ended.

    An out-of-memory of any rank explains what the others met; of errors the first does. `ending`
    is that of a tree in which not every rank answered.
    """
    failed = sorted(
        (a for a in answers.values() if a["outcome"] != "ok"), key=lambda a: a["failed_at"]
    )
    ran_out = [a for a in failed if a["outcome"] == "oom"]
    if ran_out:
        return "oom", ran_out[0]["message"]
    silent = ending is not None and ending.first_failed_rank not in (None, *answers)
    if ending is not None and silent:
        last = _error_line(ending.log_tail)
        if ending.killed_by_kernel:
            return "oom", "killed by the kernel: the machine ran out of memory"
        if out_of_memory_kind_of_text(ending.log_tail):
            return "oom", last
        if ending.signal is not None and not ending.killed:
            return "error", f"killed by {signal.Signals(ending.signal).name}"
        if not failed:
            return "error", last
    if failed:
        return "error", failed[0]["message"]
    return ("ok", None) if ending is None else ("error", "ended without an answer")


def error_of(trial: Trial, *, out_dir: Path) -> AutobatchError:
    """Return what to raise for a trial of outcome `error`, in one sentence.

    `out_dir` is the runner's; its logs are named where the error is none of the user's settings.
    """
    message = trial.message or "ended without a word"
    name, _, sentence = message.partition(": ")
    if name in _USER_ERRORS:
        return ConfigError(sentence)
    if "No module named 'torch'" in message:
        return RunError(
            "training steps need torch; install it with pip install autobatch-sft[train]"
        )
    folder = out_dir / toggle_set_name(trial.candidate.toggles)
    return RunError(f"trial {trial.trial_id} failed: {message}; its log is in {folder}")


def _outcome(answers: Answers) -> str:
    outcomes = {a["outcome"] for a in answers.values()}
    return next((o for o in ("oom", "error") if o in outcomes), "ok")


def _worst(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the highest peaks and the slowest times over ranks; None where no rank tells."""
    measured = [a for a in answers if "step_secs" in a]

    def most(name: str) -> Any:
        return max((a[name] for a in measured if a[name] is not None), default=None)

    def slowest(name: str) -> tuple[float, ...]:
        return tuple(map(max, zip(*(a[name] for a in measured), strict=False)))

    phases = {phase for a in measured for phase in a["phase_peaks"]}
    return {
        "peak_allocated_bytes": most("peak_allocated_bytes"),
        "peak_reserved_bytes": most("peak_reserved_bytes"),
        "non_torch_bytes": most("non_torch_bytes"),
        "num_alloc_retries": most("num_alloc_retries"),
        "phase_peaks": {p: max(a["phase_peaks"].get(p, 0) for a in measured) for p in phases},
        "step_secs": slowest("step_secs"),
        "micro_batch_secs": slowest("micro_batch_secs"),
        "optimizer_secs": most("optimizer_secs"),
    }


def _plain_load(load: Load) -> dict[str, Any]:
    return {"micro_batches": load.micro_batches, "padded_to": load.padded_to}


def _error_line(log_tail: str) -> str:
    """Return the line that names the error, else the last line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return next(iter(reversed(errors or lines)), "ended without a word")


def _python_path() -> str:
    """Return PYTHONPATH with the folder that this package was imported from."""
    own = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
