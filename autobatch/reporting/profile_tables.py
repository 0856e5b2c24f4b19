"""The facts and the advice of a length profile as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autobatch.records import LengthProfile, SampledRows, TurnByTurn
from autobatch.reporting.tables import fact_table, grid
from autobatch.reporting.words import printable
from autobatch.units import format_count


def profile_facts(profile: LengthProfile) -> Table:
    """Return what was read and how long its rows are."""
    s, turns = profile.length, profile.turn_by_turn
    return fact_table(
        {
            "data": printable(f"{', '.join(profile.data.files)} ({profile.data.format})"),
            "tokenizer": printable(profile.tokenizer),
            "rows": f"{format_count(profile.num_rows)}, of which "
            f"{format_count(profile.num_samples)} rendered{_part(profile)}",
            "skipped": ", ".join(f"{n:,} {why}" for why, n in profile.skipped.items()) or "0",
            "without labels": format_count(profile.num_rows_without_labels),
            "tokens": f"{format_count(profile.num_tokens)}, "
            f"{format_count(profile.num_label_tokens)} of them label tokens",
            "length": f"mean {s.mean:,.1f}  min {s.min:,}  p50 {s.p50:,}  p90 {s.p90:,}  "
            f"p95 {s.p95:,}  p99 {s.p99:,}  max {s.max:,}",
            **({"not counted": ", ".join(profile.media)} if profile.media else {}),
            **({"turn by turn": _turns(turns)} if turns is not None else {}),
            **_errors(profile.sampled),
        }
    )


def _turns(turns: TurnByTurn) -> str:
    return (
        f"{turns.num_rows_differ:,} rows differ from the whole rendering, "
        f"{turns.num_rows_refused:,} are refused; {turns.num_rows_compared:,} of "
        f"{turns.num_rows:,} compared"
    )


def _part(profile: LengthProfile) -> str:
    if profile.sampled is not None:
        return f" (estimated from {format_count(profile.sampled.num_rows_read)} rows)"
    return "" if profile.complete else " (a part of the data only)"


def _errors(sampled: SampledRows | None) -> dict[str, str]:
    if sampled is None:
        return {}
    errors = "  ".join(f"{name} {tokens:,}" for name, tokens in sampled.error_tokens.items())
    return {
        "error at 95 %": f"{errors} tokens; {sampled.num_tokens_error_fraction:.1%} of all tokens"
    }


def profile_advice(profile: LengthProfile) -> Group:
    """Return the cost of each max_length, the advised one with its reason, the warnings."""
    advised = profile.max_length.recommended
    parts: list[RenderableType] = [
        Text("What each max_length costs (padding in % of computed tokens)", style="bold"),
        _curve(profile),
        Text("> no max_length" if advised is None else f"> max_length {advised}", "bold green"),
        Text(profile.max_length.reason),
    ]
    for warning in profile.warnings:
        parts.append(Text(f"\nwarning: {warning.seen}", style="yellow"))
        parts.append(fact_table({"  cause": warning.cause, "  do": warning.next_move}))
    return Group(*parts)


def _curve(profile: LengthProfile) -> Table:
    heads = ("", "max_length", "rows cut", "label tokens lost", "rows without labels")
    table = grid(*heads, "to max_length", "to longest", "sorted", "packed", left=1)
    for option in profile.max_length.curve:
        is_chosen = option.max_length == profile.max_length.recommended
        padding = option.padding_fraction
        table.add_row(
            ">" if is_chosen else "",
            f"{option.max_length}",
            format_count(option.rows_cut),
            format_count(option.label_tokens_lost),
            format_count(option.rows_without_labels),
            *(f"{100 * p:.1f}" for p in (padding.to_max_length, padding.to_longest)),
            *(f"{100 * p:.1f}" for p in (padding.sorted, padding.packed)),
            style="bold green" if is_chosen else None,
        )
    return table


# ---- trials ----------------------------------------------------------------
