"""A config as a running torchrun job, and how it ends."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autobatch.config import TUNABLE_KEYS, Config, load_config, resolve
from autobatch.errors import AutobatchError, ConfigError, NothingFitsError, RunError, StaleError
from autobatch.hardware.environment import child_environment
from autobatch.jobs import Job, exclusive, start_process
from autobatch.records import Trial
from autobatch.reporting import MetricsTail
from autobatch.storage import METRICS_FILE, TRIALS_FILE, append_jsonl, read_json, read_jsonl
from autobatch.training import checkpoints

CONFIG_FILE = "config.yaml"
_ERROR_FILE = "error.json"
_LOG_FILE = "train.log"
_POLL_SECS = 0.1
_ERRORS = {3: NothingFitsError, 4: StaleError}

_EXPORTED = ("config.json", "adapter_config.json")  # one of them: full weights, or an adapter

# A run may be continued with these changed; the rest is compared and told.
_FREE_KEYS = {
    *TUNABLE_KEYS,
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.resume_mode",
    "trainer.output_dir",
    "trainer.logger",
    "trainer.device",
    "trainer.nproc_per_node",
    "trainer.nnodes",
}
# These make another run: its checkpoints cannot be continued.
_SCHEDULE_KEYS = ("trainer.total_training_steps", "trainer.total_epochs")
_FIXED_KEYS = ("model.path", "model.init", "model.lora_rank", "engine.state_dtype")


def torchrun_command(
    config: Config,
    run_dir: Path,
    *,
    cache_dir: Path,
    memory_limit_bytes: int,
    torchrun_args: Sequence[str] = (),
) -> list[str]:
    """Return the command that trains; on one node torchrun takes a free port by itself."""
    trainer = config.trainer
    placed = [f"--nproc-per-node={trainer.nproc_per_node}"]
    if trainer.nnodes > 1 or torchrun_args:
        placed.append(f"--nnodes={trainer.nnodes}")
    else:
        placed.append("--standalone")
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *placed,
        *torchrun_args,
        "-m",
        "autobatch.training",
        str(run_dir),
        f"--cache-dir={cache_dir}",
        f"--memory-limit-bytes={memory_limit_bytes}",
    ]


def shell_line(config: Config, argv: Sequence[str]) -> str:
    """Return the command with the variables of its processes as one line for a shell."""
    variables = child_environment(config.trainer.nproc_per_node, device=config.trainer.device)
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *argv])


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A finished run."""

    run_dir: Path
    hf_dir: Path
    num_steps: int
    start_step: int  # optimizer steps that the continued checkpoint held, 0 for a new run
    seconds: float


def check_continues(config: Config, run_dir: Path) -> list[str]:
    """Return a sentence for each setting that changed since the run in `run_dir` was started.

    Raises:
        ConfigError: if the run there cannot be continued with this config.
    """
    path = run_dir / CONFIG_FILE
    if config.trainer.resume_mode == "disable" or not path.exists():
        return []
    before, now = _settings(resolve(load_config(path))), _settings(config)
    changed = [k for k in now if k not in _FREE_KEYS and now[k] != before.get(k)]
    fixed = [key for key in changed if key in _FIXED_KEYS]
    if fixed:
        key = fixed[0]
        raise ConfigError(
            f"{run_dir} holds a run with {key}={before.get(key)}, now it is {now[key]}; choose "
            "another trainer.output_dir, or trainer.resume_mode=disable to move the old run aside"
        )
    return [
        f"the run goes on with {k}={_word(now[k])}, before it was {_word(before.get(k))}"
        + ("; the learning rate's schedule changes with it" if k in _SCHEDULE_KEYS else "")
        for k in changed
    ]


def _word(value: object) -> str:
    return "not set" if value is None else str(value)


def move_aside(run_dir: Path) -> Path | None:
    """Rename a run that is not to be continued, and return its new place; None if none is there."""
    if not (run_dir / CONFIG_FILE).exists():
        return None
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)
    return aside


def holds_run(run_dir: Path) -> bool:
    """Return whether a training was ever started there."""
    return any((run_dir / name).exists() for name in (_LOG_FILE, METRICS_FILE, "checkpoints"))


