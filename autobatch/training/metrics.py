"""metrics.jsonl: one whole row for each optimizer step, a resumed step once."""

from __future__ import annotations

import json
from pathlib import Path

from autobatch.engine.step import StepResult
from autobatch.storage import append_jsonl, read_jsonl, write_atomic
from autobatch.training.loader import LoadedStep

FILE_NAME = "metrics.jsonl"


def cut_back(path: Path, *, num_steps: int) -> None:
    """Keep the rows of the first `num_steps` steps; a checkpoint decides what happened."""
    rows = [row for row in read_jsonl(path) if row["step"] <= num_steps]
    if path.exists():
        write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_row(
    path: Path,
    *,
    step: LoadedStep,
    result: StepResult,
    peak_reserved_bytes: int,
    num_alloc_retries: int,
    learning_rate: float,
    flops: int,
    flops_per_sec: float | None,
) -> None:
    """Append one optimizer step's row. `step` counts from 1, `epoch` from 0.

    `peak_reserved_bytes`: of the worst rank; `num_alloc_retries`: of this one; `flops`: the
    model's, of the step; `flops_per_sec`: the measured bf16 rate of all cards, None where it was
    never measured, and then there is no MFU.
    """
    secs = result.step_secs + step.wait_secs
    append_jsonl(
        path,
        {
            "step": step.plan.index + 1,
            "epoch": step.plan.epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": learning_rate,
            "num_tokens": result.num_tokens,
            "num_label_tokens": result.num_label_tokens,
            "num_micro_batches": len(step.micro_batches),
            "step_secs": result.step_secs,
            "data_wait_secs": step.wait_secs,
            "tokens_per_sec": result.num_tokens / secs,
            "mfu": None if flops_per_sec is None else flops / secs / flops_per_sec,
            "peak_reserved_bytes": peak_reserved_bytes,
            "num_alloc_retries": num_alloc_retries,
        },
    )
