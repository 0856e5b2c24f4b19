"""Each command's result as a record for --json and as what people read."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autobatch.api import GpusReport, LaunchReport, RunReport, TuneReport
from autobatch.records import Trial, fits
from autobatch.reporting import (
    named_gpus_table,
    present_gpus_table,
    read_metrics,
    read_tuned,
    run_table,
    trial_line,
    trials_table,
    tuned_summary,
)
from autobatch.storage import to_plain


def tune_record(report: TuneReport) -> dict[str, Any]:
    """Return the fields of DESIGN for `tune --json`."""
    result = report.result

    def with_speed(trial: Trial) -> dict[str, Any]:
        speed = result.tokens_per_sec.get(trial.trial_id)
        return {**to_plain(trial), "fits": fits(trial), "tokens_per_sec": speed}

    return {
        "stopped_by": result.stopped_by,
        "gpu": report.gpu,
        "data_parallel_size": report.data_parallel_size,
        "memory_limit_bytes": report.memory_limit_bytes,
        "winner": with_speed(result.winner),
        "reason": result.reason,
        "binding": result.binding,
        "trials": [with_speed(trial) for trial in result.trials],
        "certificate": to_plain(report.certificate),
        "seconds": result.seconds,
        "searched": to_plain(result.searched),
        "left_out": result.left_out,
        "path": str(report.path),
    }


def tune_view(report: TuneReport) -> RenderableType:
    """Return the trials and the verdict."""
    result, config = report.result, read_tuned(report.path)
    needs_data = "" if config.data.train_files else " data.train_files=[FILE]"
    num_tried = len({trial.candidate.toggles for trial in result.trials})
    cut_short = ""
    if num_tried < len(result.searched):
        cut_short = "; more --seconds would try the rest"
    elif result.stopped_by == "time":
        cut_short = "; more --seconds would try larger sizes"
    return Group(
        Text(f"{num_tried} of {len(result.searched)} toggle sets were stepped{cut_short}"),
        *(
            [Text("warning: the time ended first, so the winner is provisional")]
            if cut_short
            else []
        ),
        trials_table(result.trials, result.winner.trial_id, result.tokens_per_sec),
        *(Text(f"{key} not tried: {why}") for key, why in result.left_out.items()),
        Text(""),
        tuned_summary(config),
        Text(f"\nwritten: {report.path}   next: autobatch launch {report.path}{needs_data}"),
    )


def probe_record(trial: Trial) -> dict[str, Any]:
    """Return the trial with what is derived from it."""
    return {
        **to_plain(trial),
        "tokens_per_sec": _trial_tokens_per_sec(trial),
        "mfu": None,
        "fits": fits(trial),
    }


def probe_view(trial: Trial) -> RenderableType:
    """Return the trial in a few lines."""
    speed = _trial_tokens_per_sec(trial)
    words = "-" if speed is None else f"{speed:,.0f}"
    return Text(
        f"{trial_line(trial)}\nfits: {'yes' if fits(trial) else 'no'}, measured; "
        f"real tokens/s of the second step: {words}"
    )


def launch_record(report: LaunchReport) -> dict[str, Any]:
    """Return what the launch did, with the last row of its metrics."""
    rows = read_metrics(report.run_dir) if report.finished else ()
    return {**_plain_launch(report), "last": rows[-1] if rows else None}


def launch_view(report: LaunchReport) -> RenderableType:
    """Return the summary of a finished run."""
    return Group(
        run_table(read_metrics(report.run_dir)),
        Text(f"model: {report.hf_dir}   metrics: {report.run_dir / 'metrics.jsonl'}"),
    )


def run_record(report: RunReport) -> dict[str, Any]:
    """Return the records of the three stages."""
    return {
        "profile": to_plain(report.profile),
        "tune": tune_record(report.tuned),
        "launch": launch_record(report.launched),
    }


def run_view(report: RunReport) -> RenderableType:
    """Return the summary of the run; profile and verdict were shown as they came."""
    return launch_view(report.launched)


def gpus_record(report: GpusReport) -> dict[str, Any]:
    """Return the named cards and the present ones, each with the name it matches."""
    present = [
        {**to_plain(card), "named": match}
        for card, match in zip(report.present, report.matches, strict=True)
    ]
    return {"named": to_plain(report.named), "present": present, "driver": report.driver}


def gpus_view(report: GpusReport) -> RenderableType:
    """Return both as tables."""
    return Group(
        named_gpus_table(report.named),
        Text(""),
        present_gpus_table(report.present, report.matches, report.driver),
    )


def _plain_launch(report: LaunchReport) -> dict[str, Any]:
    return {
        "command": report.command,
        "run_dir": str(report.run_dir),
        "hf_dir": str(report.hf_dir),
        "num_steps": report.num_steps,
        "start_step": report.start_step,
        "finished": report.finished,
        "seconds": report.seconds,
    }


def _trial_tokens_per_sec(trial: Trial) -> float | None:
    if not trial.step_secs:
        return None
    tokens = sum(sum(lengths) for lengths in trial.load.micro_batches)
    return tokens * trial.data_parallel_size / trial.step_secs[-1]
