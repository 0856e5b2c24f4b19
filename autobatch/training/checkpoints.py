"""Checkpoints of a run: written whole, found again, thinned out."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from autobatch.errors import AutobatchError, RunError
from autobatch.storage import read_json, write_json

MARKER = "complete.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointMark:
    """What a complete checkpoint says of itself."""

    step: int  # optimizer steps done
    order_hash: str  # the order and grouping of samples; the same for any ranks and cut
    num_ranks: int
    file_bytes: dict[str, int]  # every file and its size


def directory_of(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` optimizer steps."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def partial_directory_of(run_dir: Path, step: int) -> Path:
    """Return where a checkpoint is written before it is whole."""
    return run_dir / "checkpoints" / f".partial_step_{step:08d}"


def prepare(run_dir: Path, step: int) -> Path:
    """Return an empty directory to write a checkpoint in; rank 0 calls it."""
    partial = partial_directory_of(run_dir, step)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def complete(run_dir: Path, *, step: int, order_hash: str, num_ranks: int) -> Path:
    """Turn a written partial checkpoint into a complete one; rank 0 calls it after all wrote."""
    partial, final = partial_directory_of(run_dir, step), directory_of(run_dir, step)
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    mark = CheckpointMark(
        step=step, order_hash=order_hash, num_ranks=num_ranks, file_bytes=_file_bytes(partial)
    )
    write_json(partial / MARKER, mark)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return final


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint and a sentence for each damaged newer one."""
    skipped: list[str] = []
    folder = run_dir / "checkpoints"
    for path in sorted(folder.glob("step_*"), reverse=True) if folder.is_dir() else ():
        fault = fault_of(path)
        if fault is None:
            return path, skipped
        skipped.append(f"{path} is skipped: {fault}")
    return None, skipped


def read_mark(path: Path) -> CheckpointMark:
    """Return the mark of a complete checkpoint."""
    value = read_json(path / MARKER)
    return CheckpointMark(**{key: value[key] for key in CheckpointMark.__annotations__})


def fault_of(path: Path) -> str | None:
    """Return what is wrong with a checkpoint directory, None if it is whole."""
    try:
        mark = read_mark(path)
    except (AutobatchError, KeyError, TypeError):
        return f"it has no readable {MARKER}"
    found = _file_bytes(path)
    for name, num_bytes in mark.file_bytes.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != num_bytes:
            return f"{name} has {found[name]} of {num_bytes} bytes"
    return None


def thin_out(run_dir: Path, *, most: int | None) -> None:
    """Keep the newest `most` whole checkpoints (None: all that is there).

    Damaged ones count for nothing; those older than the newest whole one go too.
    """
    if most is None:
        return
    paths = sorted((run_dir / "checkpoints").glob("step_*"))
    whole = [path for path in paths if fault_of(path) is None]
    for path in paths:
        if whole and path < whole[-1] and path not in whole[-most:]:
            shutil.rmtree(path)


def to_resume(run_dir: Path, *, order_hash: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to go on from (None: start at the first step), and what was skipped.

    Raises:
        RunError: if checkpoints exist but none is whole, or the newest is of another plan.
    """
    path, skipped = newest(run_dir)
    if path is None:
        if skipped:
            raise RunError(
                f"no checkpoint in {run_dir / 'checkpoints'} is whole ({skipped[0]}); restore one, "
                "or start anew with trainer.resume_mode=disable"
            )
        return None, skipped
    if read_mark(path).order_hash != order_hash:
        raise RunError(
            f"{path} was trained on other data, another seed or another train_batch_size; "
            "choose another trainer.output_dir, or start anew with trainer.resume_mode=disable"
        )
    return path, skipped


def _file_bytes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }
