"""Measure the token lengths of a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from autobatch.dataset.lengths.advice import advise
from autobatch.dataset.lengths.drawing import draw_samples, row_sizes
from autobatch.dataset.lengths.facts import is_an_answer, what_was_seen
from autobatch.dataset.lengths.findings import nothing_left
from autobatch.dataset.lengths.for_model import for_model
from autobatch.dataset.lengths.interrupting import (
    ProfileInterrupted,
    Progress,
    interrupt_asked,
    watched,
)
from autobatch.dataset.lengths.sampling import apportion
from autobatch.dataset.lengths.stats import length_histogram, length_stats
from autobatch.dataset.rows.files import DataFile, find_files, revision_of
from autobatch.dataset.rows.formats import RowFormat, choose_format
from autobatch.dataset.rows.reading import all_parts, count_all
from autobatch.dataset.tokens.cache import TokenCache, partial_name, write_cache
from autobatch.dataset.tokens.parallel import early_workers, render_rows
from autobatch.dataset.tokens.rendering import RENDERING_VERSION
from autobatch.dataset.tokens.row_checks import RowChecks, check_turn_by_turn
from autobatch.dataset.tokens.tokenizer import Tokenizer, load_tokenizer
from autobatch.dataset.tokens.tokenizer_files import tokenizer_digest
from autobatch.dataset.tokens.truncation import kept_label_tokens
from autobatch.dataset.tokens.turns import Tally
from autobatch.dataset.tokens.workers import Workers
from autobatch.errors import AutobatchError, ConfigError, DataError
from autobatch.records import DataSource, LengthProfile, LongRow, RowPlace
from autobatch.storage import cache_root, read_record, write_json

SMALLEST_SAMPLE = 50
_LONGEST_ROWS = 20


def profile_lengths(
    files: Sequence[str],
    *,
    tokenizer_dir: str,
    model: str | None = None,
    format: str = "auto",
    keys: Mapping[str, str] | None = None,
    text_only: bool = False,
    turn_by_turn: str | None = None,
    sample: int | None = None,
    progress: Progress | None = None,
) -> LengthProfile:
    """Return the length profile of files, and keep their ids in a token cache.

    With `sample` only about so many rows become tokens, and the profile estimates the whole.

    The second call for the same files, tokenizer, template and keys reads the first one's
    answer. `turn_by_turn` is how many conversations are rendered message by message too: all,
    sample or off; None takes what is known, else a sample. `text_only` says that media beside
    the text are not trained on. `progress` is told (rows done, rows in all or None where files
    do not say).

    Raises:
        DataError: if a file cannot be read, no format matches, or no row can be trained on.
        ModelError: if the tokenizer directory cannot be used.
        ConfigError: if a format, a key name or `turn_by_turn` is unknown, or the sample too small.
        ProfileInterrupted: on an interrupt, with the profile of the rows done until then.
    """
    if sample is not None and sample < SMALLEST_SAMPLE:
        raise ConfigError(
            f"a sample of {sample} rows tells too little; draw {SMALLEST_SAMPLE} or more"
        )
    check_turn_by_turn(turn_by_turn)
    found = find_files(files)
    tokenizer_hash = tokenizer_digest(tokenizer_dir)
    fmt = choose_format(found, format=format, keys=keys)
    fingerprint = data_fingerprint(found, fmt, tokenizer_hash)
    directory = cache_root() / "tokens" / fingerprint
    known = _known_profile(directory)
    if known is None and sample is not None:
        known = _known_profile(partial_name(_sample_directory(directory, sample)))
    if known is not None and is_an_answer(known, turn_by_turn):
        return for_model(replace(known, tokenizer=tokenizer_dir), model=model, text_only=text_only)

    data = DataSource(
        files=tuple(file.path for file in found),
        format=fmt.name,
        keys=fmt.keys,
        fingerprint=fingerprint,
        revision=revision_of(found),
    )
    mode = turn_by_turn or "sample"
    profile = None
    with early_workers(found if sample is None else (), tokenizer_dir) as workers:
        tokenizer = load_tokenizer(tokenizer_dir)
        if sample is not None:
            profile = _sampled(found, fmt, tokenizer, data, directory, sample, mode, progress)
        if profile is None:
            profile = _whole(found, fmt, tokenizer, data, directory, mode, progress, workers)
    assert profile.cache_dir is not None
    write_json(Path(profile.cache_dir) / "profile.json", profile)
    profile = for_model(profile, model=model, text_only=text_only)
    if not profile.complete and profile.sampled is None:
        raise ProfileInterrupted(profile)
    return profile


def _whole(
    found: Sequence[DataFile],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    data: DataSource,
    directory: Path,
    turn_by_turn: str,
    progress: Progress | None,
    workers: Workers | None,
) -> LengthProfile:
    tally, total = Tally(), count_all(found)
    checks = RowChecks(tokenizer, turn_by_turn=turn_by_turn, num_rows=total)
    with interrupt_asked() as is_asked:
        batches = render_rows(
            all_parts(found, fmt), fmt, tokenizer, tally, checks, num_rows=total, workers=workers
        )
        passed = watched(batches, tally, data.files[0], is_asked, progress, total)
        cache = write_cache(directory, passed, files=data.files, is_complete=lambda: not is_asked())
    profile = _describe(cache, tally, data=data, tokenizer=tokenizer)
    return what_was_seen(
        profile, cache, tally=tally, checks=checks, tokenizer=tokenizer, files=found, fmt=fmt
    )


def _sampled(
    found: Sequence[DataFile],
    fmt: RowFormat,
    tokenizer: Tokenizer,
    data: DataSource,
    directory: Path,
    sample: int,
    turn_by_turn: str,
    progress: Progress | None,
) -> LengthProfile | None:
    """Return the estimate from a sample, None if there are no more rows than it may hold."""
    sizes, begins = row_sizes(found, fmt)
    if sample >= len(sizes):
        return None
    tally = Tally()
    checks = RowChecks(tokenizer, turn_by_turn=turn_by_turn, num_rows=sample)
    draw, batch, weights = draw_samples(
        found,
        fmt,
        tokenizer,
        tally,
        checks,
        num_rows=sample,
        sizes=sizes,
        begins=begins,
        progress=progress,
    )
    if not batch.labels.any():
        where = f"the {tally.num_rows:,} rows drawn from {data.files[0]}"
        raise DataError(nothing_left(tally, num_samples=batch.num_samples, where=where))
    cache = write_cache(
        _sample_directory(directory, sample), [batch], files=data.files, is_complete=lambda: False
    )
    profile = _describe(cache, tally, data=data, tokenizer=tokenizer, weights=weights)
    profile = what_was_seen(
        profile, cache, tally=tally, checks=checks, tokenizer=tokenizer, files=found, fmt=fmt
    )
    num_skipped = len(sizes) - profile.num_samples
    return replace(
        profile,
        num_rows=len(sizes),
        skipped=apportion(num_skipped, tally.skipped),
        sampled=draw.sampled,
    )


def _sample_directory(directory: Path, sample: int) -> Path:
    return directory.with_name(f"{directory.name}-sample{sample}")


def data_fingerprint(files: Sequence[DataFile], fmt: RowFormat, tokenizer_hash: str) -> str:
    """Return a name that changes with the files, the format, the keys and the renderer."""
    facts = {
        "files": [f.identity for f in files],
        "format": fmt.name,
        "keys": fmt.keys,
        "tokenizer": tokenizer_hash,
        "rendering_version": RENDERING_VERSION,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _known_profile(directory: Path) -> LengthProfile | None:
    try:
        cache = TokenCache.open(directory, partial_ok=True)
        known = read_record(LengthProfile, directory / "profile.json")
    except AutobatchError:
        return None  # missing, damaged, unreadable or of an older version: written anew
    is_whole = known.complete and cache.complete and known.num_samples == cache.num_samples
    if not (is_whole or known.sampled) or not known.max_length.curve:
        return None
    return replace(known, cache_dir=str(directory))


def _describe(
    cache: TokenCache,
    tally: Tally,
    *,
    data: DataSource,
    tokenizer: Tokenizer,
    weights: np.ndarray | None = None,
) -> LengthProfile:
    """Describe the samples of a cache, each standing for so many rows as `weights` says."""
    population = None if weights is None else np.repeat(np.arange(cache.num_samples), weights)
    lengths, label_tokens = cache.lengths, cache.label_tokens
    if population is not None:
        lengths, label_tokens = lengths[population], label_tokens[population]

    def kept_labels(indices: np.ndarray, max_length: int) -> np.ndarray:
        if population is None:
            return kept_label_tokens(cache, indices, max_length=max_length, truncation="right")
        own, places = np.unique(population[indices], return_inverse=True)
        kept = kept_label_tokens(cache, own, max_length=max_length, truncation="right")
        return np.asarray(kept[places])

    advice = advise(lengths, label_tokens=label_tokens, kept_labels=kept_labels)
    return LengthProfile(
        data=data,
        model=None,
        tokenizer=tokenizer.directory,
        template_hash=tokenizer.template_hash,
        cache_dir=str(cache.directory),
        complete=cache.complete,
        num_rows=tally.num_rows,
        num_samples=len(lengths),
        skipped=dict(tally.skipped),
        num_rows_without_labels=int((label_tokens == 0).sum()),
        num_tokens=int(lengths.sum()),
        num_label_tokens=int(label_tokens.sum()),
        length=length_stats(lengths),
        histogram=length_histogram(lengths),
        max_length=advice,
        longest=_longest(cache),
        skipped_rows={
            reason: tuple(RowPlace(file=data.files[file], row=row) for _, file, row in places)
            for reason, places in tally.examples.items()
        },
    )


def _longest(cache: TokenCache) -> tuple[LongRow, ...]:
    order = np.argsort(-cache.lengths, kind="stable")[:_LONGEST_ROWS]
    rows = []
    for i in order:
        file, row = cache.source(int(i))
        rows.append(LongRow(file=file, row=row, length_tokens=int(cache.lengths[i])))
    return tuple(rows)
