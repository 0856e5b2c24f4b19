"""The advised max_length is right for strange sets, and says what it does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autobatch.dataset.lengths.advice import BATCH_ROWS, advise, without_outliers
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.lengths.stats import two_groups
from tests.tiny import train_tokenizer, write_jsonl, write_parquet


def advice(lengths, label_tokens=None):
    """Advise on rows whose labels come last (all but the first token, unless told)."""
    lengths = np.array(lengths, dtype=np.int64)
    labels = np.maximum(lengths - 1, 0) if label_tokens is None else np.array(label_tokens)

    def kept(indices, max_length):
        return np.maximum(0, max_length - (lengths - labels)[indices])

    return advise(lengths, label_tokens=labels, kept_labels=kept)


def option(advised, max_length):
    """Return one candidate of the curve."""
    return next(o for o in advised.curve if o.max_length == max_length)


def groups(lengths):
    """Return the two groups of lengths."""
    return two_groups(*np.unique(np.array(lengths), return_counts=True))


# ---- one number ------------------------------------------------------------


def test_one_outlier_is_cut_and_the_run_warned():
    """999 rows of 50 and one of 200,000: 56, with what it costs and what would stop (A07)."""
    advised = advice([50] * 999 + [200_000])
    assert advised.recommended == 56
    assert advised.reason == (
        "It cuts 1 of 1000 rows with 80.31% of label tokens and leaves 0 rows without labels; "
        "truncation=error would end the run at the first, so set data.truncation=right, left or "
        "drop; p99 is 50 tokens, 1 row up to 200000 stands apart."
    )


def test_the_cost_of_each_candidate_is_exact():
    """Rows cut, label tokens lost, rows without labels and padding, counted by hand (A14)."""
    advised = advice([10] * 8 + [210] * 8, [5] * 8 + [10] * 8)
    at = option(advised, 128)
    assert (at.rows_cut, at.label_tokens_lost, at.rows_without_labels) == (8, 80, 8)
    assert at.padding_fraction.to_max_length == pytest.approx(1 - 10 / 128)
    whole = option(advised, 216)
    assert (whole.rows_cut, whole.label_tokens_lost, whole.rows_without_labels) == (0, 0, 0)
    assert whole.padding_fraction.sorted == pytest.approx(1 - 1760 / (8 * 16 + 8 * 216))
    assert whole.padding_fraction.to_max_length == pytest.approx(1 - 1760 / (16 * 216))


def test_answers_behind_a_long_prompt_are_counted_as_lost():
    """64 rows of a 200-token prompt with a 10-token answer: 205 keeps 5 each, 128 none (A14)."""
    advised = advice([210] * 64 + [20] * 8, [10] * 64 + [10] * 8)
    assert option(advised, 216).rows_without_labels == 0
    lengths = np.array([210] * 64 + [20] * 8)
    labels = np.full(72, 10)
    from autobatch.dataset.lengths.advice import cost_of

    for max_length, lost, empty in ((128, 640, 64), (205, 320, 0), (256, 0, 0)):
        cost = cost_of(
            max_length,
            lengths,
            label_tokens=labels,
            kept_labels=lambda rows, at: np.maximum(0, at - (lengths - labels)[rows]),
        )
        assert (cost.label_tokens_lost, cost.rows_without_labels) == (lost, empty)


def test_nothing_is_cut_where_rows_are_alike():
    """All within 5 % of 1000: nothing is cut, and p95 is told for what it would do (A07)."""
    advised = advice(range(950, 1050))
    assert advised.recommended == 1056
    assert advised.reason == (
        "Nothing is cut: the longest row, 1049 tokens, is within 2 times p99 (1048); p95 (1044) "
        "would cut 5 rows, and with truncation=error the first of them ends the run."
    )


@pytest.mark.parametrize(
    ("lengths", "recommended"),
    [
        ([1], 8),
        ([7], 8),
        ([8] * 5, 8),
        ([1, 2, 3], 8),
        ([9], 16),
        ([300] * 1000, 304),
        ([1, 100_000], 100_000),  # half of two rows is no outlier
        ([50] * 19 + [200_000], 56),  # one of twenty is, where it is far off
        ([50] * 19 + [120], 120),  # not where it is near
    ],
)
def test_strange_sets(lengths, recommended):
    """One row, equal rows, tiny rows, few rows."""
    advised = advice(lengths)
    assert advised.recommended == recommended
    assert all(o.max_length % 8 == 0 for o in advised.curve)
    assert advised.reason.endswith(".")


def test_rows_without_any_label_are_no_crash():
    """Nothing trains, so nothing is padded; every row is counted as one without labels."""
    advised = advice([10, 20, 3000], [0, 0, 0])
    assert [o.rows_without_labels for o in advised.curve] == [3] * len(advised.curve)
    assert {o.padding_fraction.to_longest for o in advised.curve} == {0.0}


def test_padding_counts_only_rows_that_train():
    """A row that a cut leaves without labels is in no batch."""
    advised = advice([16] * BATCH_ROWS + [1000] * BATCH_ROWS, [8] * BATCH_ROWS + [1] * BATCH_ROWS)
    assert option(advised, 64).padding_fraction.to_longest == 0.0
    assert option(advised, 1000).padding_fraction.to_longest > 0.0


def test_a_row_twice_the_next_stands_apart():
    """Among the longest 1 %; ten rows of a thousand may, eleven may not."""
    assert without_outliers(np.array([100] * 990 + [200] * 10)) == 100
    assert without_outliers(np.array([100] * 989 + [200] * 11)) == 200
    assert without_outliers(np.array([100] * 990 + [199] * 10)) == 199


def test_millions_of_rows_are_weighed_without_a_loop():
    """Two million rows: no Python step a row (it would take half a minute)."""
    lengths = np.random.default_rng(0).integers(20, 400, 2_000_000)
    advised = advice(lengths)
    assert advised.recommended == 400
    assert option(advised, 256).rows_cut == int((lengths > 256).sum())


# ---- two groups ------------------------------------------------------------


def test_two_groups_are_told_with_their_shares():
    """Half 100, half 4000: the reason names both and advises no magic number (A07)."""
    advised = advice([100] * 50 + [4000] * 50)
    assert advised.recommended == 4000
    assert (
        "50% of the rows are around 100 tokens and 50% around 4000, so no one number suits both: "
        "batch rows by length or train padding-free (model.use_remove_padding=true)."
    ) in advised.reason


def test_shares_and_medians_of_two_clouds():
    """Two bells, 30 and 70 %."""
    random = np.random.default_rng(0)
    found = groups([*random.normal(200, 20, 300).astype(int), *random.normal(6000, 500, 700)])
    assert found is not None
    assert (round(found.short_share, 2), round(found.long_share, 2)) == (0.3, 0.7)
    assert found.short_tokens == pytest.approx(200, abs=5)
    assert found.long_tokens == pytest.approx(6000, abs=50)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_one_bell_is_one_group(sigma):
    """However wide a single cloud is."""
    assert groups(np.random.default_rng(1).lognormal(6, sigma, 5000).astype(int) + 1) is None


@pytest.mark.parametrize(
    "lengths",
    [
        [5] * 100,
        [100] * 95 + [4000] * 5,
        list(range(1, 2000)),
        [100, 4000],
        [100] * 50 + [300] * 50,
        [0] * 3,
    ],
    ids=["equal", "few long", "even", "two rows", "near", "empty"],
)
def test_no_two_groups(lengths):
    """Equal rows, a few long ones, an even spread, too few rows, groups too near."""
    assert groups(lengths) is None


# ---- the model -------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer that trains once."""
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def model(tmp_path, tokenizer):
    """Make model directories: a config beside the tokenizer's files."""

    def make(**changes) -> str:
        config = {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 1000,
            "max_position_embeddings": 512,
            **changes,
        }
        folder = tmp_path / f"model{len(list(tmp_path.glob('model*')))}"
        folder.mkdir()
        for file in Path(tokenizer).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def chats(*num_words: int) -> list[dict]:
    """Make one question and answer for each number of words."""
    return [
        {
            "messages": [
                {"role": "user", "content": "two"},
                {"role": "assistant", "content": "plus " * n},
            ]
        }
        for n in num_words
    ]


