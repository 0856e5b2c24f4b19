"""What the ranks of a trial said, as one outcome with one set of measurements."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

from autobatch.jobs import Ending
from autobatch.oom import out_of_memory_kind_of_text

_ERROR_LINE = re.compile(r"^(?:\[\w+\]:\s*)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")

Answers = dict[int, dict[str, Any]]  # by rank


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


def outcome_of(answers: Answers) -> str:
    """Return the outcome that the answers so far amount to: ok, oom or error."""
    outcomes = {a["outcome"] for a in answers.values()}
    return next((o for o in ("oom", "error") if o in outcomes), "ok")


def worst_over_ranks(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def _error_line(log_tail: str) -> str:
    """Return the line that names the error, else the last line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return next(iter(reversed(errors or lines)), "ended without a word")
