"""The demo's rows, tokenizer, model: small, learnable, the same for the same seed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from autobatch.config import load_config, resolve
from autobatch.demo import DemoPaths, demo_rows, write_demo
from autobatch.errors import AutobatchError
from autobatch.model import read_model_spec


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> DemoPaths:
    return write_demo(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def tokenizer(demo):
    return PreTrainedTokenizerFast.from_pretrained(str(demo.model))


def conversation(row: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": row["answer"]},
    ]


def test_the_same_seed_writes_the_same_files(tmp_path):
    """Rows and tokenizer follow from the seed alone."""
    one, two = (write_demo(tmp_path / name, seed=3, num_rows=60) for name in "ab")
    assert one.data.read_bytes() == two.data.read_bytes()
    for name in ("tokenizer.json", "config.json"):
        assert (one.model / name).read_bytes() == (two.model / name).read_bytes()


def test_another_seed_gives_other_rows():
    """The seed decides the rows."""
    assert demo_rows(seed=0, num_rows=20) != demo_rows(seed=1, num_rows=20)


def test_lengths_have_a_heavy_tail(demo, tokenizer):
    """Most rows are short; the longest is many times the median but fits a small model."""
    rows = pq.read_table(demo.data).to_pylist()
    lengths = np.array(
        [
            len(tokenizer(tokenizer.apply_chat_template(conversation(r), tokenize=False)).input_ids)
            for r in rows
        ]
    )
    assert 1500 == len(lengths)
    assert 40 <= np.median(lengths) <= 80
    assert 400 <= lengths.max() <= 800
    assert lengths.max() > 2 * np.percentile(lengths, 99)


def test_an_answer_follows_from_its_question():
    """Every word of an answer stands in the question, or is its number, its sum or fixed words."""
    fixed = {"a", "the", "sum", "of", "and", "is"}
    for row in demo_rows(seed=0, num_rows=200):
        words, asked = (re.findall(r"[a-z]+", row[k].lower()) for k in ("answer", "question"))
        assert set() == set(words) - set(asked) - fixed
        added = re.search(r"add (\d) and (\d)", row["question"])
        if added:
            total = int(added[1]) + int(added[2])
            assert row["answer"].endswith(f"The sum of {added[1]} and {added[2]} is {total}.")


def test_the_tokenizer_gives_text_back(demo, tokenizer):
    """Byte-level BPE loses nothing, not even what it never saw."""
    text = pq.read_table(demo.data).to_pylist()[0]["answer"] + "\n 北京 é\t!"
    assert text == tokenizer.decode(tokenizer(text).input_ids)


def test_a_turn_ends_with_the_eos_token(tokenizer):
    """The chat template is ChatML, its end marker the eos token of the tokenizer."""
    text = tokenizer.apply_chat_template(
        conversation({"question": "q", "answer": "a"}), tokenize=False
    )
    assert "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n" == text
    assert "<|im_end|>" == tokenizer.eos_token
    assert 1 == len(tokenizer("<|im_end|>").input_ids)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_the_model_has_a_row_for_every_token(demo, tokenizer):
    """vocab_size is the tokenizer's length rounded up to 64; there are no weights."""
    spec = read_model_spec(demo.model)
    assert (0, True) == (spec.vocab_size % 64, spec.vocab_size - len(tokenizer) in range(64))
    assert not spec.has_weights
    config = json.loads((demo.model / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"]


def test_the_recommended_settings_are_settings(demo):
    """The overrides are keys and values that a config takes."""
    config = resolve(load_config(None, demo.overrides))
    assert (32, 60, 3e-3) == (
        config.data.train_batch_size,
        config.trainer.total_training_steps,
        config.optim.lr,
    )


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    """A file where the folder should be is our error, not a traceback."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(AutobatchError, match="choose another --out"):
        write_demo(tmp_path / "taken", num_rows=5)


def test_writing_the_demo_imports_no_torch(tmp_path):
    """The parent process stays free of torch."""
    code = (
        "import sys; from pathlib import Path; from autobatch.demo import write_demo; "
        f"write_demo(Path({str(tmp_path)!r}), num_rows=20); print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ("False\n", 0) == (answer.stdout, answer.returncode), answer.stderr