def ids(profile) -> list[str]:
    """Return the ids of all warnings."""
    return [w.id for w in profile.warnings]


def test_no_advice_beyond_the_positions(tmp_path, model):
    """The model takes 128: capped, said, and the rows beyond are counted."""
    file = write_jsonl(tmp_path / "a.jsonl", chats(*[20] * 8, *[200] * 8))
    uncapped = profile_lengths([file], tokenizer_dir=model(), model=model())
    assert uncapped.max_length.recommended > 128
    assert "too_long_for_model" not in ids(uncapped)
    folder = model(max_position_embeddings=128)
    capped = profile_lengths([file], tokenizer_dir=folder, model=folder)
    assert capped.max_length.recommended == 128
    assert re.search(
        rf"^It cuts 8 of 16 rows .* the model takes 128 tokens \(max_position_embeddings\), else "
        rf"{uncapped.max_length.recommended} would be advised\.$",
        capped.max_length.reason,
    )
    seen = next(w.seen for w in capped.warnings if w.id == "too_long_for_model")
    assert seen.startswith("8 of 16 rows are longer than the 128 positions of the model")
    at = option(capped.max_length, 128)
    assert (at.rows_cut, at.label_tokens_lost > 0) == (8, True)
    assert profile_lengths([file], tokenizer_dir=folder).max_length == uncapped.max_length


