"""Measure the token lengths of a data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from autobatch.dataset.advice import advise
from autobatch.dataset.cache import TokenCache, write_cache
from autobatch.dataset.counting import count_all
from autobatch.dataset.files import DataFile, find_files, read_columns, read_rows
from autobatch.dataset.findings import nothing_left, warnings_of
from autobatch.dataset.formats import RowFormat, choose_format
from autobatch.dataset.interrupting import interrupt_asked
from autobatch.dataset.lengths import length_histogram, length_stats
from autobatch.dataset.parallel import render_rows
from autobatch.dataset.rendering import RENDERING_VERSION, Row
from autobatch.dataset.samples import SampleBatch
from autobatch.dataset.tokenizer import Tokenizer, load_tokenizer, tokenizer_digest
from autobatch.dataset.truncation import kept_label_tokens
from autobatch.dataset.turns import Tally
from autobatch.errors import AutobatchError, DataError
from autobatch.records import DataSource, LengthProfile, LongRow, RowPlace
from autobatch.storage import cache_root, read_record, write_json

Progress = Callable[[int, int | None], None]
_LONGEST_ROWS = 20


class ProfileInterrupted(KeyboardInterrupt):
    """The user's interrupt; `profile` tells of the rows that were done."""

    def __init__(self, profile: LengthProfile) -> None:
        """Keep the profile."""
        super().__init__(f"{profile.num_rows} rows done")
        self.profile = profile


def profile_lengths(
    files: Sequence[str],
    *,
    tokenizer_dir: str,
    model: str | None = None,
    format: str = "auto",
    keys: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> LengthProfile:
    """Return the length profile of files, and keep their ids in a token cache.

    The second call for the same files, tokenizer, template and keys reads the first one's
    answer. `progress` is told (rows done, rows in all or None where files do not say).

    Raises:
        DataError: if a file cannot be read, no format matches, or no row can be trained on.
        ModelError: if the tokenizer directory cannot be used.
        ConfigError: if a format or key name is unknown.
        ProfileInterrupted: on an interrupt, with the profile of the rows done until then.
    """
    found = find_files(files)
    tokenizer_hash = tokenizer_digest(tokenizer_dir)
    fmt = choose_format(found, format=format, keys=keys)
    fingerprint = data_fingerprint(found, fmt, tokenizer_hash)
    directory = cache_root() / "tokens" / fingerprint
    known = _known_profile(directory)
    if known is not None:
        return replace(known, model=model, tokenizer=tokenizer_dir)

    tokenizer = load_tokenizer(tokenizer_dir)
    tally = Tally()
    total = count_all(found)
    names = tuple(file.path for file in found)
    with interrupt_asked() as is_asked:
        batches = render_rows(_rows(found, fmt), fmt, tokenizer, tally, num_rows=total)
        watched = _watched(batches, tally, names[0], is_asked, progress, total)
        cache = write_cache(directory, watched, files=names, is_complete=lambda: not is_asked())
    profile = _describe(
        cache,
        tally,
        data=DataSource(files=names, format=fmt.name, keys=fmt.keys, fingerprint=fingerprint),
        tokenizer=tokenizer,
        media=_media_columns(found[0]),
    )
    write_json(cache.directory / "profile.json", profile)
    profile = replace(profile, model=model)
    if not profile.complete:
        raise ProfileInterrupted(profile)
    return profile


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


def _rows(files: Sequence[DataFile], fmt: RowFormat) -> Iterator[Row]:
    for file_index, file in enumerate(files):
        for row_index, row in enumerate(read_rows(file, fmt.columns)):
            yield file_index, row_index, row


def _watched(
    batches: Generator[SampleBatch],
    tally: Tally,
    where: str,
    is_asked: Callable[[], bool],
    progress: Progress | None,
    total: int | None,
) -> Iterator[SampleBatch]:
    """Pass batches on until an interrupt is asked for, and say how many rows are done.

    Fail at the end, before the cache is named, if no row can be trained on.
    """
    num_samples = num_label_tokens = 0
    with closing(batches):
        if progress is not None:
            progress(0, total)
        for batch in batches:
            num_samples += batch.num_samples
            num_label_tokens += int(batch.table[:, 1].sum())
            yield batch
            if is_asked():
                break
            if progress is not None and tally.num_rows != total:
                # the count may be an estimate, which rows overtake
                progress(tally.num_rows, total if total and total > tally.num_rows else None)
        else:
            if progress is not None:
                progress(tally.num_rows, tally.num_rows)
    if not num_label_tokens:
        if is_asked():
            raise KeyboardInterrupt
        raise DataError(nothing_left(tally, num_samples=num_samples, where=where))


def _media_columns(file: DataFile) -> tuple[str, ...]:
    return tuple(
        name
        for name in read_columns(file)
        if name in ("image", "images", "video", "videos", "audio", "audios")
    )


def _describe(
    cache: TokenCache,
    tally: Tally,
    *,
    data: DataSource,
    tokenizer: Tokenizer,
    media: tuple[str, ...],
) -> LengthProfile:
    advice = advise(
        cache.lengths,
        label_tokens=cache.label_tokens,
        kept_labels=lambda indices, max_length: kept_label_tokens(
            cache, indices, max_length=max_length, truncation="right"
        ),
    )
    num_without = int((cache.label_tokens == 0).sum())
    return LengthProfile(
        data=data,
        model=None,
        tokenizer=tokenizer.directory,
        template_hash=tokenizer.template_hash,
        cache_dir=str(cache.directory),
        complete=cache.complete,
        num_rows=tally.num_rows,
        num_samples=cache.num_samples,
        skipped=dict(tally.skipped),
        num_rows_without_labels=num_without,
        num_tokens=int(cache.lengths.sum()),
        num_label_tokens=int(cache.label_tokens.sum()),
        length=length_stats(cache.lengths),
        histogram=length_histogram(cache.lengths),
        max_length=advice,
        warnings=warnings_of(
            tally,
            num_rows_without_labels=num_without,
            advice=advice,
            has_eos=tokenizer.eos_id is not None,
            needs_eos=data.format == "text" or tokenizer.template_hash is None,
            media=media,
        ),
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
