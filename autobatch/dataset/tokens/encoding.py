"""Encode the texts of many rows at once, with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autobatch.dataset.tokens.samples import flatten
from autobatch.dataset.tokens.spans import Marks, Span, labels_by_ids, mask_of_spans
from autobatch.dataset.tokens.tokenizer import Tokenizer

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # lengths (N,), ids (T,), labels (T,)
Chat = tuple[str, tuple[Span, ...]]  # a rendered conversation with its assistant spans
CHECKED_ROWS = 32  # rows that are rendered and labelled a second time, the slow way
_ENCODED_CHARS = 1_000_000  # texts of one call: an encoding takes a hundred times its ids


@dataclass(kw_only=True)
class Trust:
    """Which short cuts gave what the slow ways gave, on the rows compared so far."""

    num_renders_left: int = CHECKED_ROWS  # to be compared
    num_searches_left: int = CHECKED_ROWS
    quick: bool = True  # the template called without transformers' preparation
    search: bool = True  # spans found in the text, without rendering it by turns
    ids: bool = True  # labels told from ids, without offsets

    @property
    def is_settled(self) -> bool:
        """Whether every short cut was tried often enough, or given up."""
        return not (
            (self.quick and self.num_renders_left) or (self.search and self.num_searches_left)
        )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """Return texts with their EOS; every token is a label."""
    eos = _eos(tokenizer)
    rows = _ids(tokenizer, texts, add_special_tokens=True)
    rows = [ids if ids[-1:] == eos else ids + eos for ids in rows]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths, flatten(rows, lengths), np.ones(int(lengths.sum()), dtype=np.uint8)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Encoded:
    """Return prompt, response and EOS without a template; the last two are labels."""
    eos = _eos(tokenizer)
    prompts = _ids(tokenizer, [prompt for prompt, _ in pairs], add_special_tokens=True)
    answers = _ids(tokenizer, [answer for _, answer in pairs], add_special_tokens=False)
    if tokenizer.closes_with_eos:
        prompts = [ids[:-1] for ids in prompts]  # the answer follows
    answers = [ids if ids[-1:] == eos else ids + eos for ids in answers]
    both = list(zip(prompts, answers, strict=True))
    sides = np.array([(len(p), len(a)) for p, a in both], dtype=np.int64).reshape(-1, 2)
    lengths = sides.sum(axis=1)
    labels = np.repeat(np.tile(np.array([0, 1], dtype=np.uint8), len(pairs)), sides.ravel())
    return lengths, flatten((ids for pair in both for ids in pair), lengths), labels


def join_ids(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Encoded:
    """Return rows of ready-made int32 ids with their bool label masks."""
    lengths = np.fromiter((len(ids) for ids, _ in rows), np.int64, len(rows))
    ids = np.concatenate([ids for ids, _ in rows] or [np.empty(0, np.int32)])
    masks = np.concatenate([mask for _, mask in rows] or [np.empty(0, bool)])
    return lengths, ids, masks.astype(np.uint8)


def turn_marks(tokenizer: Tokenizer) -> Marks | None:
    """Return what stands around an assistant turn, None if it is not surely seen in ids."""
    header = tokenizer.marker_ids(tokenizer.header)
    end = tokenizer.marker_ids(tokenizer.end_marker)
    if header is None or end is None or len(end) != 1:
        return None
    return Marks(
        header=tokenizer.header,
        end_marker=tokenizer.end_marker,
        header_ids=tuple(header),
        end_id=end[0],
    )


def encode_chats(
    tokenizer: Tokenizer,
    chats: Sequence[Chat],
    *,
    marks: Marks | None,
    trust: Trust,
    num_checked: int,
) -> Encoded:
    """Return conversations with their spans as labels.

    Labels are told from the ids where that is sure; of each call's first `num_checked` rows
    they are told from offsets too, and if these differ, `trust.ids` ends.
    """
    done = [
        _encode_part(tokenizer, chats[part], marks, trust, num_checked)
        for part in _parts([text for text, _ in chats])
    ]
    empty = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.uint8))
    lengths, ids, labels = zip(*(done or [empty]), strict=True)
    return np.concatenate(lengths), np.concatenate(ids), np.concatenate(labels)


def _encode_part(
    tokenizer: Tokenizer, chats: Sequence[Chat], marks: Marks | None, trust: Trust, num_checked: int
) -> Encoded:
    if marks is None or not trust.ids:
        return _encode_by_offsets(tokenizer, chats)
    texts, spans = [text for text, _ in chats], [spans for _, spans in chats]
    rows = tokenizer.encode_ids(texts, add_special_tokens=False)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    ids = flatten(rows, lengths)
    labels, is_known = labels_by_ids(ids, lengths, texts, spans, marks)
    is_slow = ~is_known
    is_slow[:num_checked] = True
    again = np.flatnonzero(is_slow).tolist()
    _, _, by_offsets = _encode_by_offsets(tokenizer, [chats[i] for i in again])
    ends = np.cumsum(lengths)
    borders = np.cumsum(lengths[again])
    for i, border in zip(again, borders, strict=True):
        own = slice(ends[i] - lengths[i], ends[i])
        slow = by_offsets[border - lengths[i] : border]
        if is_known[i] and not np.array_equal(labels[own], slow):
            trust.ids = False
            return _encode_by_offsets(tokenizer, chats)
        labels[own] = slow
    return lengths, ids, labels


def _encode_by_offsets(tokenizer: Tokenizer, chats: Sequence[Chat]) -> Encoded:
    encodings = tokenizer.encode([text for text, _ in chats], add_special_tokens=False)
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    masks = [mask_of_spans(e, spans) for e, (_, spans) in zip(encodings, chats, strict=True)]
    labels = np.concatenate(masks or [np.empty(0, bool)]).astype(np.uint8)
    return lengths, flatten((e.ids for e in encodings), lengths), labels


def _ids(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    return [
        ids
        for part in _parts(texts)
        for ids in tokenizer.encode_ids(texts[part], add_special_tokens=add_special_tokens)
    ]


def _parts(texts: Sequence[str]) -> list[slice]:
    """Return the texts of each call, few enough that their encodings take little memory."""
    parts, begin, num_chars = [], 0, 0
    for i, text in enumerate(texts, start=1):
        num_chars += len(text)
        if num_chars >= _ENCODED_CHARS or i == len(texts):
            parts.append(slice(begin, i))
            begin, num_chars = i, 0
    return parts


def _eos(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]
