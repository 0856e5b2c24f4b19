"""Measure the token lengths of a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autobatch.dataset.advice import advise
from autobatch.dataset.cache import TokenCache, write_cache
from autobatch.dataset.facts import is_an_answer, what_was_seen
from autobatch.dataset.files import DataFile, count_rows, find_files, read_rows
from autobatch.dataset.findings import nothing_left
from autobatch.dataset.for_model import for_model
from autobatch.dataset.formats import RowFormat, choose_format
from autobatch.dataset.lengths import length_histogram, length_stats
from autobatch.dataset.rendering import RENDERING_VERSION, Sample, render_rows
from autobatch.dataset.row_checks import RowChecks, check_turn_by_turn
from autobatch.dataset.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from autobatch.dataset.truncation import kept_label_tokens
from autobatch.dataset.turns import Tally
from autobatch.errors import AutobatchError, DataError
from autobatch.records import DataSource, LengthProfile, LongRow, RowPlace
from autobatch.storage import cache_root, read_record, write_json

Progress = Callable[[int, int | None], None]
_PROGRESS_ROWS = 500
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
    progress: Progress | None = None,
) -> LengthProfile:
    """Return the length profile of files, and keep their ids in a token cache.

    The second call for the same files, tokenizer, template and keys reads the first one's
    answer. `turn_by_turn` is how many conversations are rendered message by message too: all,
    sample or off; None takes what is known, else a sample. `text_only` says that media beside
    the text are not trained on. `progress` is told (rows done, rows in all or None where files
    do not say).

    Raises:
        DataError: if a file cannot be read, no format matches, or no row can be trained on.
        ModelError: if the tokenizer directory cannot be used.
        ConfigError: if a format, a key name or `turn_by_turn` is unknown.
    """
    check_turn_by_turn(turn_by_turn)
    found = find_files(files)
    tokenizer_hash = tokenizer_digest(tokenizer_dir)
    fmt = choose_format(found, format=format, keys=keys)
    fingerprint = data_fingerprint(found, fmt, tokenizer_hash)
    directory = cache_root() / "tokens" / fingerprint
    known = _known_profile(directory)
    if known is not None and is_an_answer(known, turn_by_turn):
        return for_model(replace(known, tokenizer=tokenizer_dir), model=model, text_only=text_only)

    tokenizer = load_tokenizer(tokenizer_dir)
    tally = Tally()
    checks = RowChecks(tokenizer, turn_by_turn=turn_by_turn or "sample", num_rows=_num_rows(found))
    samples = render_rows(_rows(found, fmt, progress), fmt, tokenizer, tally, checks)
    names = tuple(file.path for file in found)
    cache = write_cache(directory, _some(samples, tally, names[0]), files=names)
    profile = _describe(
        cache,
        tally,
        data=DataSource(files=names, format=fmt.name, keys=fmt.keys, fingerprint=fingerprint),
        tokenizer=tokenizer,
    )
    profile = what_was_seen(
        profile, cache, tally=tally, checks=checks, tokenizer=tokenizer, files=found, fmt=fmt
    )
    write_json(directory / "profile.json", profile)
    return for_model(profile, model=model, text_only=text_only)


def data_fingerprint(files: Sequence[DataFile], fmt: RowFormat, tokenizer_hash: str) -> str:
    """Return a name that changes with the files, the format, the keys and the renderer."""
    facts = {
        "files": [[f.path, f.size_bytes, f.mtime_ns] for f in files],
        "format": fmt.name,
        "keys": fmt.keys,
        "tokenizer": tokenizer_hash,
        "rendering_version": RENDERING_VERSION,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def _known_profile(directory: Path) -> LengthProfile | None:
    try:
        cache = TokenCache.open(directory)
        known = read_record(LengthProfile, directory / "profile.json")
    except AutobatchError:
        return None  # missing, damaged, unreadable or of an older version: written anew
    if known.num_samples != cache.num_samples or not known.max_length.curve:
        return None
    return replace(known, cache_dir=str(directory))


def _rows(
    files: Sequence[DataFile], fmt: RowFormat, progress: Progress | None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    total = _num_rows(files)
    done = 0
    for file_index, file in enumerate(files):
        for row_index, row in enumerate(read_rows(file, fmt.columns)):
            yield file_index, row_index, row
            done += 1
            if progress is not None and done % _PROGRESS_ROWS == 0:
                progress(done, total)
    if progress is not None:
        progress(done, total)


def _num_rows(files: Sequence[DataFile]) -> int | None:
    counts = [count_rows(file) for file in files]
    return None if None in counts else sum(c for c in counts if c is not None)


def _some(samples: Iterator[Sample], tally: Tally, where: str) -> Iterator[Sample]:
    """Pass samples on; fail at the end, before the cache is named, if none can be trained on."""
    num_samples = num_label_tokens = 0
    for sample in samples:
        num_samples += 1
        num_label_tokens += int(sample.label_mask.sum())
        yield sample
    if not num_label_tokens:
        raise DataError(nothing_left(tally, num_samples=num_samples, where=where))


def _describe(
    cache: TokenCache,
    tally: Tally,
    *,
    data: DataSource,
    tokenizer: Tokenizer,
) -> LengthProfile:
    advice = advise(
        cache.lengths,
        label_tokens=cache.label_tokens,
        kept_labels=lambda indices, max_length: kept_label_tokens(
            cache, indices, max_length=max_length, truncation="right"
        ),
    )
    return LengthProfile(
        data=data,
        model=None,
        tokenizer=tokenizer.directory,
        template_hash=tokenizer.template_hash,
        cache_dir=str(cache.directory),
        complete=True,
        num_rows=tally.num_rows,
        num_samples=cache.num_samples,
        skipped=dict(tally.skipped),
        num_rows_without_labels=int((cache.label_tokens == 0).sum()),
        num_tokens=int(cache.lengths.sum()),
        num_label_tokens=int(cache.label_tokens.sum()),
        length=length_stats(cache.lengths),
        histogram=length_histogram(cache.lengths),
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
