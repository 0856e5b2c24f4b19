"""How long the rows of a data set are, what that costs, what was seen on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows come from and how they were read."""

    files: tuple[str, ...]
    format: str  # messages | conversations | question_answer | ... (dataset.rows.formats)
    keys: dict[str, str]  # e.g. {"prompt_key": "question", "response_key": "answer"}
    fingerprint: str  # changes with the files, the format, the keys and the renderer
    revision: str | None = None  # the commit of a data set from a hub


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Token lengths of samples; a percentile is numpy's `inverted_cdf`."""

    mean: float
    min: int
    p50: int
    p90: int
    p95: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class PaddingFraction:
    """Share of computed tokens that are padding, by strategy."""

    to_max_length: float
    to_longest: float
    sorted: float
    packed: float


@dataclass(frozen=True, kw_only=True)
class MaxLengthOption:
    """What one candidate max_length costs."""

    max_length: int
    rows_cut: int
    label_tokens_lost: int
    rows_without_labels: int
    padding_fraction: PaddingFraction


@dataclass(frozen=True, kw_only=True)
class MaxLengthAdvice:
    """The recommended max_length with its reason, and the curve behind it.

    `recommended` is None where rows hold media that the lengths do not count.
    """

    recommended: int | None
    reason: str
    curve: tuple[MaxLengthOption, ...]


@dataclass(frozen=True, kw_only=True)
class ProfileWarning:
    """A warning in three parts: what was seen, its likely cause, what to do."""

    id: str
    seen: str
    cause: str
    next_move: str


@dataclass(frozen=True, kw_only=True)
class RowPlace:
    """Where a row lies."""

    file: str
    row: int  # in its file, 0-based


@dataclass(frozen=True, kw_only=True)
class LongRow:
    """A row with its length in tokens, uncut."""

    file: str
    row: int  # in its file, 0-based
    length_tokens: int


@dataclass(frozen=True, kw_only=True)
class ProfileOrigin:
    """Where a shipped profile comes from; it has lengths alone: no rows, order or label mask."""

    name: str  # as `--profile NAME` takes it
    source: str
    licence: str  # of the data
    tokenizer: str  # whose, and where it was taken from
    measured_on: str  # ISO date
    command: str
    commit: str  # of autobatch
    autobatch_version: str


@dataclass(frozen=True, kw_only=True)
class TurnByTurn:
    """Rows rendered one message at a time, as some trainers do, against rendered whole."""

    num_rows_compared: int
    num_rows: int  # conversations that could be compared
    num_rows_differ: int  # of the compared
    num_rows_refused: int  # of the compared: the template refuses a message alone
    tokens_more: int  # of the rows that differ, turn by turn minus whole; may be negative
    refusal: str | None = None  # the template's own words, first seen
    rows: tuple[RowPlace, ...] = ()  # the first that differ or are refused


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a model must agree with: special ids, the largest id, the largest id in the data."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    pad_token: str | None
    largest_token_id: int
    largest_data_token_id: int


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """What a profile of some rows knows of them all; errors hold at 95 %."""

    num_rows_read: int
    num_rows: int
    seed: int
    # Any row that would be the longest at this density was read, so length.max is exact unless
    # a row is denser than the longer half of those read.
    tokens_per_character: float
    error_tokens: dict[str, int]  # p50, p90, p95, p99: plus or minus
    num_tokens_error_fraction: float


@dataclass(frozen=True, kw_only=True)
class LengthProfile:
    """Token lengths of a data set under one tokenizer and template, uncut."""

    data: DataSource
    model: str | None
    tokenizer: str
    template_hash: str | None
    cache_dir: str | None
    complete: bool
    num_rows: int
    num_samples: int
    skipped: dict[str, int]
    num_rows_without_labels: int
    num_tokens: int
    num_label_tokens: int
    length: LengthStats
    histogram: tuple[tuple[int, int], ...]  # (length_tokens, count), ascending
    max_length: MaxLengthAdvice
    warnings: tuple[ProfileWarning, ...] = ()
    longest: tuple[LongRow, ...] = ()  # the longest samples, descending
    skipped_rows: dict[str, tuple[RowPlace, ...]] = field(default_factory=dict)  # the first few
    sampled: SampledRows | None = None  # None: no row was left out on purpose
    origin: ProfileOrigin | None = None  # None: measured here
    media: tuple[str, ...] = ()  # columns and content parts that no length counts
    turn_by_turn: TurnByTurn | None = None  # None: not compared
    tokenizer_facts: TokenizerFacts | None = None
    schema_version: int = SCHEMA_VERSION
