"""Say in warnings what a profile met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autobatch.dataset.turns import Tally
from autobatch.records import MaxLengthAdvice, ProfileWarning

_MUCH_PADDING = 0.3  # share of computed tokens worth a warning


def nothing_left(tally: Tally, *, num_samples: int, where: str) -> str:
    """Return the one sentence for a data set without a single label token."""
    if not tally.num_rows:
        return f"{where} has no rows; give a file with data"
    if num_samples:
        return (
            f"none of {num_samples} rows of {where} has a label token, so nothing can be learned: "
            "there is no assistant turn, or the chat template hides it; check the columns"
        )
    roles = f"; unknown roles: {_counts(tally.unknown_roles)}" if tally.unknown_roles else ""
    refusal = f" ({tally.refusal})" if tally.refusal else ""
    return (
        f"no row of {where} can be used: {_counts(tally.skipped)}{refusal}{roles}; "
        "correct the rows or name other columns"
    )


def warnings_of(
    tally: Tally,
    *,
    num_rows_without_labels: int,
    advice: MaxLengthAdvice,
    has_eos: bool,
    needs_eos: bool,
    media: Sequence[str],
) -> tuple[ProfileWarning, ...]:
    """Return the warnings of a profile, gravest first."""
    found = [
        *_label_warnings(tally, num_rows_without_labels),
        *_row_warnings(tally),
        *_padding_warnings(advice),
    ]
    if needs_eos and not has_eos:
        found.append(
            ProfileWarning(
                id="no_eos",
                seen="the tokenizer names no eos_token, so rows end without one",
                cause="eos_token is missing in tokenizer_config.json",
                next_move="set eos_token there, or the model never learns to stop",
            )
        )
    if media:
        found.append(
            ProfileWarning(
                id="media_columns",
                seen=f"columns {', '.join(media)} hold media, which no length here counts",
                cause="the data set is for a model that sees or hears",
                next_move="take the lengths as a lower bound, or train on the text only",
            )
        )
    return tuple(found)


def _label_warnings(tally: Tally, num_rows_without_labels: int) -> list[ProfileWarning]:
    found = []
    if tally.num_labels_not_found:
        found.append(
            ProfileWarning(
                id="labels_not_found",
                seen=f"{tally.num_labels_not_found} rows have assistant turns whose place in the "
                "rendered text could not be told",
                cause="the chat template changes or moves earlier turns",
                next_move="these rows are left out of training; use one prompt and one response, "
                "or correct the template",
            )
        )
    others = num_rows_without_labels - tally.num_labels_not_found
    if others > 0:
        found.append(
            ProfileWarning(
                id="rows_without_labels",
                seen=f"{others} rows have no label token",
                cause="they hold no assistant turn, or a single token",
                next_move="nothing: they count in lengths but are left out of training",
            )
        )
    return found


def _row_warnings(tally: Tally) -> list[ProfileWarning]:
    found = []
    for reason, count in tally.skipped.most_common():
        rows = ", ".join(str(number) for number, _, _ in tally.examples[reason])
        more = ", ..." if count > len(tally.examples[reason]) else ""
        refused = reason.startswith("template") and tally.refusal
        found.append(
            ProfileWarning(
                id="rows_skipped",
                seen=f"{count} of {tally.num_rows} rows skipped: {reason} (rows {rows}{more})",
                cause=tally.refusal if refused and tally.refusal else reason,
                next_move="correct or remove these rows, counted from 0 over all files",
            )
        )
    if tally.unknown_roles:
        found.append(
            ProfileWarning(
                id="unknown_roles",
                seen=f"unknown roles: {_counts(tally.unknown_roles)}",
                cause="these turns are tagged in no known way, so the template may leave them out",
                next_move="rename them to user, assistant, system or tool",
            )
        )
    if tally.dropped_parts:
        found.append(
            ProfileWarning(
                id="dropped_parts",
                seen=f"content parts left out: {_counts(tally.dropped_parts)}",
                cause="they are no text, reasoning or tool call",
                next_move="take the lengths as a lower bound, or write these parts as text",
            )
        )
    if len(tally.argument_kinds) > 1:
        found.append(
            ProfileWarning(
                id="mixed_tool_arguments",
                seen=f"tool call arguments are given both ways: {_counts(tally.argument_kinds)}",
                cause="rows of several sources were joined",
                next_move="write all arguments as objects, or all as JSON text",
            )
        )
    return found


def _padding_warnings(advice: MaxLengthAdvice) -> list[ProfileWarning]:
    option = next(o for o in advice.curve if o.max_length == advice.recommended)
    padding = option.padding_fraction
    if padding.to_longest < _MUCH_PADDING:
        return []
    return [
        ProfileWarning(
            id="padding_waste",
            seen=f"at max_length {advice.recommended}, {padding.to_longest:.0%} of the tokens in "
            f"random batches of 8 rows would be padding, {padding.sorted:.0%} in sorted ones",
            cause="row lengths differ widely",
            next_move="train padding-free (model.use_remove_padding=true), or batch rows by length",
        )
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
