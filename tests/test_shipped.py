"""Shipped length profiles are whole, and are tuned on without data."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from run_dirs import small_rows
from tiny import train_tokenizer, write_parquet
from tiny_model import tiny_model

from autobatch.cli import main
from autobatch.config import load_config, resolve
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.lengths.shipped import samples_of, shipped_names, shipped_profile
from autobatch.dataset.tokens.truncation import cut_lengths
from autobatch.errors import DataError
from autobatch.records import LengthProfile
from autobatch.reporting import read_tuned, tuned_summary
from autobatch.storage import from_plain, read_json, shipped_dir, to_plain, write_json

SHARED = Path(os.environ.get("AUTOBATCH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
NAMES = shipped_names()


def call(*arguments: str) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(main, list(arguments))


# ---- the files ---------------------------------------------------------------


def test_the_promised_sets_are_shipped():
    """README and `--profile` name them; every one has its row in the list."""
    assert {"gsm8k", "alpaca_en_demo", "messages_tools_agent", "text_longtail"} <= set(NAMES)
    page = (shipped_dir("lengths") / "README.md").read_text(encoding="utf-8")
    assert NAMES == tuple(sorted(re.findall(r"^\| `(\S+)`", page, re.MULTILINE)))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_is_a_whole_record(name):
    """It is named by its set, its counts sum up, it says where it comes from."""
    profile = shipped_profile(name)
    lengths = samples_of(profile).lengths
    assert profile.origin is not None
    assert (name, True) == (profile.origin.name, profile.complete)
    assert len(lengths) == profile.num_samples == profile.num_rows - sum(profile.skipped.values())
    assert (int(lengths.sum()), int(lengths.max())) == (profile.num_tokens, profile.length.max)
    assert np.percentile(lengths, 99, method="inverted_cdf") == profile.length.p99
    assert all(to_plain(profile.origin).values())
    assert not profile.origin.commit.endswith("dirty")
    assert re.fullmatch("[0-9a-f]{64}", profile.data.fingerprint)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_holds_nothing_of_a_machine_or_a_row(name):
    """No path, no token cache, no place of a row."""
    profile = shipped_profile(name)
    assert (None, None, (), {}) == (
        *(profile.model, profile.cache_dir),
        *(profile.longest, profile.skipped_rows),
    )
    assert all("/" not in file for file in (*profile.data.files, profile.tokenizer))
    text = (shipped_dir("lengths") / f"{name}.json").read_text(encoding="utf-8")
    assert [] == re.findall(r"""(?:^|[\s"'(])[/~][^\s"']+""", text)


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="needs the shared data sets")
def test_gsm8k_measured_again_has_the_shipped_lengths():
    """The same data, tokenizer and template give the same histogram."""
    import hashlib

    file = SHARED / "data" / "gsm8k" / "train.jsonl"
    shipped = shipped_profile("gsm8k")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == shipped.data.fingerprint
    measured = profile_lengths(
        [str(file)], tokenizer_dir=str(SHARED / "data" / "tokenizers" / "qwen3")
    )
    assert shipped.histogram == measured.histogram
    assert shipped.template_hash == measured.template_hash


def test_every_token_counts_as_a_label_whatever_is_cut():
    """A label mask is not known, so the count is an upper bound."""
    samples = samples_of(shipped_profile("gsm8k"))
    longest = int(samples.lengths.max())
    right = cut_lengths(samples, max_length=100, truncation="right")
    assert (100, 100) == (int(right.lengths.max()), int(right.label_tokens.max()))
    left = cut_lengths(samples, max_length=100, truncation="left")
    assert 99 == int(left.label_tokens[-1])  # the first one is predicted by no position
    dropped = cut_lengths(samples, max_length=longest - 1, truncation="drop")
    assert dropped.num_dropped == dict(shipped_profile("gsm8k").histogram)[longest]


def test_a_histogram_that_does_not_sum_up_is_refused():
    """A file edited by hand would prove another data set."""
    plain = to_plain(shipped_profile("gsm8k"))
    for histogram in ([], plain["histogram"][1:], [[-1, 1], *plain["histogram"]]):
        profile = from_plain(LengthProfile, {**plain, "histogram": histogram}, where="x")
        with pytest.raises(DataError, match="does not count its 7473 samples"):
            samples_of(profile)


# ---- tune without data -------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without tokenizer and weights: shapes are enough to tune."""
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def tuned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out folder of a padding-free search on the lengths of gsm8k."""
    out = tmp_path_factory.mktemp("out")
    result = call(
        *("tune", "--profile", "GSM8K", "--model", str(model), "--out", str(out), "--json"),
        *("--device", "cpu", "--memory-limit", "12MiB", "--train-batch-size", "8"),
        *("--remove-padding", "on", "--gradient-checkpointing", "none", "model.loss_kernel=logits"),
        *("engine.param_dtype=fp32", "model.init=random", "trainer.total_training_steps=20"),
    )
    assert 0 == result.exit_code, result.stderr
    (out / "verdict.json").write_text(result.stdout)
    (out / "stderr.txt").write_text(result.stderr)
    return out


def longest_up_to(budget: int) -> list[int]:
    """Return the longest rows of gsm8k in one step of 8 that a budget holds, the last one cut."""
    rest, rows = budget, []
    for length in sorted(samples_of(shipped_profile("gsm8k")).lengths.tolist())[-8:][::-1]:
        rows.append(min(length, rest))
        rest -= rows[-1]
    return [length for length in rows if length]


def test_the_winner_stepped_the_worst_of_all_draws(tuned: Path) -> None:
    """Rows that no order passes: the longest of all, as many as the size holds."""
    verdict = read_json(tuned / "verdict.json")
    winner, certificate = verdict["winner"], verdict["certificate"]
    assert ("any_draw", winner["trial_id"]) == (certificate["covers"], certificate["proven_by"])
    assert (None, None, None) == tuple(certificate["worst"][k] for k in ("epoch", "step", "rank"))
    for trial in verdict["trials"]:
        rows = longest_up_to(trial["candidate"]["max_token_len_per_gpu"])
        assert [rows, rows] == trial["load"]["micro_batches"]
    assert max(len(trial["load"]["micro_batches"][0]) for trial in verdict["trials"]) > 1
    assert certificate["worst"]["tokens"] == winner["candidate"]["max_token_len_per_gpu"]


def test_the_verdict_names_its_lengths_and_no_data(tuned: Path) -> None:
    """Settings hold no file, no column, no tokenizer; the evidence names the profile."""
    config = resolve(load_config(tuned / "tuned.yaml"))
    assert ([], "auto", None) == (
        *(config.data.train_files, config.data.format),
        config.model.tokenizer_path,
    )
    assert config.tuning is not None
    assert "gsm8k" == config.tuning["profile"]
    assert "any_draw" == config.tuning["certificate"]["covers"]
    words = (tuned / "stderr.txt").read_text()
    assert "lengths of gsm8k as shipped: 7,473 rows under the tokenizer qwen3" in words
    assert "every token counted as a label" in words


def test_the_summary_says_what_the_proof_covers(tuned: Path) -> None:
    """People read that there was no data, and that any order is covered."""
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as shown:
        console.print(tuned_summary(read_tuned(tuned)))
    text = shown.get()
    assert "none: the shipped lengths of gsm8k" in text
    assert "micro-batches planned, the worst of any order stepped in t0" in text


def test_launch_says_that_the_data_is_missing(tuned: Path) -> None:
    """One sentence with how to give it."""
    result = call("launch", str(tuned / "tuned.yaml"), "--dry-run")
    assert 1 == result.exit_code
    assert (
        "autobatch: the config was tuned on the shipped lengths of gsm8k and names no data; give "
        "the files to train on, data.train_files=[train.parquet]\n"
    ) == result.stderr


def test_launch_replays_the_proof_on_the_data_it_is_given(
    tuned: Path, model: Path, tmp_path: Path
) -> None:
    """Rows no longer than the shipped ones are covered; longer ones are told as ever."""
    train_tokenizer(tmp_path / "tokenizer", vocab_size=500)
    short = write_parquet(tmp_path / "short.parquet", small_rows(40))
    common = (
        *("launch", str(tuned / "tuned.yaml"), "--dry-run"),
        *(f"model.tokenizer_path={tmp_path / 'tokenizer'}", f"trainer.output_dir={tmp_path}/run"),
    )
    covered = call(*common, f"data.train_files=[{short}]")
    assert 0 == covered.exit_code, covered.stderr
    assert "none is larger than the proven one" in covered.stderr
    rows = [{"question": "x" * 700, "answer": "four"}, *small_rows(20)]
    long = write_parquet(tmp_path / "long.parquet", rows)
    refused = call(*common, f"data.train_files=[{long}]")
    assert 1 == refused.exit_code
    assert "1 of 21 rows are longer than max_length 552" in refused.stderr
    larger = call(
        *common,
        *(f"data.train_files=[{long}]", "data.max_length=1024", "data.max_token_len_per_gpu=1024"),
    )
    assert 0 == larger.exit_code, larger.stderr
    assert "larger than the proven one; launch will step it first" in larger.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--profile", "gsm8"), "did you mean gsm8k? shipped are alpaca_en_demo, gsm8k, "),
        (("--profile", "nowhere/profile.json"), "neither a file nor a shipped profile; shipped"),
        (("--profile", "gsm8k"), "model.path is not set; give --model DIR"),
        (("--profile", "gsm8k", "data.train_files=[a.parquet]"), "leave one of them out"),
        ((), "or the name of a shipped one, such as gsm8k"),
    ],
)
def test_a_wrong_profile_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    """The names there are, the nearest, or what else is missing."""
    result = call("tune", *arguments, "--device", "cpu", "--out", str(tmp_path))
    assert 1 == result.exit_code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_an_existing_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called like a set does not."""
    monkeypatch.chdir(tmp_path)
    arguments = ("tune", "--profile", "gsm8k", "--device", "cpu")
    Path("gsm8k").mkdir()
    assert "model.path is not set" in call(*arguments).stderr
    Path("gsm8k").rmdir()
    Path("gsm8k").write_text(json.dumps({"data": 1}))
    assert "gsm8k lacks" in call(*arguments).stderr


def test_a_copy_of_a_shipped_profile_is_one(tmp_path: Path, model: Path) -> None:
    """What counts is where it comes from, not where it lies."""
    write_json(tmp_path / "mine.json", shipped_profile("gsm8k"))
    result = call(
        *("tune", "--profile", str(tmp_path / "mine.json"), "--model", str(model)),
        *("--device", "cpu", "--out", str(tmp_path), "--max-length", "400"),
    )
    assert 1 == result.exit_code
    assert "lengths of gsm8k as shipped" in result.stderr
    assert "rows are longer than max_length 400" in result.stderr


def test_help_says_that_a_name_will_do() -> None:
    """`tune --help` is where people look."""
    assert "--profile FILE|NAME" in call("tune", "--help").stdout