def test_positions_that_are_no_multiple_of_8(tmp_path, model):
    """The cap is rounded down, never up."""
    folder = model(max_position_embeddings=101)
    file = write_jsonl(tmp_path / "a.jsonl", chats(20, 200))
    advised = profile_lengths([file], tokenizer_dir=folder, model=folder).max_length
    assert advised.recommended == 96


def test_a_profile_without_a_cache_takes_the_widest_known(tmp_path, model):
    """A shipped profile cannot weigh a new candidate."""
    from autobatch.dataset.lengths.for_model import for_model

    file = write_jsonl(tmp_path / "a.jsonl", chats(*range(20, 200)))
    whole = profile_lengths([file], tokenizer_dir=model())
    shipped = replace(whole, cache_dir=None)
    capped = for_model(shipped, model=model(max_position_embeddings=190), text_only=False)
    known = [o.max_length for o in whole.max_length.curve if o.max_length <= 190]
    assert capped.max_length.recommended == known[-1]
    none = for_model(shipped, model=model(max_position_embeddings=16), text_only=False)
    assert none.max_length.recommended is None
    assert "beyond the 16 positions" in none.max_length.reason


def test_a_broken_config_is_said(tmp_path, model):
    """Nothing is checked against it, and the reader knows."""
    folder = model(hidden_size="x")
    file = write_jsonl(tmp_path / "a.jsonl", chats(20, 30))
    profile = profile_lengths([file], tokenizer_dir=folder, model=folder)
    assert "model_unread" in ids(profile)


# ---- media -----------------------------------------------------------------

PNG = b"\x89PNG" + bytes(60)


def with_images(*counts: tuple[int, int]) -> list[dict]:
    """Make one row for each (marks in the text, images beside it)."""
    return [
        {
            "messages": [
                {"role": "user", "content": "<image>" * marks + "two"},
                {"role": "assistant", "content": "plus"},
            ],
            "images": [{"bytes": PNG, "path": None}] * images,
        }
        for marks, images in counts
    ]


def test_images_withhold_the_advice(tmp_path, model):
    """A lower bound advises nothing, unless only text is trained on (A17)."""
    file = write_parquet(tmp_path / "a.parquet", with_images((1, 1), (2, 1), (1, 1), (0, 0)))
    for folder in (None, model(vision_config={})):
        profile = profile_lengths([file], tokenizer_dir=model(), model=folder)
        assert profile.media == ("images",)
        assert profile.max_length.recommended is None
        assert "rows hold media (images)" in profile.max_length.reason
    told = profile_lengths([file], tokenizer_dir=model(), model=folder, text_only=True)
    text_model = profile_lengths([file], tokenizer_dir=model(), model=model())
    assert told.max_length.recommended == text_model.max_length.recommended == 32
    assert ids(told)[:2] == ["media_columns", "media_mismatch"]


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_marks_without_their_images_are_listed(tmp_path, model, write):
    """A row of two marks with one image is named (A17)."""
    rows = with_images((1, 1), (2, 1), (0, 1))
    if write is write_jsonl:
        rows = [{**row, "images": ["a.png"] * len(row["images"])} for row in rows]
    file = write(tmp_path / f"a.{write.__name__[6:]}", rows)
    profile = profile_lengths([file], tokenizer_dir=model())
    seen = next(w.seen for w in profile.warnings if w.id == "media_mismatch")
    assert seen == (
        "2 rows have other numbers of marks than of media: the first has 2 image marks, 1 in "
        f"column images (rows {file}: 1, {file}: 2)"
    )


def test_image_bytes_are_never_read(tmp_path, model):
    """Their column is destroyed on disk, and the profile does not notice (A17)."""
    import pyarrow.parquet as pq

    rows = with_images(*[(1, 1)] * 4)
    for i, row in enumerate(rows):
        row["images"] = [{"bytes": bytes([65 + i]) * 5000, "path": "a"}]
    path = Path(write_parquet(tmp_path / "a.parquet", rows))
    group = pq.ParquetFile(path).metadata.row_group(0)
    column = next(
        group.column(i)
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.endswith("bytes")
    )
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)
    profile = profile_lengths([str(path)], tokenizer_dir=model())
    assert profile.num_samples == 4
    assert "media_mismatch" not in ids(profile)


def test_image_parts_are_media_too(tmp_path, model):
    """Parts of a content that are no text withhold the advice like a column (A17)."""
    rows = chats(3, 4)
    rows[0]["messages"][0]["content"] = [{"type": "image"}, {"type": "text", "text": "two"}]
    profile = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=model())
    assert profile.media == ("image parts",)
    assert profile.max_length.recommended is None
