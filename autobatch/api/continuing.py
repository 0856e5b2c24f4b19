"""From which step a launch goes on, and how an interrupted one is told to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from autobatch.api.inputs import Talk
from autobatch.config import Config
from autobatch.errors import RunError
from autobatch.plan.epochs import Plan, order_hash
from autobatch.training import checkpoints


def first_step(config: Config, run_dir: Path, plan: Plan, talk: Talk) -> int:
    """Return the optimizer steps that the run in a directory has saved; say what is skipped.

    Raises:
        RunError: if no checkpoint is whole, or the newest is of another plan.
    """
    if config.trainer.resume_mode == "disable":
        return 0
    path, skipped = checkpoints.to_resume(run_dir, order_hash=order_hash(plan))
    for message in skipped:
        talk(f"warning: {message}")
    if path is None:
        return 0
    step = checkpoints.read_mark(path).step
    talk(f"continuing after step {step}, from {path}")
    return step


def command_again(
    path: Path,
    config: Config,
    *,
    overrides: Sequence[str],
    on_stale: str,
    torchrun_args: Sequence[str],
) -> str:
    """Return the command that launches the same again, but does not move its run aside."""
    words = ["autobatch", "launch", str(path)]
    words += [word for word in overrides if not word.startswith("trainer.resume_mode=")]
    if config.trainer.resume_mode == "disable":
        words.append("trainer.resume_mode=auto")
    if on_stale != "refuse":
        words += ["--on-stale", on_stale]
    if torchrun_args:
        words += ["--", *torchrun_args]
    return shlex.join(words)


def how_to_go_on(again: str, run_dir: Path, plan: Plan) -> str:
    """Return what the command of `command_again` would do with an interrupted run."""
    try:
        path, _ = checkpoints.to_resume(run_dir, order_hash=order_hash(plan))
    except RunError as error:
        return str(error)
    if path is None:
        return f"nothing was saved yet, so {again} starts it anew"
    return f"{again} continues it after step {checkpoints.read_mark(path).step}"