def keep_proof(trial: Trial, probes: Path | None, run_dir: Path) -> None:
    """Put the trial that proves a run, with the folder of its probe, into the run directory."""
    assert probes is not None
    run_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(run_dir / "probes", ignore_errors=True)
    shutil.move(probes, run_dir / "probes")
    append_jsonl(run_dir / TRIALS_FILE, trial)


def is_finished(run_dir: Path, *, num_steps: int) -> bool:
    """Return whether the run there made its last step and exported its model."""
    rows = list(read_jsonl(run_dir / METRICS_FILE))
    return (
        checkpoints.fault_of(checkpoints.directory_of(run_dir, num_steps)) is None
        and any((run_dir / "hf" / name).exists() for name in _EXPORTED)
        and bool(rows)
        and rows[-1]["step"] == num_steps
    )


def run_job(
    config: Config,
    run_dir: Path,
    *,
    cache_dir: Path,
    memory_limit_bytes: int,
    num_steps: int,
    start_step: int,
    torchrun_args: Sequence[str] = (),
    on_row: Callable[[dict[str, Any]], None],
) -> RunResult:
    """Train in a child job and follow its metrics; `start_step` steps were done before.

    The caller holds the run directory's lock and wrote this config there.

    Raises:
        RunError: with the first failing rank's own words; NothingFitsError if it ran out of
            memory; StaleError if the plan is not the certified one.
    """
    began = time.monotonic()
    (run_dir / _ERROR_FILE).unlink(missing_ok=True)
    argv = torchrun_command(
        config,
        run_dir,
        cache_dir=cache_dir,
        memory_limit_bytes=memory_limit_bytes,
        torchrun_args=torchrun_args,
    )
    tail = MetricsTail(run_dir / METRICS_FILE, skip_present=True)

    def tell_new_rows() -> None:
        for row in tail.read():
            if row["step"] > start_step:
                on_row(row)

    with start_process(
        argv,
        job_dir=run_dir,
        env=child_environment(config.trainer.nproc_per_node, device=config.trainer.device),
        log_name=_LOG_FILE,
        capture=True,
    ) as job:
        while job.alive():
            tell_new_rows()
            time.sleep(_POLL_SECS)
        tell_new_rows()
        _raise_failure(job, run_dir)
    return RunResult(
        run_dir=run_dir,
        hf_dir=run_dir / "hf",
        num_steps=num_steps,
        start_step=start_step,
        seconds=time.monotonic() - began,
    )


def beside(run_dir: Path, ending: str) -> Path:
    """Return a hidden place next to a run directory, the same by whatever path it is named."""
    place = run_dir.resolve()
    return place.with_name(f".{place.name}.{ending}")


def locked(run_dir: Path) -> AbstractContextManager[None]:
    """Keep other launches out of a run directory, there or not.

    The lock lies beside it, so that it stays when the directory is renamed.

    Raises:
        RunError: on entering, if another launch holds it.
    """
    return exclusive(
        beside(run_dir, "lock"),
        refusal=f"another launch is running in {run_dir}; wait for it, or choose another "
        "trainer.output_dir",
    )


def _raise_failure(job: Job, run_dir: Path) -> None:
    ending = job.ended()
    assert ending is not None
    if not any(ending.exit_codes):
        return
    log = run_dir / _LOG_FILE
    try:
        error = read_json(run_dir / _ERROR_FILE)
    except AutobatchError:
        code = next(code for code in ending.exit_codes if code)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if ending.killed_by_kernel:
            how += ", killed by the kernel because the host's memory ran out"
        last = next((line for line in reversed(ending.log_tail.splitlines()) if line.strip()), "")
        raise RunError(f"training failed ({how}): {last.strip()}; its log is {log}") from None
    kind = _ERRORS.get(error["exit_code"], RunError)
    raise kind(f"{error['message']} (rank {error['rank']}; log: {log})")


def _settings(config: Config) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    values.pop("tuning")
    values.pop("schema_version")
    return {f"{s}.{k}": v for s, section in values.items() for k, v in section.items()}
