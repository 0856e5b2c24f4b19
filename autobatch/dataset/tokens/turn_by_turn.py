"""Compare a conversation rendered one message at a time with the same rendered whole.

verl's multi-turn data set renders each message alone and joins the ids (verl 0.7 to 0.9,
verl/utils/dataset/multiturn_sft_dataset.py, read 2026-12-01): tools go to the first message
only, a default system prompt is cut off all others, and a difference ends the run unless
`data.ignore_input_ids_mismatch` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autobatch.dataset.tokens.tokenizer import Tokenizer

_CHECKED_ROWS = 16  # rows of equal text whose ids are compared too
_PLACES = 5  # rows named

Place = tuple[int, int, int]  # number over all files, file index, row index


@dataclass(kw_only=True)
class TurnTally:
    """What comparing rows brought; grows during one pass over the data."""

    num_rows_compared: int = 0
    num_rows: int = 0
    num_rows_differ: int = 0
    num_rows_refused: int = 0
    tokens_more: int = 0
    refusal: str | None = None
    places: list[Place] = field(default_factory=list)  # the first that differ or are refused

    def add(self, other: TurnTally) -> None:
        """Count what another pass, over later rows, brought."""
        self.num_rows_compared += other.num_rows_compared
        self.num_rows += other.num_rows
        self.num_rows_differ += other.num_rows_differ
        self.num_rows_refused += other.num_rows_refused
        self.tokens_more += other.tokens_more
        self.refusal = self.refusal or other.refusal
        self.places = sorted([*self.places, *other.places])[:_PLACES]


class TurnComparer:
    """Compares conversations; texts first, ids where the texts differ."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._default_system = _default_system(tokenizer)
        self._num_checks_left = _CHECKED_ROWS
        self._texts_suffice = True

    def __call__(
        self,
        place: Place,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        text: str,
        tally: TurnTally,
    ) -> None:
        """Compare one row, whose whole rendering is `text`."""
        tally.num_rows_compared += 1
        try:
            pieces = self._pieces(messages, tools)
        except Exception as error:  # whatever a template does to say no
            tally.num_rows_refused += 1
            tally.refusal = tally.refusal or f"{type(error).__name__}: {error}"[:200]
            self._remember(place, tally)
            return
        if "".join(pieces) == text:
            # tokens across the border of two messages would differ in spite of equal texts
            if self._texts_suffice and not self._num_checks_left:
                return
            self._num_checks_left = max(0, self._num_checks_left - 1)
        joined = [token for piece in pieces for token in self._ids(piece)]
        whole = self._ids(text)
        if joined == whole:
            return
        self._texts_suffice = self._texts_suffice and "".join(pieces) != text
        tally.num_rows_differ += 1
        tally.tokens_more += len(joined) - len(whole)
        self._remember(place, tally)

    def _ids(self, text: str) -> list[int]:
        # one by one: a batch of a few short texts costs more in threads than in work
        backend = self._tokenizer.fast.backend_tokenizer
        return backend.encode(text, add_special_tokens=False).ids

    def _pieces(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[str]:
        pieces = []
        for i, message in enumerate(messages):
            piece = self._tokenizer.render([message], tools=None if i else tools)
            if i and message["role"] != "system":
                piece = piece[len(self._default_system) :]
            pieces.append(piece)
        return pieces

    @staticmethod
    def _remember(place: Place, tally: TurnTally) -> None:
        if len(tally.places) < _PLACES:
            tally.places.append(place)


def _default_system(tokenizer: Tokenizer) -> str:
    """Return what the template prints before a conversation that names no system."""
    user = {"role": "user", "content": ""}
    try:
        one, two = tokenizer.render([user]), tokenizer.render([user, user])
    except Exception:  # a template that wants turns to alternate, or a question
        return ""
    return one[: max(0, 2 * len(one) - len(two))]
