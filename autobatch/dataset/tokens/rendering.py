"""Render rows into token ids with label masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autobatch.dataset.rows.formats import RowFormat, value_at
from autobatch.dataset.rows.json_lines import TooDeep
from autobatch.dataset.rows.reading import Row
from autobatch.dataset.tokens.encoding import (
    CHECKED_ROWS,
    Encoded,
    Trust,
    encode_chats,
    encode_pairs,
    encode_texts,
    join_ids,
    turn_marks,
)
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.samples import SampleBatch, make_batch
from autobatch.dataset.tokens.spans import Span, spans_by_prefix, spans_by_search
from autobatch.dataset.tokens.templates import is_json, is_plain
from autobatch.dataset.tokens.tokenizer import Tokenizer
from autobatch.dataset.tokens.turn_by_turn import Place
from autobatch.dataset.tokens.turns import (
    RowSkippedError,
    Tally,
    as_text,
    row_messages,
    row_pair,
    row_tools,
)
from autobatch.errors import DataError

RENDERING_VERSION = 2  # raise it when the ids or labels of any row change: caches are rebuilt


class Renderer:
    """Renders rows of one format."""

    def __init__(self, fmt: RowFormat, tokenizer: Tokenizer, checks: RowChecks) -> None:
        """Prepare for rows, each of which `checks` looks at.

        Raises:
            DataError: if rows are conversations and the tokenizer has no chat template.
        """
        if "messages_key" in fmt.keys and tokenizer.template_hash is None:
            raise no_template(tokenizer, fmt)
        self._fmt, self._tokenizer, self._checks = fmt, tokenizer, checks
        self._turn = {
            "header": tokenizer.header,
            "prompt": tokenizer.prompt,
            "end_marker": tokenizer.end_marker,
        }
        self._marks = turn_marks(tokenizer)
        self.trust = Trust(quick=tokenizer.quick is not None, ids=self._marks is not None)
        self._prepare: Callable[[Mapping[str, Any], Place, Tally], Any] = self._chat
        self._encode: Callable[[list[Any]], Encoded] = self._encode_chats
        if fmt.name == "text":
            self._prepare, self._encode = self._text, partial(encode_texts, tokenizer)
        elif fmt.name == "input_ids":
            self._prepare, self._encode = self._given, join_ids
        elif "prompt_key" in fmt.keys and tokenizer.template_hash is None:
            self._prepare, self._encode = self._pair, partial(encode_pairs, tokenizer)

    def render(self, rows: Sequence[Row], tally: Tally, *, first_number: int = 0) -> SampleBatch:
        """Return the samples of some rows, in order; what became no sample is in the tally.

        `first_number` is the number of the first row over all files.
        """
        self._is_new, self._has_compared = not self.trust.is_settled, False
        places: list[tuple[int, int, int]] = []
        prepared: list[Any] = []
        for number, (file_index, row_index, row) in enumerate(rows, start=first_number):
            tally.num_rows += 1
            try:
                prepared.append(self._prepare(row, (number, file_index, row_index), tally))
            except RowSkippedError as reason:
                is_deep = any(isinstance(value, TooDeep) for value in row.values())
                why = "nested too deeply" if is_deep else str(reason)
                tally.skip(why, (number, file_index, row_index))
            else:
                places.append((number, file_index, row_index))
        lengths, ids, labels = self._encode(prepared)
        if not lengths.all():
            for i in np.flatnonzero(lengths == 0):
                tally.skip("no tokens", places[i])
            places = [place for place, length in zip(places, lengths, strict=True) if length]
            lengths = lengths[lengths > 0]
        return make_batch([place[1:] for place in places], lengths, ids, labels)

    def _text(self, row: Mapping[str, Any], place: Place, tally: Tally) -> str:
        return _encodable(as_text(value_at(row, self._fmt.keys["text_key"]), "text"))

    def _given(
        self, row: Mapping[str, Any], place: Place, tally: Tally
    ) -> tuple[np.ndarray, np.ndarray]:
        return _given_ids(row, self._fmt)

    def _pair(self, row: Mapping[str, Any], place: Place, tally: Tally) -> tuple[str, str]:
        prompt, response = _checked_pair(row, self._fmt)
        if isinstance(prompt, list) or isinstance(response, list):
            raise no_template(self._tokenizer, self._fmt)
        _encodable(prompt + response)
        self._checks.texts(place, [("user", prompt), ("assistant", response)])
        return prompt, response

    def _chat(
        self, row: Mapping[str, Any], place: Place, tally: Tally
    ) -> tuple[str, tuple[Span, ...]]:
        if "prompt_key" in self._fmt.keys:
            _checked_pair(row, self._fmt)
        messages = row_messages(row, self._fmt, tally)
        tools = row_tools(row, self._fmt)
        try:
            text = self._render(messages, tools)
        except RowSkippedError:
            raise
        except Exception as error:  # whatever a template does to say no
            tally.refuse(error)
            raise RowSkippedError("template refuses the row") from error
        _encodable(text)
        self._checks.conversation(place, messages, tools, text)
        spans = self._find_spans(text, messages, tools)
        if spans is None:
            tally.num_labels_not_found += 1
        return text, spans or ()

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        quick = self._tokenizer.quick
        if quick is None or not self.trust.quick or not is_plain(messages, tools):
            if not is_json(messages, tools):
                raise RowSkippedError("a value is neither text, number nor list (a date, bytes)")
            return self._tokenizer.render(messages, tools=tools)
        try:
            text = quick(messages, tools)
        except Exception:  # the words of a refusal are those of the whole way
            return self._tokenizer.render(messages, tools=tools)
        if self.trust.num_renders_left or not self._has_compared:
            self._has_compared = True
            self.trust.num_renders_left = max(0, self.trust.num_renders_left - 1)
            whole = self._tokenizer.render(messages, tools=tools)
            self.trust.quick = text == whole
            return whole
        return text

    def _find_spans(
        self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[Span, ...] | None:
        if not any(m["role"] == "assistant" for m in messages):
            return ()
        found = None
        if self.trust.search:
            found = spans_by_search(text, messages, **self._turn)
            if found is not None and not self.trust.num_searches_left:
                return found
        render = partial(self._tokenizer.render, tools=tools)
        by_prefix = spans_by_prefix(text, messages, render, **self._turn)
        if found is None:
            return by_prefix
        self.trust.num_searches_left -= 1
        if by_prefix is not None and by_prefix != found:
            self.trust.search = False
            return by_prefix
        return found

    def _encode_chats(self, chats: list[Any]) -> Encoded:
        return encode_chats(
            self._tokenizer,
            chats,
            marks=self._marks,
            trust=self.trust,
            num_checked=CHECKED_ROWS if self._is_new else 1,
        )


def _checked_pair(row: Mapping[str, Any], fmt: RowFormat) -> tuple[Any, Any]:
    prompt, response = row_pair(row, fmt)
    for value, name in ((prompt, "prompt"), (response, "response")):
        if not isinstance(value, list):
            as_text(value, name)
    return prompt, response


def no_template(tokenizer: Tokenizer, fmt: RowFormat) -> DataError:
    """Return the error for conversations without a chat template."""
    return DataError(
        f"the tokenizer in {tokenizer.directory} has no chat template, and rows of format "
        f"{fmt.name} need one; add chat_template.jinja to that folder, take the tokenizer of the "
        "instruct model with --tokenizer, or use prompt and response columns of plain text"
    )


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowSkippedError("text holds half a character (a lone surrogate)") from None
    return text


def _given_ids(row: Mapping[str, Any], fmt: RowFormat) -> tuple[np.ndarray, np.ndarray]:
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
