"""Encode the texts of many rows at once, with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autobatch.dataset.tokens.bpe import IdsOfTexts
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
    ids, lengths = _ended(*_ids(tokenizer, texts, add_special_tokens=True), tokenizer.eos_id)
    return lengths, ids, np.ones(len(ids), dtype=np.uint8)


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Encoded:
    """Return prompt, response and EOS without a template; the last two are labels."""
    prompts, prompt_lengths = _ids(tokenizer, [p for p, _ in pairs], add_special_tokens=True)
    if tokenizer.closes_with_eos:  # the answer follows
        is_kept = np.ones(len(prompts), dtype=bool)
        is_kept[np.cumsum(prompt_lengths) - 1] = False
        prompts, prompt_lengths = prompts[is_kept], prompt_lengths - 1
    answers, answer_lengths = _ended(
        *_ids(tokenizer, [a for _, a in pairs], add_special_tokens=False), tokenizer.eos_id
    )
    sides = np.stack([prompt_lengths, answer_lengths], axis=1)
    is_answer = np.repeat(np.tile([False, True], len(pairs)), sides.ravel())
    ids = np.empty(len(is_answer), dtype=np.int32)
    ids[~is_answer], ids[is_answer] = prompts, answers
    return sides.sum(axis=1), ids, is_answer.astype(np.uint8)


def _ended(ids: np.ndarray, lengths: np.ndarray, eos_id: int | None) -> IdsOfTexts:
    """Return rows that all end with EOS."""
    if eos_id is None:
        return ids, lengths
    lasts = np.full(len(lengths), -1, dtype=np.int64)
    lasts[lengths > 0] = ids[np.cumsum(lengths)[lengths > 0] - 1]
    needs = lasts != eos_id
    lengths = lengths + needs
    ended = np.full(int(lengths.sum()), eos_id, dtype=np.int32)
    is_given = np.ones(len(ended), dtype=bool)
    is_given[np.cumsum(lengths)[needs] - 1] = False
    ended[is_given] = ids
    return ended, lengths


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
    ids, lengths = tokenizer.encode_ids(texts, add_special_tokens=False)
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


def _ids(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> IdsOfTexts:
    parts = [
        tokenizer.encode_ids(texts[part], add_special_tokens=add_special_tokens)
        for part in _parts(texts)
    ]
    ids, lengths = zip(*(parts or [(np.empty(0, np.int32), np.empty(0, np.int64))]), strict=True)
    return np.concatenate(ids), np.concatenate(lengths)


def _parts(texts: Sequence[str]) -> list[slice]:
    """Return the texts of each call, few enough that their encodings take little memory."""
    parts, begin, num_chars = [], 0, 0
    for i, text in enumerate(texts, start=1):
        num_chars += len(text)
        if num_chars >= _ENCODED_CHARS or i == len(texts):
            parts.append(slice(begin, i))
            begin, num_chars = i, 0
    return parts
