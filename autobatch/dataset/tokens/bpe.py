"""Byte-pair encoding by tiktoken, several times as fast, where its ids are surely the same.

`tokenizers` cuts a text at added tokens, normalizes what lies between, cuts that into words by a
pattern, and merges the bytes of a word by a list of pairs. tiktoken knows no normalizer, has
another engine for patterns, and merges whatever neighbours make a known token, the lowest rank
first. The ids are the same because

- added tokens are cut out alike: none begins another, none takes blanks along;
- a text is taken only if the normalizer leaves it as it is;
- the pattern has constructs that both engines read alike, and a text is taken only if both put
  each of its characters into the same classes and leave none of them out (`Alphabet`);
- tokens are *reachable*: the pairs merge a token's own bytes into it. Where a text holds two
  neighbours that make a token t, nothing merged across their borders, so between these the
  merges were those of t alone, and the list has their last pair. Hence both merge the same
  neighbours, in the order of the list, which the ranks keep. Tokens that are not reachable are
  never made, and tiktoken is not told of them.

What is not sure is left to `tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autobatch.dataset.tokens.alphabet import Alphabet
from autobatch.dataset.tokens.patterns import plain_pattern
from autobatch.errors import AutobatchError
from autobatch.storage import cache_root, read_json, write_json

_PLAIN_MODEL = {
    "dropout": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "byte_fallback": False,
}
_SEPARATOR = "\x1d\x1e\x1f"  # between texts; it does not overlap itself
_COMPARED_CHARS = 20_000  # compared with `tokenizers` at first
_COMPARED_SHARE = 200  # one character of so many
_UNKNOWN = -1  # the id of a byte without a token: texts with it are not taken

IdsOfTexts = tuple[np.ndarray, np.ndarray]  # ids int32 (T,) of N texts, their lengths int64 (N,)
Encode = Callable[[Sequence[str]], IdsOfTexts]


class Bpe:
    """The ids of a tokenizer, by tiktoken."""

    def __init__(
        self,
        pattern: str,
        alphabet: Alphabet,
        *,
        ids_of: Mapping[bytes, int],
        added: Mapping[str, int],
    ) -> None:
        """Take the ids of tokens in the order in which they are merged, single bytes first."""
        from tiktoken import Encoding

        special = {text: len(ids_of) + i for i, text in enumerate([*added, _SEPARATOR])}
        self._encoding = Encoding(
            "autobatch",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ids_of)},
            special_tokens=special,
        )
        self._alphabet = alphabet
        self._is_trusted = True
        self._num_chars = self._num_compared = 0
        self._end = special[_SEPARATOR]
        self._ids = np.array([*ids_of.values(), *added.values(), _UNKNOWN], dtype=np.int32)

    def encode(self, texts: Sequence[str], *, otherwise: Encode) -> IdsOfTexts:
        """Return the ids of texts without a lone surrogate, no special tokens added.

        What is not sure `otherwise` encodes, and some texts for comparison: all, once one differs.
        """
        if not self._is_trusted:
            return otherwise(texts)
        takes = self._alphabet.covers(texts)
        taken = list(compress(texts, takes))
        found = self._encode(taken)
        if found is None or not self._is_alike(taken, found, otherwise):
            return otherwise(texts)
        if takes.all():
            return found
        left = otherwise(list(compress(texts, ~takes)))
        lengths = np.empty(len(texts), dtype=np.int64)
        lengths[takes], lengths[~takes] = found[1], left[1]
        is_taken = np.repeat(takes, lengths)
        ids = np.empty(len(is_taken), dtype=np.int32)
        ids[is_taken], ids[~is_taken] = found[0], left[0]
        return ids, lengths

    def _encode(self, texts: Sequence[str]) -> IdsOfTexts | None:
        """Return None where a text holds the separator, or the engine of the pattern gives up."""
        try:
            ranks = self._encoding.encode_to_numpy(
                _SEPARATOR.join(texts), allowed_special="all", disallowed_special=()
            )
        except ValueError:  # over a million blanks in a row, for example
            return None
        is_end = ranks == self._end
        ends = np.flatnonzero(is_end)
        if len(ends) != max(0, len(texts) - 1):
            return None
        lengths = np.diff(ends, prepend=-1, append=len(ranks)) - 1
        return self._ids[ranks[~is_end]], lengths[: len(texts)]

    def _is_alike(self, texts: Sequence[str], found: IdsOfTexts, otherwise: Encode) -> bool:
        """Compare the first texts, or the beginning of one, as far as that takes little time."""
        self._num_chars += sum(map(len, texts))
        limit = _COMPARED_CHARS + self._num_chars // _COMPARED_SHARE - self._num_compared
        sizes = np.cumsum([len(text) for text in texts], dtype=np.int64)
        some = int(np.searchsorted(sizes, limit, side="right"))
        if some:
            self._num_compared += int(sizes[some - 1])
            ids, lengths = otherwise(texts[:some])
            self._is_trusted = np.array_equal(lengths, found[1][:some]) and np.array_equal(
                ids, found[0][: len(ids)]
            )
        elif texts and limit >= _COMPARED_CHARS:
            self._num_compared += limit
            beginning = [texts[0][:limit]]
            own = self._encode(beginning)
            self._is_trusted = own is None or np.array_equal(own[0], otherwise(beginning)[0])
        return self._is_trusted


# ---- which tokenizers ------------------------------------------------------


def make_bpe(backend: Any) -> Bpe | None:
    """Return tiktoken's encoder for a `tokenizers.Tokenizer`, None where ids may differ.

    The first time it takes seconds, for every token of the vocabulary is looked at.
    """
    text = backend.to_str()
    spec = json.loads(text)
    model, added = spec["model"], spec["added_tokens"] or []
    pattern = plain_pattern(spec["pre_tokenizer"])
    if pattern is None or not _is_plain_model(model) or not _are_plain(added):
        return None
    if backend.encode_special_tokens or spec["truncation"] or spec["padding"]:
        return None
    if spec["normalizer"] is not None and spec["normalizer"]["type"] != "NFC":
        return None
    added_ids = {token["content"]: token["id"] for token in added}
    digest = hashlib.sha256(text.encode()).hexdigest()
    ids_of = _mergeable_ranks(model, frozenset(added_ids), digest)
    if ids_of is None:
        return None
    unknown = frozenset(token[0] for token, i in ids_of.items() if i == _UNKNOWN)
    try:
        alphabet = Alphabet(backend, pattern, unknown_bytes=unknown)
        return Bpe(pattern, alphabet, ids_of=ids_of, added=added_ids)
    except ValueError:  # too large a pattern for Rust's regex
        return None


def _is_plain_model(model: Mapping[str, Any]) -> bool:
    return model["type"] == "BPE" and all(
        (model.get(name) or plain) == plain for name, plain in _PLAIN_MODEL.items()
    )


def _are_plain(added: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether added tokens are cut out of a text by their characters alone."""
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    texts = sorted(token["content"] for token in added)
    return not (
        any(token[flag] for token in added for flag in flags)
        or any(longer.startswith(text) for text, longer in pairwise(texts))
        or any(set(_SEPARATOR) & set(text) for text in texts)
    )


