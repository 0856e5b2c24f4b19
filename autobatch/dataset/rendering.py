"""Render rows into token ids with label masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from autobatch.dataset.formats import RowFormat, value_at
from autobatch.dataset.row_checks import RowChecks
from autobatch.dataset.spans import Span, mask_of_spans, spans_by_prefix, spans_by_search
from autobatch.dataset.tokenizer import Tokenizer
from autobatch.dataset.turns import (
    RowSkippedError,
    Tally,
    as_text,
    row_messages,
    row_pair,
    row_tools,
)
from autobatch.errors import DataError

RENDERING_VERSION = 1  # raise it when the ids or labels of any row change: caches are rebuilt

_BATCH_ROWS = 1000
_BATCH_CHARS = 4_000_000  # bounds memory when rows are huge
_CHECKED_ROWS = 32  # rows whose spans are found a second time, by prefixes


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row that rendered."""

    file_index: int
    row_index: int  # in its file, 0-based
    ids: np.ndarray  # (T,) int32, uncut
    label_mask: np.ndarray  # (T,) bool; [0] is False, no position predicts it


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A row before tokenization: exactly one of its three forms."""

    file_index: int
    row_index: int
    number: int  # over all files
    text: str = ""
    spans: tuple[Span, ...] | None = None  # rendered by the template
    response: str | None = None  # prompt and response without a template
    ids: tuple[np.ndarray, np.ndarray] | None = None  # ids and mask, already there


def render_rows(
    rows: Iterable[tuple[int, int, Mapping[str, Any]]],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    tally: Tally,
    checks: RowChecks,
) -> Iterator[Sample]:
    """Yield the samples of (file index, row index, row), in order; others are in the tally.

    Raises:
        DataError: if rows are conversations and the tokenizer has no chat template.
    """
    if "messages_key" in fmt.keys and tokenizer.template_hash is None:
        raise no_template(tokenizer, fmt)
    drafts: list[_Draft] = []
    num_chars = 0
    find_spans = _SpanFinder(tokenizer)
    for file_index, row_index, row in rows:
        number = tally.num_rows
        tally.num_rows += 1
        try:
            draft = _draft(
                file_index, row_index, number, row, fmt, tokenizer, find_spans, tally, checks
            )
        except RowSkippedError as reason:
            tally.skip(str(reason), (number, file_index, row_index))
            continue
        drafts.append(draft)
        num_chars += len(draft.text) + len(draft.response or "")
        if len(drafts) == _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield from _tokenize(drafts, tokenizer, tally)
            drafts, num_chars = [], 0
    yield from _tokenize(drafts, tokenizer, tally)


def no_template(tokenizer: Tokenizer, fmt: RowFormat) -> DataError:
    """Return the error for conversations without a chat template."""
    return DataError(
        f"the tokenizer in {tokenizer.directory} has no chat template, and rows of format "
        f"{fmt.name} need one; add chat_template.jinja to that folder, take the tokenizer of the "
        "instruct model with --tokenizer, or use prompt and response columns of plain text"
    )


def _draft(
    file_index: int,
    row_index: int,
    number: int,
    row: Mapping[str, Any],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    find_spans: _SpanFinder,
    tally: Tally,
    checks: RowChecks,
) -> _Draft:
    make = partial(_Draft, file_index=file_index, row_index=row_index, number=number)
    if fmt.name == "text":
        return make(text=_encodable(as_text(value_at(row, fmt.keys["text_key"]), "text")))
    if fmt.name == "input_ids":
        return make(ids=_given_ids(row, fmt, tokenizer))
    if "prompt_key" in fmt.keys:
        prompt, response = row_pair(row, fmt)
        if not isinstance(prompt, list):
            as_text(prompt, "prompt")
        if not isinstance(response, list):
            as_text(response, "response")
        if tokenizer.template_hash is None:
            if isinstance(prompt, list) or isinstance(response, list):
                raise no_template(tokenizer, fmt)
            _encodable(prompt + response)
            checks.texts(
                (number, file_index, row_index), [("user", prompt), ("assistant", response)]
            )
            return make(text=prompt, response=response)
    messages = row_messages(row, fmt, tally)
    tools = row_tools(row, fmt)
    try:
        text = tokenizer.render(messages, tools=tools)
    except Exception as error:  # whatever a template does to say no
        tally.refuse(error)
        raise RowSkippedError("template refuses the row") from error
    _encodable(text)
    checks.conversation((number, file_index, row_index), messages, tools, text)
    spans = find_spans(text, messages, tools)
    if spans is None:
        tally.num_labels_not_found += 1
    return make(text=text, spans=spans or ())


class _SpanFinder:
    """Finds spans by search; by prefixes where that is unsure or was seen to be wrong."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks = {
            "header": tokenizer.header,
            "prompt": tokenizer.prompt,
            "end_marker": tokenizer.end_marker,
        }
        self._num_checks_left = _CHECKED_ROWS
        self._trusts_search = True

    def __call__(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[Span, ...] | None:
        if not any(m["role"] == "assistant" for m in messages):
            return ()
        found = None
        if self._trusts_search:
            found = spans_by_search(text, messages, **self._marks)
            if found is not None and not self._num_checks_left:
                return found
        render = partial(self._tokenizer.render, tools=tools)
        by_prefix = spans_by_prefix(text, messages, render, **self._marks)
        if found is None:
            return by_prefix
        self._num_checks_left -= 1
        if by_prefix is not None and by_prefix != found:
            self._trusts_search = False
            return by_prefix
        return found


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowSkippedError("text holds half a character (a lone surrogate)") from None
    return text


def _given_ids(
    row: Mapping[str, Any], fmt: RowFormat, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    ids = _integers(value_at(row, fmt.keys["input_ids_key"]), "input_ids")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise RowSkippedError("input_ids are out of range")
    mask = np.ones(len(ids), dtype=bool)
    for key, name in (("labels_key", "labels"), ("loss_mask_key", "loss_mask")):
        if key in fmt.keys:
            marks = _integers(value_at(row, fmt.keys[key]), name)
            if len(marks) != len(ids):
                raise RowSkippedError(f"{name} and input_ids differ in length")
            mask = (marks != -100) if key == "labels_key" else (marks != 0)
            break
    return ids.astype(np.int32), mask


def _integers(value: Any, name: str) -> np.ndarray:
    if value is None:
        raise RowSkippedError(f"{name} is null")
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise RowSkippedError(f"{name} is no list of integers")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise RowSkippedError(f"{name} are out of range") from None


def _tokenize(drafts: list[_Draft], tokenizer: Tokenizer, tally: Tally) -> Iterator[Sample]:
    specials = [d.text for d in drafts if d.ids is None and d.spans is None]
    plains = [d.text for d in drafts if d.spans is not None]
    plains_after = [d.response for d in drafts if d.response is not None]
    with_specials = iter(tokenizer.encode(specials, add_special_tokens=True))
    without = iter(tokenizer.encode(plains, add_special_tokens=False))
    responses = iter(tokenizer.encode(plains_after, add_special_tokens=False))
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    for draft in drafts:
        if draft.ids is not None:
            ids, mask = draft.ids
        elif draft.spans is not None:
            encoding = next(without)
            ids, mask = np.array(encoding.ids, dtype=np.int32), mask_of_spans(encoding, draft.spans)
        elif draft.response is not None:
            prompt, response = next(with_specials).ids, next(responses).ids
            if tokenizer.closes_with_eos:
                prompt = prompt[:-1]  # the answer follows
            if response[-1:] != eos:
                response = response + eos
            ids = np.array(prompt + response, dtype=np.int32)
            mask = np.arange(len(ids)) >= len(prompt)
        else:
            tokens = next(with_specials).ids
            ids = np.array(tokens if tokens[-1:] == eos else tokens + eos, dtype=np.int32)
            mask = np.ones(len(ids), dtype=bool)
        if not len(ids):
            tally.skip("no tokens", (draft.number, draft.file_index, draft.row_index))
            continue
        mask[0] = False
        yield Sample(
            file_index=draft.file_index, row_index=draft.row_index, ids=ids, label_mask=mask
        )
