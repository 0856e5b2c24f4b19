"""`autobatch demo`: the whole pipeline on a small example that it makes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autobatch.api.inputs import Talk
from autobatch.api.run_command import RunReport, run
from autobatch.api.tune_command import TuneReport
from autobatch.demo import write_demo
from autobatch.records import LengthProfile, Trial
from autobatch.storage import make_out_dir

NUM_RANKS = 2
MEMORY_LIMIT = "64MiB"  # small enough for the search to meet its end
# One kernel of the loss, so that padding and checkpointing are all tried within the time.
OVERRIDES = ("model.loss_kernel=chunked", "trainer.resume_mode=disable")
SEARCH_SECS = 80.0


def demo(
    *,
    out: str | Path = "demo-out",
    talk: Talk,
    on_profile: Callable[[LengthProfile], None] | None = None,
    on_trial: Callable[[Trial, str], None] | None = None,
    on_tuned: Callable[[TuneReport], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_start: Callable[[int], None] | None = None,
) -> RunReport:
    """Make data, tokenizer and model; profile, tune and train them on two CPU processes.

    Raises:
        AutobatchError: if the folder cannot be written or a stage fails.
    """
    paths = write_demo(make_out_dir(Path(out)))
    talk(f"made {paths.data} and {paths.model}")
    return run(
        [str(paths.data)],
        model=str(paths.model),
        out=out,
        device="cpu",
        num_gpus=NUM_RANKS,
        memory_limit=MEMORY_LIMIT,
        seconds=SEARCH_SECS,
        overrides=[*paths.overrides, *OVERRIDES],
        talk=talk,
        on_profile=on_profile,
        on_trial=on_trial,
        on_tuned=on_tuned,
        on_row=on_row,
        on_start=on_start,
    )
