"""A sample says how wrong it may be, and is not."""

from __future__ import annotations

import numpy as np
import pytest

from autobatch.dataset.lengths.drawing import row_sizes
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.lengths.sampling import apportion, draw_rows, text_size
from autobatch.dataset.lengths.stats import length_stats
from autobatch.dataset.rows.files import find_files, read_rows
from autobatch.dataset.rows.formats import choose_format
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.errors import ConfigError, DataError
from tests.test_dataset_shared import DATA, QWEN3, STATS
from tests.tiny import train_tokenizer, write_jsonl, write_parquet

needs_shared = pytest.mark.skipif(not STATS.exists(), reason="needs the shared data sets")
PERCENTILES = ("p50", "p90", "p95", "p99")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep token caches of this module apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer directory."""
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@needs_shared
@pytest.mark.parametrize(("name", "num_rows"), [("gsm8k", 500), ("sharegpt_zh", 200)])
def test_the_stated_errors_hold_for_real_rows(name, num_rows):
    """Percentiles and sums are within their errors for 19 of 20 seeds, the longest is exact."""
    file = DATA / name / "train.parquet"
    profile = profile_lengths([str(file)], tokenizer_dir=str(QWEN3))
    found = find_files([str(file)])
    sizes, _ = row_sizes(found, choose_format(found))
    lengths = TokenCache.open(profile.cache_dir).lengths
    held = dict.fromkeys((*PERCENTILES, "tokens"), 0)
    for seed in range(20):
        draw = draw_rows(sizes, lambda rows: lengths[rows], num_rows=num_rows, seed=seed)
        assert len(sizes) == draw.weights.sum() == draw.sampled.num_rows
        assert draw.sampled.num_rows_read < 3 * num_rows
        estimate = np.repeat(lengths[draw.rows], draw.weights)
        stats = length_stats(estimate)
        assert profile.length.max == stats.max
        for p in PERCENTILES:
            wrong = abs(getattr(stats, p) - getattr(profile.length, p))
            held[p] += wrong <= draw.sampled.error_tokens[p]
        wrong = abs(int(estimate.sum()) - profile.num_tokens)
        held["tokens"] += wrong <= draw.sampled.num_tokens_error_fraction * profile.num_tokens
    assert min(held.values()) >= 19


@needs_shared
@pytest.mark.parametrize("name", ["gsm8k", "sharegpt_zh", "messages_tools_agent"])
def test_arrow_counts_the_characters_that_rows_have(name):
    """Sizes computed on Arrow columns are those of the rows themselves."""
    found = find_files([str(DATA / name / "train.parquet")])
    fmt = choose_format(found)
    sizes, begins = row_sizes(found, fmt)
    assert sizes.tolist() == [text_size(row) for row in read_rows(found[0], fmt.columns)]
    assert begins.tolist() == [0]


def rows(num_rows: int) -> list[dict]:
    """Return texts of 1 to 40 words, every tenth null."""
    lengths = np.random.default_rng(1).integers(1, 40, num_rows)
    texts = ["two" + " plus two" * int(n) for n in lengths]
    return [{"text": None if i % 10 == 9 else text} for i, text in enumerate(texts)]


def test_a_sampled_profile_speaks_for_all_rows(tmp_path, tokenizer):
    """Counts are of the whole, skipped rows included; longest rows keep their own numbers."""
    files = [
        write_jsonl(tmp_path / "a.jsonl", rows(1500)),
        write_jsonl(tmp_path / "b.jsonl", [*rows(1499), {"text": "two plus two" * 100}]),
    ]
    estimate = profile_lengths(files, tokenizer_dir=tokenizer, sample=300)
    whole = profile_lengths(files, tokenizer_dir=tokenizer)
    assert not estimate.complete
    assert estimate.sampled.num_rows_read < 1000
    assert whole.num_rows == estimate.num_rows == 3000
    assert estimate.num_rows == estimate.num_samples + sum(estimate.skipped.values())
    assert estimate.num_samples == sum(count for _, count in estimate.histogram)
    assert estimate.skipped["text is null"] == pytest.approx(300, rel=0.4)
    assert whole.longest[0] == estimate.longest[0]
    assert (files[1], 1499) == (estimate.longest[0].file, estimate.longest[0].row)
    assert whole.length.max == estimate.length.max
    error = estimate.sampled.error_tokens["p50"]
    assert abs(whole.length.p50 - estimate.length.p50) <= error
    for place in estimate.skipped_rows["text is null"]:
        assert place.row % 10 == 9


def test_a_sample_is_no_cache_of_all_rows(tmp_path, tokenizer):
    """Its token cache is refused where every row is needed, and read where a part will do."""
    file = write_parquet(tmp_path / "a.parquet", rows(500))
    estimate = profile_lengths([file], tokenizer_dir=tokenizer, sample=100)
    with pytest.raises(DataError, match="only some of the rows; run autobatch profile again"):
        TokenCache.open(estimate.cache_dir)
    assert not TokenCache.open(estimate.cache_dir, partial_ok=True).complete
    again = profile_lengths([file], tokenizer_dir=tokenizer, sample=100)
    assert estimate == again
    whole = profile_lengths([file], tokenizer_dir=tokenizer)
    assert whole.complete
    assert whole == profile_lengths([file], tokenizer_dir=tokenizer, sample=100)


def test_a_sample_of_more_rows_than_there_are_is_the_whole(tmp_path, tokenizer):
    """Nothing is estimated that can be counted."""
    file = write_jsonl(tmp_path / "a.jsonl", rows(60))
    profile = profile_lengths([file], tokenizer_dir=tokenizer, sample=60)
    assert (True, None) == (profile.complete, profile.sampled)


@pytest.mark.parametrize("sample", [0, -5, 49])
def test_a_sample_too_small_is_refused(tmp_path, tokenizer, sample):
    """A handful of rows tells nothing of the long end."""
    file = write_jsonl(tmp_path / "a.jsonl", rows(60))
    with pytest.raises(ConfigError, match="draw 50 or more"):
        profile_lengths([file], tokenizer_dir=tokenizer, sample=sample)


@pytest.mark.parametrize("sizes", [[100] * 1000, [1] * 999 + [10**6], list(range(1000)), [0] * 99])
def test_weights_speak_for_every_row(sizes):
    """Whatever the shape: weights add up to all rows, and the longest text is read."""
    sizes = np.array(sizes)
    draw = draw_rows(sizes, lambda rows: sizes[rows] // 4 + 5, num_rows=50)
    assert len(sizes) == draw.weights.sum()
    assert draw.weights.min() > 0
    assert sizes.max() == sizes[draw.rows].max()


def test_shares_are_whole_and_complete():
    """Largest remainders are rounded up, and nothing is lost."""
    assert {"a": 7, "b": 3} == apportion(10, {"a": 2, "b": 1})
    assert {} == apportion(0, {"a": 2})
    assert {} == apportion(3, {})
