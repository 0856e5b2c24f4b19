"""`autobatch launch`: a tuned config as a finished run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autobatch import launching
from autobatch.api.certifying import Proven, certified, check_on_stale
from autobatch.api.continuing import command_again, first_step, how_to_go_on
from autobatch.api.inputs import (
    Inputs,
    RowProgress,
    Talk,
    check_inputs,
    left_out,
    read_inputs,
)
from autobatch.config import Config, candidate_of, load_config, resolve, save_config
from autobatch.dataset.tokens.truncation import cut_lengths
from autobatch.errors import StaleError
from autobatch.hardware.environment import num_cores
from autobatch.hardware.limit import cpu_memory_limit, gpu_memory_limit
from autobatch.hardware.present import present_gpus
from autobatch.plan.epochs import Plan, num_steps
from autobatch.preflight.batch import arithmetic
from autobatch.preflight.rule import warnings_or_raise
from autobatch.preflight.run import check_run
from autobatch.storage import DEFAULT_OUT, TUNED_FILE
from autobatch.tuning.evidence import read_evidence
from autobatch.units import format_gib, format_secs


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """What a launch did: the command it ran or would run, and the finished run if there is one."""

    command: str
    run_dir: Path
    hf_dir: Path
    num_steps: int
    start_step: int
    finished: bool  # False: nothing was started
    seconds: float


def launch(
    config: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    out: str | Path = DEFAULT_OUT,
    torchrun_args: Sequence[str] = (),
    dry_run: bool = False,
    print_command: bool = False,
    on_stale: str = "refuse",
    talk: Talk,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_start: Callable[[int], None] | None = None,
    progress: RowProgress | None = None,
) -> LaunchReport:
    """Check a tuned config against what is here, then train it, or continue its run.

    `dry_run` starts and writes nothing. `print_command` trains nothing either, but proves the
    config and writes it to the run directory, so that the report's command can be run.
    `on_start` is told the number of optimizer steps, `on_row` each row of metrics.jsonl.

    Raises:
        AutobatchError: if a check refuses or training fails; StaleError if the config no longer
            describes the data or the machine; NothingFitsError if it ran out of memory.
    """
    check_on_stale(on_stale)
    path = Path(config) if config is not None else Path(out) / TUNED_FILE
    loaded = load_config(path, overrides)
    resolved = resolve(loaded)
    inputs = read_inputs(resolved, progress=progress)
    ranks = resolved.trainer.nproc_per_node * resolved.trainer.nnodes
    plan = inputs.plan(candidate_of(resolved), num_ranks=ranks)
    steps = num_steps(plan)
    _introduce(path, inputs, plan, talk)
    run_dir = Path(resolved.trainer.output_dir)
    for message in [
        *check_inputs(inputs, plan, needs_weights=True),
        *(
            finding.message
            for finding in warnings_or_raise(
                check_run(
                    resolved,
                    run_dir,
                    num_cores=num_cores(),
                    num_gpus=_num_gpus(resolved),
                    torchrun_args=torchrun_args,
                )
            )
        ),
    ]:
        talk(f"warning: {message}")
    with nullcontext() if dry_run else launching.locked(run_dir):
        changes = launching.check_continues(resolved, run_dir)
        for message in changes:
            talk(f"warning: {message}")
        start_step = first_step(resolved, run_dir, plan, talk)
        if resolved.trainer.save_freq < 1:
            talk(
                "nothing is saved before the last step (trainer.save_freq=-1), so a run that is "
                "cut off starts anew; trainer.save_freq=50 saves every 50 steps"
            )
        starts_anew = resolved.trainer.resume_mode == "disable"
        is_done = not starts_anew and launching.is_finished(run_dir, num_steps=steps)
        keeps_config = is_done or (print_command and launching.holds_run(run_dir))
        proof = certified(
            loaded,
            inputs,
            plan,
            run_dir=run_dir,
            on_stale=on_stale,
            dry_run=dry_run or keeps_config,
            talk=talk,
        )
        resolved = resolve(proof.config)
        limit = _memory_limit(resolved, talk)
        assert inputs.profile.cache_dir is not None
        cache_dir = Path(inputs.profile.cache_dir)
        argv = launching.torchrun_command(
            resolved,
            run_dir,
            cache_dir=cache_dir,
            memory_limit_bytes=limit,
            torchrun_args=torchrun_args,
        )
        report = LaunchReport(
            command=launching.shell_line(resolved, argv),
            run_dir=run_dir,
            hf_dir=run_dir / "hf",
            num_steps=steps,
            start_step=start_step,
            finished=False,
            seconds=0.0,
        )
        if dry_run:
            return report
        if print_command:
            if keeps_config:
                talk(
                    f"warning: {run_dir} holds a run, so the command continues it under the "
                    "config there; choose another trainer.output_dir for another run"
                )
            else:
                _keep(proof, run_dir)
            return report
        if starts_anew:
            aside = launching.move_aside(run_dir)
            if aside is not None:
                talk(f"the run in {run_dir} was moved to {aside}")
        if is_done:
            talk(
                f"the run in {run_dir} has made all its {steps} steps; nothing to do "
                "(trainer.resume_mode=disable starts anew, and keeps the old run beside it)"
            )
            if changes:
                talk("warning: the finished run does not have the changed settings")
            return replace(report, finished=True, start_step=steps)
        if on_start is not None:
            on_start(steps)
        _keep(proof, run_dir)
        try:
            result = launching.run_job(
                resolved,
                run_dir,
                cache_dir=cache_dir,
                memory_limit_bytes=limit,
                num_steps=steps,
                start_step=start_step,
                torchrun_args=torchrun_args,
                on_row=on_row or (lambda row: None),
            )
        except KeyboardInterrupt as interrupt:
            again = command_again(
                path, resolved, overrides=overrides, on_stale=on_stale, torchrun_args=torchrun_args
            )
            interrupt.add_note(how_to_go_on(again, run_dir, plan))
            raise
        return replace(report, finished=True, seconds=result.seconds)


def _keep(proof: Proven, run_dir: Path) -> None:
    """Write what a training reads, and the proof that it fits."""
    if proof.trial is not None:
        launching.keep_proof(proof.trial, proof.probes, run_dir)
    save_config(proof.config, run_dir / launching.CONFIG_FILE)


def _introduce(path: Path, inputs: Inputs, plan: Plan, talk: Talk) -> None:
    age = time.time() - path.stat().st_mtime
    config = inputs.config
    talk(
        f"{path} ({format_secs(max(0.0, age))} old): model {config.model.path}, "
        f"data {', '.join(config.data.train_files)}"
    )
    cut = cut_lengths(
        inputs.cache, max_length=config.data.max_length, truncation=config.data.truncation
    )
    for words in left_out(inputs.cache, cut):
        talk(words)
    talk(arithmetic(plan))


def _memory_limit(config: Config, talk: Talk) -> int:
    """Return the limit the config was proven at, or what is here if that is enough."""
    if config.trainer.device == "cuda":
        here = min(
            gpu_memory_limit(card=card, named=None, memory_limit_bytes=None, headroom_bytes=0)
            for card in present_gpus()[: config.trainer.nproc_per_node]
        )
    else:
        here = cpu_memory_limit(
            num_local_ranks=config.trainer.nproc_per_node, memory_limit_bytes=None
        )
    evidence = read_evidence(config)
    if evidence is None:
        return here
    limit, winner = evidence.memory_limit_bytes, evidence.winner
    if limit <= here:
        return limit
    needed = (winner.peak_reserved_bytes or 0) + (winner.non_torch_bytes or 0)
    if needed > here:
        raise StaleError(
            f"the tuned config needs {format_gib(needed)} a rank, here are {format_gib(here)}; "
            "free memory, or tune again"
        )
    talk(
        f"memory: tuned under {format_gib(limit)}, here are {format_gib(here)}; the worst "
        f"micro-batch takes {format_gib(needed)}"
    )
    return here


def _num_gpus(config: Config) -> int:
    return len(present_gpus()) if config.trainer.device == "cuda" else 0
