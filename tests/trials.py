"""A trial as a record, for tests that need no child."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autobatch.records import Candidate, Load, Toggles, Trial


def trial_of(load: Load, candidate: Candidate | None = None, **changes: Any) -> Trial:
    """Return a measured trial that fitted: two micro-batches of 1 s in each of two steps."""
    trial = Trial(
        trial_id="t001",
        candidate=candidate or Candidate(toggles=Toggles(), max_token_len_per_gpu=100),
        load=load,
        data_parallel_size=1,
        measured=True,
        stand_in_for=None,
        simulated_ranks=None,
        outcome="ok",
        message=None,
        memory_limit_bytes=1000,
        peak_allocated_bytes=10,
        peak_reserved_bytes=10,
        non_torch_bytes=0,
        phase_peaks={},
        step_secs=(2.0, 2.0),
        num_alloc_retries=0,
        seconds=4.0,
        micro_batch_secs=(1.0, 1.0),
        optimizer_secs=0.5,
    )
    return replace(trial, **changes)
