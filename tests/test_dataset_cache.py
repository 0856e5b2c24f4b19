"""Caches are whole or refused, and a second profile is immediate."""

from __future__ import annotations

import numpy as np
import pytest

from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.errors import DataError
from autobatch.records import LengthProfile
from autobatch.storage import read_record
from tests.tiny import train_tokenizer, write_jsonl, write_parquet

ROWS = [{"text": "two"}, {"text": "two plus two"}, {"text": None}, {"text": "four"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer directory."""
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def profile(tmp_path, tokenizer):
    """The profile of two files."""
    files = [
        write_jsonl(tmp_path / "a.jsonl", ROWS),
        write_parquet(tmp_path / "b.parquet", ROWS[:2]),
    ]
    return profile_lengths(files, tokenizer_dir=tokenizer, model="m")


def test_source_names_file_and_row(profile):
    """Each sample knows the file and row it came from, skipped rows counted."""
    cache = TokenCache.open(profile.cache_dir)
    sources = [(name.rpartition("/")[2], row) for name, row in map(cache.source, range(5))]
    assert sources == [
        ("a.jsonl", 0),
        ("a.jsonl", 1),
        ("a.jsonl", 3),
        ("b.parquet", 0),
        ("b.parquet", 1),
    ]


def test_cache_holds_int32_ids_and_bool_masks(profile):
    """ids are int32, masks bool, lengths int64, all of one length a sample."""
    cache = TokenCache.open(profile.cache_dir)
    assert cache.ids(1).dtype == np.int32
    assert cache.label_mask(1).dtype == bool
    assert cache.lengths.dtype == np.int64
    assert cache.lengths[1] == len(cache.ids(1)) == len(cache.label_mask(1))


def test_rows_are_samples_and_skipped(profile):
    """num_rows = num_samples + skipped."""
    assert profile.num_rows == profile.num_samples + sum(profile.skipped.values())


def test_second_profile_comes_from_the_cache(profile, tokenizer):
    """The same data is not read again; only model and tokenizer are said anew."""
    calls = []
    again = profile_lengths(
        profile.data.files,
        tokenizer_dir=tokenizer,
        model="m",
        progress=lambda done, total: calls.append((done, total)),
    )
    assert profile == again
    assert not calls


def test_changed_file_is_profiled_anew(tmp_path, profile, tokenizer):
    """Another size or time of a file is another fingerprint."""
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"text": "more"}])
    again = profile_lengths(profile.data.files, tokenizer_dir=tokenizer)
    assert again.data.fingerprint != profile.data.fingerprint


def test_profile_lies_beside_the_cache(profile):
    """profile.json in the cache reads back as the record."""
    found = read_record(
        LengthProfile, TokenCache.open(profile.cache_dir).directory / "profile.json"
    )
    assert profile.histogram == found.histogram


@pytest.mark.parametrize("name", ["meta.json", "tokens.bin", "labels.bin", "samples.bin"])
def test_incomplete_cache_is_refused_then_rebuilt(profile, tokenizer, name):
    """A cache without one of its files says so; profile writes it again."""
    directory = TokenCache.open(profile.cache_dir).directory
    (directory / name).unlink()
    with pytest.raises(DataError, match="run autobatch profile again"):
        TokenCache.open(directory)
    assert profile == profile_lengths(profile.data.files, tokenizer_dir=tokenizer, model="m")


def test_shortened_cache_is_refused(profile):
    """A file that lost bytes is damaged, never read as zeros."""
    path = TokenCache.open(profile.cache_dir).directory / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged; run autobatch profile again"):
        TokenCache.open(profile.cache_dir)


def test_failed_profile_leaves_no_files(tmp_path, tokenizer):
    """A bad line in the middle leaves nothing behind."""
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n' * 100 + "{\n")
    with pytest.raises(DataError, match=r"c\.jsonl:101"):
        profile_lengths([str(path)], tokenizer_dir=tokenizer)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_progress_counts_rows_of_the_total(tmp_path, tokenizer):
    """The first call begins the count, the last one says that all rows are done, once."""
    calls = []
    file = write_parquet(tmp_path / "c.parquet", ROWS * 600)
    profile_lengths([file], tokenizer_dir=tokenizer, progress=lambda *call: calls.append(call))
    assert calls == [(0, 2400), (1024, 2400), (2048, 2400), (2400, 2400)]


def test_lines_are_counted_for_progress(tmp_path, tokenizer):
    """A jsonl file has a total too, so that the remaining time can be told."""
    calls = []
    file = write_jsonl(tmp_path / "c.jsonl", ROWS * 600)
    profile_lengths([file], tokenizer_dir=tokenizer, progress=lambda *call: calls.append(call))
    assert calls == [(0, 2400), (1000, 2400), (2000, 2400), (2400, 2400)]


def test_unwritable_cache_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    """A cache folder that cannot be made names AUTOBATCH_CACHE."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "file"))
    file = write_jsonl(tmp_path / "c.jsonl", ROWS)
    with pytest.raises(DataError, match="AUTOBATCH_CACHE"):
        profile_lengths([file], tokenizer_dir=tokenizer)


def test_unknown_sharegpt_roles_are_listed(tmp_path, tokenizer):
    """Tags nobody knows are counted, in the warning and in the error when nothing is left."""
    strange = {"conversations": [{"from": "bing", "value": "a"}, {"from": "user_1", "value": "b"}]}
    usual = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    file = write_jsonl(tmp_path / "c.jsonl", [strange, usual])
    profile = profile_lengths([file], tokenizer_dir=tokenizer)
    assert "unknown roles: bing (1), user_1 (1)" in [w.seen for w in profile.warnings]
    file = write_jsonl(tmp_path / "d.jsonl", [strange] * 2)
    with pytest.raises(DataError, match=r"unknown roles: bing \(2\), user_1 \(2\)"):
        profile_lengths([file], tokenizer_dir=tokenizer)
