"""The lengths of real data sets equal an independent rendering."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.cache import TokenCache

SHARED = Path(os.environ.get("AUTOBATCH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DATA = SHARED / "data"
QWEN3 = DATA / "tokenizers" / "qwen3"
STATS = DATA / "length_stats_qwen3.json"
pytestmark = pytest.mark.skipif(not STATS.exists(), reason="needs the shared data sets")
EXPECTED = json.loads(STATS.read_text()) if STATS.exists() else []
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep token caches of this module apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def fast():
    """The Qwen3 tokenizer, straight from transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(QWEN3))


def by_hand(row, fast):
    """Render one raw row (JSON form) without any of our code."""
    if "text" in row:
        return fast(row["text"])["input_ids"] + [fast.eos_token_id]
    tools = json.loads(row["tools"]) if row.get("tools") else None
    if "extra_info" in row:
        row = row["extra_info"]
    if "conversations" in row:
        messages = [
            {"role": ROLES.get(t["from"], t["from"]), "content": t["value"]}
            for t in row["conversations"]
        ]
    elif "messages" in row:
        messages = [
            {k: v for k, v in m.items() if v is not None} | {"content": m["content"] or ""}
            for m in row["messages"]
        ]
    elif "instruction" in row:
        user = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": row["output"]},
        ]
    else:
        messages = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    text = fast.apply_chat_template(messages, tools=tools or None, tokenize=False)
    return fast(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda e: e["path"])
def test_totals_and_percentiles_are_the_published_ones(expected):
    """Rows, tokens and percentiles equal the published table."""
    profile = profile_lengths([str(DATA / expected["path"])], tokenizer_dir=str(QWEN3))
    stats = profile.length
    published = tuple(expected[k] for k in ("rows", "total", "p50", "p95", "p99", "max"))
    measured = (profile.num_samples, profile.num_tokens, stats.p50, stats.p95, stats.p99, stats.max)
    assert published == measured


@pytest.mark.parametrize(
    "name",
    [
        "alpaca_en/train",
        "gsm8k/test",
        "gsm8k_messages/test",
        "messages_tools_agent/train",
        "sharegpt_toolcall_en/train",
        "sharegpt_zh/train",
        "text_longtail/train",
    ],
)
def test_every_row_is_rendered_as_transformers_renders_it(name, fast):
    """Parquet rows have the lengths of an independent rendering; the jsonl twin the same ids."""
    parquet = profile_lengths([str(DATA / f"{name}.parquet")], tokenizer_dir=str(QWEN3))
    jsonl = profile_lengths([str(DATA / f"{name}.jsonl")], tokenizer_dir=str(QWEN3))
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").open(encoding="utf-8")]
    cache, twin = TokenCache.open(parquet.cache_dir), TokenCache.open(jsonl.cache_dir)
    assert [len(by_hand(row, fast)) for row in rows] == cache.lengths.tolist()
    assert np.array_equal(twin.tokens, cache.tokens)
    assert np.array_equal(twin.labels, cache.labels)


def test_struct_paths_are_found_in_verl_data(fast):
    """extra_info.question and extra_info.answer are found although there is a prompt list."""
    file = DATA / "gsm8k_verl" / "test.parquet"
    profile = profile_lengths([str(file)], tokenizer_dir=str(QWEN3))
    cache = TokenCache.open(profile.cache_dir)
    rows = pq.read_table(file).to_pylist()[:50]
    assert (profile.data.keys) == {
        "prompt_key": "extra_info.question",
        "response_key": "extra_info.answer",
    }
    assert [by_hand(row, fast) for row in rows] == [cache.ids(i).tolist() for i in range(50)]


def test_labels_are_the_assistant_turns_with_their_end_marker(fast):
    """Labels decode to the think block, the answer and <|im_end|>, without a newline after."""
    file = DATA / "gsm8k" / "test.jsonl"
    profile = profile_lengths([str(file)], tokenizer_dir=str(QWEN3))
    cache = TokenCache.open(profile.cache_dir)
    rows = [json.loads(line) for line in file.open(encoding="utf-8")][:100]
    expected = [f"<think>\n\n</think>\n\n{row['answer']}<|im_end|>" for row in rows]
    assert expected == [fast.decode(cache.ids(i)[cache.label_mask(i)]) for i in range(100)]


def test_labels_of_long_chats_are_every_assistant_turn(fast):
    """In multi-turn chats every gpt turn is label; only the last one after a user thinks."""
    file = DATA / "sharegpt_zh" / "train.jsonl"
    profile = profile_lengths([str(file)], tokenizer_dir=str(QWEN3))
    cache = TokenCache.open(profile.cache_dir)
    for i, line in enumerate(file.open(encoding="utf-8")):
        turns = json.loads(line)["conversations"]
        expected = "".join(
            ("<think>\n\n</think>\n\n" if turn is turns[-1] else "")
            + (turn["value"].lstrip("\n") if turn is turns[-1] else turn["value"])
            + "<|im_end|>"
            for turn in turns
            if turn["from"] == "gpt"
        )
        # the tokenizer composes characters (NFC), so compare what it makes of both
        assert fast.backend_tokenizer.normalizer.normalize_str(expected) == fast.decode(
            cache.ids(i)[cache.label_mask(i)]
        )


def test_tool_calls_are_labels_and_tool_answers_are_not(fast):
    """An agent's calls are learned, what the tools answer is not."""
    file = DATA / "messages_tools_agent" / "train.jsonl"
    profile = profile_lengths([str(file)], tokenizer_dir=str(QWEN3))
    cache = TokenCache.open(profile.cache_dir)
    labels = fast.decode(cache.ids(0)[cache.label_mask(0)])
    messages = json.loads(file.open(encoding="utf-8").readline())["messages"]
    num_turns = sum(m["role"] == "assistant" for m in messages)
    assert num_turns == labels.count("<|im_end|>")
    assert any(m.get("tool_calls") for m in messages) == ("<tool_call>" in labels)
    assert "<tool_response>" not in labels