def _mergeable_ranks(
    model: Mapping[str, Any], added: frozenset[str], digest: str
) -> dict[bytes, int] | None:
    """Return the id of each token by its bytes, in the order of merging, None if unsure."""
    vocab: dict[str, int] = model["vocab"]
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    order = dict.fromkeys(_BYTE_OF)
    for left, right in merges:
        token = left + right
        if token in order and token != next(reversed(order)):
            return None  # a token with several pairs, others between them
        order[token] = None
    lost = _unreachable(vocab, merges, digest)
    if model.get("ignore_merges") and not all(t in added and t.isascii() for t in lost):
        return None  # a word that is such a token is taken as it is
    known = [token for token in order if token not in lost]
    try:
        return {_bytes(token): vocab.get(token, _UNKNOWN) for token in known}
    except UnicodeEncodeError:  # a character that stands for no byte
        return None


def _unreachable(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], digest: str
) -> frozenset[str]:
    """Return the tokens that merges do not make of their own characters; known the second time."""
    path = Path(cache_root(), "tokenizers", f"{digest[:24]}.json")
    with suppress(AutobatchError, KeyError, TypeError):  # not known yet, or damaged
        known = read_json(path)["unreachable"]
        if type(known) is list:
            return frozenset(known)
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    alone = Tokenizer(BPE(dict(vocab), [(left, right) for left, right in merges]))
    encodings = alone.encode_batch_fast(list(vocab), add_special_tokens=False)
    lost = [t for t, e in zip(vocab, encodings, strict=True) if e.ids != [vocab[t]]]
    with suppress(AutobatchError):  # whoever keeps the rows says that nothing can be written
        write_json(path, {"unreachable": lost})
    return frozenset(lost)


def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [i for i in range(256) if i not in shown]
    stand_ins = {chr(256 + place): i for place, i in enumerate(hidden)}
    return {**{chr(i): i for i in shown}, **stand_ins}


_BYTE_OF = _byte_of()
_NO_BYTE = {i: 256 for i in range(256) if chr(i) not in _BYTE_OF}
_AS_LATIN = {**_NO_BYTE, **{ord(c): i for c, i in _BYTE_OF.items()}}


def _bytes(token: str) -> bytes:
    return token.translate(_AS_LATIN).encode("latin-1")
