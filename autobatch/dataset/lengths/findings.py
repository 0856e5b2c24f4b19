"""Say in warnings what a profile met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autobatch.dataset.lengths.stats import TwoGroups
from autobatch.dataset.rows.media import MediaMismatch
from autobatch.dataset.tokens.row_checks import RowTally
from autobatch.dataset.tokens.turn_by_turn import Place, TurnTally
from autobatch.dataset.tokens.turns import Tally
from autobatch.records import MaxLengthAdvice, ProfileWarning

_MUCH_PADDING = 0.3  # share of computed tokens worth a warning
_MOST_REASONS = 4  # reasons for skipping, words of a template: told one by one
# Gravest first: what is lost, what is learned wrongly, what stops a run, what costs time, what
# matters in other trainers only.
GRAVITY = (
    *("rows_skipped", "labels_not_found", "token_outside_embedding", "too_long_for_model"),
    *("eos_not_in_labels", "no_eos", "unknown_tokens", "control_tokens", "bos_doubled"),
    *("bos_missing", "rows_without_labels", "unknown_roles", "media_columns", "media_mismatch"),
    *("dropped_parts", "mixed_tool_arguments", "pad_outside_embedding"),
    *("tokenizer_outside_embedding", "model_unread", "round_trip", "two_groups", "padding_waste"),
    *("turn_by_turn", "no_chat_template", "pad_missing", "pad_is_eos", "bos_doubled_elsewhere"),
)


def by_gravity(warnings: Iterable[ProfileWarning]) -> tuple[ProfileWarning, ...]:
    """Return warnings in the order of GRAVITY; those of one id keep theirs."""
    return tuple(sorted(warnings, key=lambda warning: GRAVITY.index(warning.id)))


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
    refusal = f" ({next(iter(tally.refusals))})" if tally.refusals else ""
    return (
        f"no row of {where} can be used: {_counts(tally.skipped)}{refusal}{roles}; "
        "correct the rows or name other columns"
    )


def row_warnings(
    tally: Tally, rows: RowTally, *, num_rows_without_labels: int
) -> Iterator[ProfileWarning]:
    """Yield what was met while rows were read and rendered."""
    yield from _skip_warnings(tally)
    yield from _label_warnings(tally, num_rows_without_labels)
    yield from _control_warnings(rows, tally.num_rows)
    yield from _turn_warnings(rows.turns)
    if tally.unknown_roles:
        yield ProfileWarning(
            id="unknown_roles",
            seen=f"unknown roles: {_counts(tally.unknown_roles)}",
            cause="these turns are tagged in no known way, so the template may leave them out",
            next_move="rename them to user, assistant, system or tool",
        )
    if tally.dropped_parts:
        yield ProfileWarning(
            id="dropped_parts",
            seen=f"content parts left out: {_counts(tally.dropped_parts)}",
            cause="they are no text, reasoning or tool call",
            next_move="take the lengths as a lower bound, or write these parts as text",
        )
    if len(tally.argument_kinds) > 1:
        yield ProfileWarning(
            id="mixed_tool_arguments",
            seen=f"tool call arguments are given both ways: {_counts(tally.argument_kinds)}",
            cause="rows of several sources were joined",
            next_move="write all arguments as objects, or all as JSON text",
        )


def media_warnings(
    columns: Sequence[str], mismatch: MediaMismatch | None, files: Sequence[str]
) -> Iterator[ProfileWarning]:
    """Yield what media beside the text mean for the lengths."""
    if columns:
        yield ProfileWarning(
            id="media_columns",
            seen=f"columns {', '.join(columns)} hold media, which no length here counts",
            cause="the data set is for a model that sees or hears",
            next_move="take the lengths as a lower bound, or train on the text only",
        )
    if mismatch is not None:
        places = ", ".join(f"{files[file]}: {row}" for file, row in mismatch.places)
        yield ProfileWarning(
            id="media_mismatch",
            seen=f"{mismatch.num_rows} rows have other numbers of marks than of media: the first "
            f"has {mismatch.example} (rows {places}{_more(mismatch.num_rows, mismatch.places)})",
            cause="a mark such as <image> or an image is missing",
            next_move="give each its partner; a model that sees stops at such a row",
        )


def advice_warnings(advice: MaxLengthAdvice, groups: TwoGroups | None) -> Iterator[ProfileWarning]:
    """Yield what the distribution costs at the recommended max_length."""
    if groups is not None:
        yield ProfileWarning(
            id="two_groups",
            seen=f"{groups.short_share:.0%} of the rows are around {groups.short_tokens} tokens, "
            f"{groups.long_share:.0%} around {groups.long_tokens}, with hardly any between",
            cause="two kinds of rows were joined",
            next_move="batch rows by length or train padding-free (model.use_remove_padding=true): "
            "no one max_length suits both",
        )
    option = next((o for o in advice.curve if o.max_length == advice.recommended), None)
    if option is not None and option.padding_fraction.to_longest >= _MUCH_PADDING:
        padding = option.padding_fraction
        yield ProfileWarning(
            id="padding_waste",
            seen=f"at max_length {advice.recommended}, {padding.to_longest:.0%} of the tokens in "
            f"random batches of 8 rows would be padding, {padding.sorted:.0%} in sorted ones",
            cause="row lengths differ widely",
            next_move="train padding-free (model.use_remove_padding=true), or batch rows by length",
        )


def _label_warnings(tally: Tally, num_rows_without_labels: int) -> Iterator[ProfileWarning]:
    if tally.num_labels_not_found:
        yield ProfileWarning(
            id="labels_not_found",
            seen=f"{tally.num_labels_not_found} of {tally.num_rows} rows have assistant turns "
            "whose place in the rendered text could not be told",
            cause="the chat template changes or moves earlier turns",
            next_move="these rows are left out of training; use one prompt and one response, "
            "or correct the template",
        )
    others = num_rows_without_labels - tally.num_labels_not_found
    if others > 0:
        yield ProfileWarning(
            id="rows_without_labels",
            seen=f"{others} of {tally.num_rows} rows have no label token",
            cause="they hold no assistant turn, or a single token",
            next_move="nothing: they count in lengths but are left out of training",
        )


def _skip_warnings(tally: Tally) -> Iterator[ProfileWarning]:
    told = tally.skipped.most_common(_MOST_REASONS)
    for reason, count in told:
        refused = reason.startswith("template") and tally.refusals
        yield ProfileWarning(
            id="rows_skipped",
            seen=f"{count} of {tally.num_rows} rows skipped: {reason} "
            f"({_numbers(tally.examples[reason], count)})",
            cause=_refusals(tally.refusals) if refused else reason,
            next_move="correct or remove these rows, counted from 0 over all files",
        )
    others = sum(tally.skipped.values()) - sum(count for _, count in told)
    if others:
        yield ProfileWarning(
            id="rows_skipped",
            seen=f"{others} of {tally.num_rows} rows skipped for "
            f"{len(tally.skipped) - len(told)} more reasons",
            cause="rows of several kinds were joined",
            next_move="look at `skipped` of profile.json, and correct or remove these rows",
        )


def _refusals(words: Mapping[str, int]) -> str:
    """Return a template's words; with counts where it said more than one thing."""
    if len(words) == 1:
        return next(iter(words))
    told = sorted(words.items(), key=lambda item: -item[1])[:_MOST_REASONS]
    return _counts(dict(told)) + (", ..." if len(words) > len(told) else "")


