"""Tables of profiles, trials, verdicts, runs."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autobatch.config import Config
from autobatch.records import Load, Toggles, Trial
from autobatch.units import format_count, format_gib, format_secs

PIPE_COLUMNS = 80
_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}


def as_text(
    renderable: RenderableType, *, columns: int = PIPE_COLUMNS, encoding: str = "utf-8"
) -> str:
    """Return a renderable as plain text; what the encoding lacks is drawn in ASCII or escaped."""
    stream = io.TextIOWrapper(
        io.BytesIO(), encoding=encoding, errors="backslashreplace", newline="\n"
    )
    Console(file=stream, width=columns, color_system=None, force_terminal=False, **_PLAIN).print(
        renderable
    )
    stream.seek(0)
    return "".join(line.rstrip() + "\n" for line in stream.read().splitlines())


def show(renderable: RenderableType, stream: TextIO) -> None:
    """Print a renderable: in colour on a terminal, else as plain text of 80 columns."""
    if stream.isatty():
        Console(file=stream, **_PLAIN).print(renderable)
    else:
        stream.write(as_text(renderable, encoding=getattr(stream, "encoding", None) or "utf-8"))


# ---- profile ---------------------------------------------------------------


def describe_toggles(toggles: Toggles) -> str:
    """Return a toggle set in words: what is on, and what differs from plain training."""
    checkpointing = toggles.gradient_checkpointing
    words = [
        "padding-free" if toggles.use_remove_padding else "padded",
        f"{toggles.loss_kernel} loss",
        f"{checkpointing if checkpointing != 'none' else 'no'} gradient checkpointing",
        f"{toggles.attn_implementation} attention",
    ]
    flags = ("use_liger", "compile", "reshard_after_forward", "cpu_offload")
    return ", ".join([*words, *(flag for flag in flags if getattr(toggles, flag))])


def describe_load(load: Load) -> str:
    """Return the largest micro-batch of a load: `8 x 512` padded, `1,980 tok` packed."""
    rows = max(load.micro_batches, key=lambda lengths: (len(lengths), sum(lengths)), default=())
    if load.padded_to is not None:
        return f"{len(rows)} x {load.padded_to}"
    return f"{max((sum(r) for r in load.micro_batches), default=0):,} tok"


def _size(trial: Trial) -> str:
    size = trial.candidate.size
    if trial.candidate.max_token_len_per_gpu:
        return f"{size:,} tok"
    return f"{size:,} row{'s' if size > 1 else ''}"


def _memory_bytes(trial: Trial) -> int | None:
    if trial.peak_reserved_bytes is None:
        return None
    return trial.peak_reserved_bytes + (trial.non_torch_bytes or 0)


def trial_line(trial: Trial) -> str:
    """Return one trial as one line of talk."""
    said = f": {trial.message}" if trial.message and trial.outcome != "ok" else ""
    return (
        f"{trial.trial_id} {describe_toggles(trial.candidate.toggles)}, {_size(trial)}: "
        f"{trial.outcome}, peak {format_gib(_memory_bytes(trial))}, "
        f"{format_secs(trial.seconds)}{said}"
    )


def trials_table(
    trials: Sequence[Trial], winner_id: str | None, tokens_per_sec: Mapping[str, float]
) -> Group:
    """Return the trials under their toggle sets; `tokens_per_sec` estimates a run, by trial_id."""
    parts: list[RenderableType] = []
    for toggles, group in groupby(trials, key=lambda trial: trial.candidate.toggles):
        heads = ("", "trial", "size", "largest load", "outcome", "peak", "of limit")
        table = grid(*heads, "real tok/s", "evidence", left=2)
        rows = list(group)
        for trial in rows:
            is_winner = trial.trial_id == winner_id
            memory = _memory_bytes(trial)
            table.add_row(
                ">" if is_winner else "",
                trial.trial_id,
                _size(trial),
                describe_load(trial.load),
                trial.outcome,
                format_gib(memory),
                "-" if memory is None else f"{memory / trial.memory_limit_bytes:.1%}",
                _number(tokens_per_sec.get(trial.trial_id)),
                "measured" if trial.measured else "predicted",
                style="bold green" if is_winner else None,
            )
        table.columns[2].min_width = len("131,072 tok")
        parts += [Text(describe_toggles(toggles), style="bold"), table, Text("")]
        parts += [
            Text(f"{t.trial_id}: {t.message}")
            for t in rows
            if t.outcome in ("error", "timeout") and t.message
        ]
    if trials:
        limit = format_gib(trials[-1].memory_limit_bytes)
        parts.append(Text(f"memory limit {limit} a rank" + ("; > winner" if winner_id else "")))
        parts.append(Text("real tok/s: estimated for the whole run, padding not counted"))
    return Group(*parts)


# ---- verdict, run ----------------------------------------------------------


def tuned_summary(config: Config) -> Table:
    """Return the key facts of a tuned config."""
    tuning = config.tuning or {}
    winner, proof = tuning.get("winner") or {}, tuning.get("certificate") or {}
    size = config.data.max_token_len_per_gpu or config.data.micro_batch_size_per_gpu
    key = "max_token_len_per_gpu" if config.data.max_token_len_per_gpu else None
    secs = tuning.get("seconds")
    return fact_table(
        {
            "model": config.model.path or "-",
            "data": ", ".join(config.data.train_files) or _shipped_words(tuning.get("profile")),
            key or "micro_batch_size_per_gpu": format_count(size),
            "train_batch_size": f"{config.data.train_batch_size} rows a step",
            "loss_kernel": config.model.loss_kernel,
            "gradient_checkpointing": config.model.gradient_checkpointing,
            "attn_implementation": config.model.attn_implementation,
            "ranks": f"{tuning.get('data_parallel_size', '-')} on {tuning.get('gpu', '-')}",
            "peak memory": f"{format_gib(winner.get('peak_reserved_bytes'))} of "
            f"{format_gib(tuning.get('memory_limit_bytes'))}, "
            f"{'measured' if winner.get('measured') else 'predicted'}",
            "real tokens/s": f"{_number(tuning.get('tokens_per_sec'))} (estimated)",
            "bound by": str(tuning.get("binding") or "-"),
            "why": str(tuning.get("reason") or "-"),
            "proof": f"{format_count(proof.get('num_micro_batches'))} micro-batches planned, "
            f"the worst {'of any order' if proof.get('covers') == 'any_draw' else 'one'} "
            f"stepped in {proof.get('proven_by') or '-'}",
            "tuned in": "-" if secs is None else format_secs(secs),
        }
    )


def _shipped_words(name: str | None) -> str:
    return f"none: the shipped lengths of {name}" if name else "-"


def run_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the summary of a finished run from its metrics rows."""
    secs = sum(_finite(r.get("step_secs")) + _finite(r.get("data_wait_secs")) for r in rows)
    speeds = [r["tokens_per_sec"] for r in rows if _is_number(r.get("tokens_per_sec"))]
    peaks = [r["peak_reserved_bytes"] for r in rows if _is_number(r.get("peak_reserved_bytes"))]
    first, last = (rows[0], rows[-1]) if rows else ({}, {})
    return fact_table(
        {
            "steps": format_count(len(rows)),
            "loss": f"{_number(first.get('loss'), 4)} first, {_number(last.get('loss'), 4)} last",
            "median tokens/s": _number(median(speeds) if speeds else None),
            "peak memory": format_gib(max(peaks, default=None)),
            "alloc retries": format_count(
                sum(int(_finite(r.get("num_alloc_retries"))) for r in rows)
            ),
            "time in steps": format_secs(secs),
        }
    )


# ---- pieces ----------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _finite(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


def _number(value: Any, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}" if _is_number(value) else "-"


def fact_table(facts: Mapping[str, str]) -> Table:
    """Return names with their values, one a line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def grid(*heads: str, left: int) -> Table:
    """Return an empty table: the first `left` columns of words, the others of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for place, head in enumerate(heads):
        table.add_column(
            head,
            justify="left" if place < left else "right",
            overflow="fold",
            min_width=max((len(word) for word in head.split()), default=1),
        )
    return table
