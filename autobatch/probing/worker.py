"""The child that steps requested loads on one rank: `python -m autobatch.probing.worker FILE`.

It may be started early: it waits for FILE, which names its job directory. There it finds
config.yaml (the toggles), job.json (limits) and requests.jsonl, which it follows; it answers
every request with one line of rank<RANK>.jsonl. It goes on until it is killed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autobatch.config import Config, load_config, resolve
from autobatch.engine.build import Engine, build
from autobatch.engine.device import Device, claim
from autobatch.engine.step import StepResult, optimizer_step
from autobatch.engine.tensors import make_tensors, random_rows
from autobatch.jobs import end_with_launcher
from autobatch.oom import out_of_memory_kind
from autobatch.storage import append_jsonl, read_json, read_jsonl

# The first allocates the optimizer's state, the second peaks with it; on CUDA kernels are still
# made and memory is still mapped in the second, so the third is the one that is timed.
NUM_STEPS = {"cpu": 2, "cuda": 3}
ASSIGNMENT_POLL_SECS = 0.02
LEARNING_RATE = 0.0  # random weights stay as they are: memory and time do not depend on it


def main(assignment: Path) -> int:
    """Answer requests until it is killed, or one cannot be answered; return the exit code."""
    end_with_launcher()
    while not assignment.exists():
        time.sleep(ASSIGNMENT_POLL_SECS)
    job_dir = Path(assignment.read_text(encoding="utf-8"))
    rank = int(os.environ.get("RANK", 0))
    answers = job_dir / f"rank{rank}.jsonl"
    try:
        job = read_json(job_dir / "job.json")
        config = resolve(load_config(job_dir / "config.yaml"))
        limits = job["memory_limit_bytes"]  # one for all, or one for each rank
        limit_bytes = limits[rank] if isinstance(limits, list) else limits
        requests = _follow(job_dir / "requests.jsonl", poll_secs=job["poll_secs"])
        ranks = job["simulated_ranks"]
        with claim(config, memory_limit_bytes=limit_bytes, simulated_ranks=ranks) as device:
            return _serve(requests, config, device, answers)
    except Exception as error:
        traceback.print_exc()
        append_jsonl(answers, {"trial_id": None, **_failure(error)})
        return 1


def _serve(
    requests: Iterator[dict[str, Any]], config: Config, device: Device, answers: Path
) -> int:
    engine: Engine | None = None
    for request in requests:
        outcome: dict[str, Any] = {"outcome": "ok", "message": None}
        steps: list[StepResult] = []
        device.release_cache()
        device.reset_peaks()
        try:
            if engine is None:
                engine = build(config, device, random_init=True)
                device.reset_peaks()  # a new engine and a used one give the same peaks
            _step(engine, request, steps)
        except Exception as error:
            if out_of_memory_kind(error) is None:
                traceback.print_exc()
            outcome = _failure(error)
        # Out here the error is gone, and with it the frames that held half a step's tensors.
        append_jsonl(
            answers,
            {"trial_id": request["trial_id"], **outcome, **_measured(device, steps)},
        )
        if outcome["outcome"] == "error":
            return 1
        if outcome["outcome"] == "oom":
            if device.world_size > 1 or device.torch_device.type == "cuda":
                # Others may wait in a collective for ever, a CUDA context may be broken: no
                # good-byes.
                sys.stderr.flush()
                os._exit(0)
            engine = None  # a step broken off leaves FSDP's hooks half-run
            gc.collect()
    return 0


def _step(engine: Engine, request: dict[str, Any], steps: list[StepResult]) -> None:
    """Append the results of the steps one by one, so that those before an error are kept."""
    generator = np.random.Generator(np.random.PCG64(engine.config.data.seed))
    vocab_size = engine.module.causal_lm.config.vocab_size
    micro_batches = [
        make_tensors(
            random_rows(lengths, vocab_size=vocab_size, generator=generator),
            padded_to=request["padded_to"],
        )
        for lengths in request["micro_batches"]
    ]
    for _ in range(NUM_STEPS[engine.device.torch_device.type]):
        steps.append(optimizer_step(engine, micro_batches, learning_rate=LEARNING_RATE))


def _measured(device: Device, steps: list[StepResult]) -> dict[str, Any]:
    use = device.memory_use()
    return {
        "peak_allocated_bytes": use.peak_allocated_bytes,
        "peak_reserved_bytes": use.peak_reserved_bytes,
        "non_torch_bytes": use.non_torch_bytes,
        "num_alloc_retries": use.num_alloc_retries,
        "phase_peaks": use.phase_peaks,
        "step_secs": [step.step_secs for step in steps],
        "micro_batch_secs": steps[-1].micro_batch_secs if steps else [],
        "optimizer_secs": steps[-1].optimizer_secs if steps else None,
    }


def _failure(error: Exception) -> dict[str, Any]:
    kind = out_of_memory_kind(error)
    words = str(error).strip().splitlines()
    name, first = type(error).__name__, words[0] if words else ""
    return {
        "outcome": "error" if kind is None else "oom",
        "message": f"{name}: {first}" if first else name,
        "failed_at": time.time(),  # of several ranks, the first to fail has the reason
    }


def _follow(path: Path, *, poll_secs: float) -> Iterator[dict[str, Any]]:
    """Yield the lines of a growing file, for ever."""
    num_read = 0
    while True:
        for request in list(read_jsonl(path))[num_read:]:
            num_read += 1
            yield request
        time.sleep(poll_secs)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