def _control_warnings(rows: RowTally, num_rows: int) -> Iterator[ProfileWarning]:
    if rows.num_control_rows:
        yield ProfileWarning(
            id="control_tokens",
            seen=f"{rows.num_control_rows} of {num_rows} rows have special tokens typed in their "
            f"text ({_numbers(rows.control_places, rows.num_control_rows)}): "
            f"{_counts(rows.control_tokens)}; written by {_counts(rows.control_roles)}",
            cause="text about chat formats, code, or a conversation that was rendered before",
            next_move="take them out or write them otherwise: the tokenizer makes real borders "
            "of turns of them",
        )


def _turn_warnings(turns: TurnTally) -> Iterator[ProfileWarning]:
    faulty = turns.num_rows_differ + turns.num_rows_refused
    if not faulty:
        return
    said = []
    if turns.num_rows_differ:
        said.append(
            f"{turns.num_rows_differ} get other tokens ({turns.tokens_more:+d} in all) when each "
            "message is rendered alone"
        )
    if turns.num_rows_refused:
        said.append(f"{turns.num_rows_refused} are refused message by message ({turns.refusal})")
    yield ProfileWarning(
        id="turn_by_turn",
        seen=f"of {turns.num_rows_compared} rows compared (of {turns.num_rows}), "
        f"{' and '.join(said)} ({_numbers(turns.places, faulty)})",
        cause="the chat template prints a message by its place: thinking in the last turn only, "
        "a default system prompt, a question that must come first",
        next_move="nothing here, rows are rendered whole; verl renders message by message and "
        "stops at such a row unless data.ignore_input_ids_mismatch=true, with other lengths",
    )


def _numbers(places: Sequence[Place], count: int) -> str:
    """Return the first rows by their numbers over all files."""
    numbers = ", ".join(str(number) for number, _, _ in places)
    return f"rows {numbers}{_more(count, places)}"


def _more(count: int, told: Sequence[object]) -> str:
    return ", ..." if count > len(told) else ""


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
