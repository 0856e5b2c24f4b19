"""Find the characters of a rendered conversation that are labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]  # characters [start, end)


class Render(Protocol):
    """Print the first messages of a row, with or without a generation prompt."""

    def __call__(self, messages: Messages, *, add_generation_prompt: bool) -> str: ...


def spans_by_search(
    text: str, messages: Messages, *, header: str, prompt: str, end_marker: str
) -> tuple[Span, ...] | None:
    """Return the assistant spans found by walking the whole rendering, None if unsure.

    Each message must appear in order: an assistant turn between a header (or all of the
    generation prompt) and an end marker, any other between the turns. Example: with header
    `<a>` and end marker `</a>`, `<u>hi</u><a>yo</a>\\n` has the one span of `yo</a>`.
    """
    if not header or not end_marker:
        return None
    position = 0
    spans = []
    for message in messages:
        content = visible(message)
        if message["role"] != "assistant":
            found = text.find(content, position)
            if found < 0:
                return None
            position = found + len(content)
            continue
        start = text.find(header, position)
        if start < 0:
            return None
        start += len(prompt) if text.startswith(prompt, start) else len(header)
        found = text.find(content, start)
        end = text.find(end_marker, found + len(content)) if found >= 0 else -1
        if end < 0:
            return None
        position = end + len(end_marker)
        spans.append((start, position))
    if text.find(header, position) >= 0:
        return None  # more turns than messages
    return tuple(spans)


def spans_by_prefix(
    text: str, messages: Messages, render: Render, *, header: str, prompt: str, end_marker: str
) -> tuple[Span, ...] | None:
    """Return the assistant spans found by rendering the messages up to each turn.

    A span starts where the prompt for the turn ends, and ends where the conversation cut
    after the turn ends, without trailing whitespace. Where a template prints an earlier turn
    otherwise than a last one, the end is the next end marker. None if a prompt is no prefix.
    """
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _prompt_end(text, messages[:i], render, header, prompt)
        if start is None:
            return None
        upto = _try(render, messages[: i + 1], add_generation_prompt=False)
        if upto is not None and text.startswith(upto):
            turn = text[start : len(upto)]
            cut = turn.rfind(end_marker) + len(end_marker) if end_marker in turn else 0
            end = start + (cut if end_marker and cut else len(turn.rstrip()))
        else:
            content = visible(message)
            found = text.find(content, start)
            end = text.find(end_marker, found + len(content)) if found >= 0 else -1
            if end < 0:
                return None
            end += len(end_marker)
        spans.append((start, end))
    return tuple(spans)


def _prompt_end(
    text: str, before: Messages, render: Render, header: str, prompt: str
) -> int | None:
    if not before:
        return next((len(start) for start in (prompt, header) if text.startswith(start)), 0)
    prompted = _try(render, before, add_generation_prompt=True)
    if prompted is not None and text.startswith(prompted):
        return len(prompted)
    asked = _try(render, before, add_generation_prompt=False)
    if asked is not None and text.startswith(asked + header):
        return len(asked + header)
    return None


def _try(render: Render, messages: Messages, *, add_generation_prompt: bool) -> str | None:
    try:
        return render(messages, add_generation_prompt=add_generation_prompt)
    except Exception:  # a template may refuse part of a row whose whole it accepts
        return None


def visible(message: Mapping[str, Any]) -> str:
    """Return the part of the content that every template prints: after thinking, stripped."""
    content = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    return content.strip()


def mask_of_spans(encoding: Any, spans: Sequence[Span]) -> np.ndarray:
    """Return bool (T,): the tokens that overlap a span.

    A token across the start of a span is a label: the tokens of the prompt alone differ
    from there on. A character of several tokens gives them all the same offsets.
    """
    num_tokens = len(encoding)
    mask = np.zeros(num_tokens, dtype=bool)
    for start, end in spans:
        if end <= start:
            continue
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None:
            return _mask_by_offsets(encoding, spans)
        while last + 1 < num_tokens and encoding.token_to_chars(last + 1)[0] < end:
            last += 1
        mask[first : last + 1] = True
    return mask


def _mask_by_offsets(encoding: Any, spans: Sequence[Span]) -> np.ndarray:
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What stands around an assistant turn, as ids."""

    header: str
    end_marker: str
    header_ids: tuple[int, ...]
    end_id: int


def labels_by_ids(
    ids: np.ndarray,
    lengths: np.ndarray,
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    marks: Marks,
) -> tuple[np.ndarray, np.ndarray]:
    """Return labels uint8 (T,) of whole rows from their ids alone, and bool (N,): known rows.

    A row is known where its text shows each header right before a span and each span ending
    with its first end marker, and its ids show as many headers and end markers as the text.
    Header and end marker begin with added tokens, so they stand in the ids as in the text.
    Labels of rows that are not known are 0.
    """
    ends = np.cumsum(lengths)
    known = np.fromiter(map(partial(_is_regular, marks), texts, spans), bool, len(texts))
    begins = np.flatnonzero(ids == marks.header_ids[0])
    begins = begins[begins + len(marks.header_ids) <= len(ids)]
    for i, expected in enumerate(marks.header_ids[1:], start=1):
        begins = begins[ids[begins + i] == expected]
    begins += len(marks.header_ids)
    stops = np.flatnonzero(ids == marks.end_id)
    num_spans = np.fromiter(map(len, spans), np.int64, len(spans))
    num_stops = np.fromiter((t.count(marks.end_marker) for t in texts), np.int64, len(texts))
    rows = np.searchsorted(ends, begins - 1, side="right")
    known &= np.bincount(rows, minlength=len(texts)) == num_spans
    stop_rows = np.searchsorted(ends, stops, side="right")
    known &= np.bincount(stop_rows, minlength=len(texts)) == num_stops
    begins = begins[known[rows]]
    stops = stops[np.searchsorted(stops, begins)]  # a known row has one after each header
    steps = np.zeros(len(ids) + 1, dtype=np.int8)
    steps[begins] = 1
    steps[stops + 1] -= 1
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.uint8), known


def _is_regular(marks: Marks, text: str, spans: Sequence[Span]) -> bool:
    position = 0
    for start, end in spans:
        header = text.find(marks.header, position)
        stop = text.find(marks.end_marker, start)
        if header < 0 or header + len(marks.header) != start:
            return False
        if stop < 0 or stop + len(marks.end_marker) != end:
            return False
        position = start
    # a header inside a turn would stand before the next span, or be one too many
    return text.find(marks.header, position) < 0
