"""Add to a profile what was seen beside the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autobatch.dataset.lengths.checks import tokenizer_facts, tokenizer_warnings, unknown_id
from autobatch.dataset.lengths.findings import by_gravity, media_warnings, row_warnings
from autobatch.dataset.rows.files import DataFile
from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.media import MEDIA_PARTS, media_columns, media_mismatch
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.token_checks import count_tokens
from autobatch.dataset.tokens.tokenizer import Tokenizer
from autobatch.dataset.tokens.turns import Tally
from autobatch.records import LengthProfile, RowPlace, TurnByTurn


def what_was_seen(
    profile: LengthProfile,
    cache: TokenCache,
    *,
    tally: Tally,
    checks: RowChecks,
    tokenizer: Tokenizer,
    files: Sequence[DataFile],
    fmt: RowFormat,
) -> LengthProfile:
    """Return the profile with its warnings and facts that hold for any model."""
    fast = tokenizer.fast
    counts = count_tokens(
        cache, unk_id=unknown_id(tokenizer), eos_id=tokenizer.eos_id, bos_id=fast.bos_token_id
    )
    columns = media_columns(files[0])
    warnings = [
        *row_warnings(tally, checks.tally, num_rows_without_labels=profile.num_rows_without_labels),
        *media_warnings(
            columns, media_mismatch(files, fmt, columns) if columns else None, profile.data.files
        ),
        *tokenizer_warnings(
            tokenizer,
            counts,
            format=fmt.name,
            num_samples=cache.num_samples,
            num_trainable=int((cache.label_tokens > 0).sum()),
        ),
    ]
    parts = tuple(f"{part} parts" for part in tally.dropped_parts if part in MEDIA_PARTS)
    return replace(
        profile,
        warnings=by_gravity(warnings),
        media=columns + parts,
        turn_by_turn=_turn_by_turn(checks, profile.data.files),
        tokenizer_facts=tokenizer_facts(tokenizer, counts.largest_id),
    )


def is_an_answer(profile: LengthProfile, turn_by_turn: str | None) -> bool:
    """Return whether a cached profile was checked, and compared turn by turn as is asked."""
    if profile.tokenizer_facts is None:
        return False  # written before profiles were checked
    if turn_by_turn in (None, "off") or profile.template_hash is None:
        return True
    done = profile.turn_by_turn
    if done is None:
        return profile.data.format in ("text", "input_ids")
    return turn_by_turn == "sample" or done.num_rows_compared == done.num_rows


def _turn_by_turn(checks: RowChecks, files: Sequence[str]) -> TurnByTurn | None:
    turns = checks.tally.turns
    if checks.mode == "off" or not turns.num_rows_compared:
        return None
    return TurnByTurn(
        num_rows_compared=turns.num_rows_compared,
        num_rows=turns.num_rows,
        num_rows_differ=turns.num_rows_differ,
        num_rows_refused=turns.num_rows_refused,
        tokens_more=turns.tokens_more,
        refusal=turns.refusal,
        rows=tuple(RowPlace(file=files[file], row=row) for _, file, row in turns.places),
    )
