"""Look at rows while they are rendered, for what the finished ids no longer tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autobatch.dataset.tokens.tokenizer import Tokenizer
from autobatch.dataset.tokens.turn_by_turn import Place, TurnComparer, TurnTally
from autobatch.errors import ConfigError

TURN_BY_TURN = ("all", "sample", "off")
_PLACES = 5  # rows named
_LEAST_COMPARED, _MOST_COMPARED = 64, 2000  # rows of a sample
_SHARE = 100  # else every 100th row is compared: a few percent of the time


def check_turn_by_turn(value: str | None) -> None:
    """Check how many conversations are to be rendered message by message too.

    Raises:
        ConfigError: if it is none of all, sample, off and None.
    """
    if value is not None and value not in TURN_BY_TURN:
        raise ConfigError(f"turn_by_turn is {value!r}; use one of {', '.join(TURN_BY_TURN)}")


@dataclass(kw_only=True)
class RowTally:
    """What was seen in rows; parts of the data may be looked at apart and added up."""

    turns: TurnTally = field(default_factory=TurnTally)
    num_control_rows: int = 0  # rows with a control token typed in their text
    control_tokens: Counter[str] = field(default_factory=Counter)  # token -> rows
    control_roles: Counter[str] = field(default_factory=Counter)  # who typed it -> rows
    control_places: list[Place] = field(default_factory=list)  # the first rows

    def add(self, other: RowTally) -> None:
        """Count what was seen in other rows too."""
        self.turns.add(other.turns)
        self.num_control_rows += other.num_control_rows
        self.control_tokens += other.control_tokens
        self.control_roles += other.control_roles
        self.control_places = sorted([*self.control_places, *other.control_places])[:_PLACES]


class RowChecks:
    """Looks at each row once; which rows are compared depends on their number alone.

    `turn_by_turn` is all, sample or off; `num_rows` is the number of rows in all, None where
    the files do not say.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, turn_by_turn: str = "sample", num_rows: int | None = None
    ) -> None:
        self.tally = RowTally()
        self.mode = turn_by_turn
        self.num_rows = num_rows
        self._stride = 1 if turn_by_turn == "all" else num_rows and _even(num_rows)
        self._control = _control_pattern(tokenizer)
        has_template = tokenizer.template_hash is not None
        self._compare = TurnComparer(tokenizer) if has_template and turn_by_turn != "off" else None

    def conversation(
        self,
        place: Place,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        text: str,
    ) -> None:
        """Look at a conversation that the template rendered as `text`."""
        self.texts(place, [(message["role"], message["content"]) for message in messages])
        self.tally.turns.num_rows += 1
        if self._compare is not None and self._is_chosen(place[0]):
            self._compare(place, messages, tools, text, self.tally.turns)

    def texts(self, place: Place, said: Sequence[tuple[str, str]]) -> None:
        """Look for control tokens in what each role wrote."""
        if self._control is None:
            return
        found: set[str] = set()
        roles: set[str] = set()
        for role, text in said:
            if hits := set(self._control.findall(text)):
                found |= hits
                roles.add(role)
        if not found:
            return
        self.tally.num_control_rows += 1
        self.tally.control_tokens.update(found)
        self.tally.control_roles.update(roles)
        if len(self.tally.control_places) < _PLACES:
            self.tally.control_places.append(place)

    def _is_chosen(self, number: int) -> bool:
        return number % (self._stride or _widening(number)) == 0


def _even(num_rows: int) -> int:
    """Return how far apart compared rows are for the sample to end with the data."""
    wanted = min(_MOST_COMPARED, max(_LEAST_COMPARED, num_rows // _SHARE))
    return max(1, num_rows // wanted)


def _widening(number: int) -> int:
    """Return how far apart compared rows are at a row where no end is known."""
    if number < _LEAST_COMPARED:
        return 1
    return _SHARE << (number // (_MOST_COMPARED * _SHARE)).bit_length()


def _control_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a search for the special tokens, longest first."""
    special = {
        token.content for token in tokenizer.fast.added_tokens_decoder.values() if token.special
    }
    if not special:
        return None
    return re.compile("|".join(map(re.escape, sorted(special, key=lambda s: (-len(s), s)))))
