"""Candidates stepped in child processes, seen from the parent: one child tree a toggle set."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.config import candidate_values, save_config, with_values
from autobatch.errors import AutobatchError, ConfigError, RunError
from autobatch.hardware.environment import child_environment, num_cores
from autobatch.jobs import Job, start_ranks
from autobatch.probing.answers import Answers, judge, outcome_of, worst_over_ranks
from autobatch.records import Candidate, Load, Toggles, Trial
from autobatch.storage import append_jsonl, read_jsonl, write_atomic, write_json

POLL_SECS = 0.02
SETTLE_SECS = 1.0  # after one rank failed, the others get this long before they count as stuck
_USER_ERRORS = ("ConfigError", "ModelError")

ASSIGNMENT_FILE = "assignment"  # names the job directory of a child
CHILDREN_FOLDER = "children"  # logs, a folder for each child
MIN_CORES_TO_START_EARLY = 8
NUM_EARLY_CHILDREN = 3  # an import takes as long as about three trials


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


@dataclass(frozen=True, kw_only=True)
class _Child:
    """A started child tree with the folder of its logs."""

    folder: Path
    job: Job


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
        starts_early: bool | None = None,
        trial_prefix: str = "t",
    ) -> None:
        """Keep what all trials share. `memory_limit_bytes`: of every rank, or rank by rank.

        `starts_early`: whether the next toggle set's child imports beside the measurement (None:
        for one process on a GPU's host with cores to spare). With `simulated_ranks` one process
        stands for rank 0 of so many, and `num_ranks` is 1.
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
        self._trial_prefix = trial_prefix
        self._num_trials = 0
        self._num_children = 0
        self._spares: list[_Child] = []
        is_alone = num_ranks == 1 and config.trainer.device == "cuda"
        usual = is_alone and num_cores() >= MIN_CORES_TO_START_EARLY
        self._starts_early = usual if starts_early is None else starts_early
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
        """End the child trees."""
        self._end_child()
        while self._spares:
            self._spares.pop().job.kill(grace_secs=0)

    def _end_child(self) -> None:
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
        trial_id = f"{self._trial_prefix}{self._num_trials:03d}"
        job_dir = self._out_dir / toggle_set_name(candidate.toggles)
        job = self._child(candidate, job_dir)
        append_jsonl(job_dir / "requests.jsonl", {"trial_id": trial_id, **_plain_load(load)})
        answers, timed_out = self._await(job, job_dir, trial_id, began + timeout_secs)
        said = outcome_of(answers)
        is_over = said == "error" or (said == "oom" and self._is_over_after_oom())
        if len(answers) < self._num_ranks or is_over:
            job.kill(grace_secs=0)
        outcome: str
        message: str | None
        if timed_out and outcome_of(answers) == "ok":
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
            **worst_over_ranks(list(answers.values())),
        )

    def _is_over_after_oom(self) -> bool:
        """Alone on the CPU a child goes on after an out-of-memory; others end."""
        is_cuda = self._config.trainer.device == "cuda"
        return self._num_ranks > 1 or self._simulated_ranks is not None or is_cuda

    def _child(self, candidate: Candidate, job_dir: Path) -> Job:
        if self._job is not None and self._toggles == candidate.toggles and self._job.alive():
            return self._job
        self._end_child()
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
        child = self._spares.pop(0) if self._spares else self._start_child()
        if not child.job.alive():
            child = self._start_child()
        write_atomic(child.folder / ASSIGNMENT_FILE, str(job_dir.absolute()))
        self._job, self._toggles = child.job, candidate.toggles
        while self._starts_early and len(self._spares) < NUM_EARLY_CHILDREN:
            self._spares.append(self._start_child())
        return self._job

    def _start_child(self) -> _Child:
        self._num_children += 1
        folder = self._out_dir / CHILDREN_FOLDER / f"{self._num_children:03d}"
        (folder / ASSIGNMENT_FILE).unlink(missing_ok=True)
        job = start_ranks(
            [
                *(sys.executable, "-m", "autobatch.probing.worker"),
                str((folder / ASSIGNMENT_FILE).absolute()),
            ],
            num_ranks=self._num_ranks,
            job_dir=folder,
            env=child_environment(self._num_ranks, device=self._config.trainer.device),
        )
        return _Child(folder=folder, job=job)

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
    folder = out_dir / CHILDREN_FOLDER
    return RunError(f"trial {trial.trial_id} failed: {message}; its log is in {folder}")


def _plain_load(load: Load) -> dict[str, Any]:
    return {"micro_batches": load.micro_batches, "padded_to": load.padded_to}
