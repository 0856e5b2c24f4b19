"""Rows become ids with label masks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.errors import AutobatchError, DataError, ModelError
from tests.tiny import CHATML, TOOLS, train_tokenizer, write_jsonl, write_parquet

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content | trim }}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
HEADERLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
NO_MARKER = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
CHAT = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And four?"},
    {"role": "assistant", "content": "Four plus."},
]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    """Tokenizer directories by template, trained once each."""
    made: dict[str | None, Path] = {}

    def of(template: str | None = CHATML, **options) -> str:
        key = json.dumps([template, options])
        if key not in made:
            directory = tmp_path_factory.mktemp("tokenizer")
            made[key] = train_tokenizer(directory, chat_template=template, **options)
        return str(made[key])

    return of


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))


def decode(profile, i):
    """Return the whole text and the label text of a sample."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained(profile.tokenizer)
    cache = TokenCache.open(profile.cache_dir)
    return fast.decode(cache.ids(i)), fast.decode(cache.ids(i)[cache.label_mask(i)])


@pytest.mark.parametrize(
    ("template", "labels"),
    [
        (CHATML, "Two.<|im_end|>Four plus.<|im_end|>"),
        (THINKING, "Two.<|im_end|>\n</think>\n\nFour plus.<|im_end|>"),
        (HEADERLESS, "Two.<|im_end|>Four plus.<|im_end|>"),
    ],
    ids=["chatml", "thinking", "headerless"],
)
def test_labels_are_answers_with_end_marker(tmp_path, tokenizers, template, labels):
    """No template needs generation marks; what the prompt would print is no label."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers(template))
    assert labels == decode(profile, 0)[1]


def test_template_without_markers_labels_the_whole_turn(tmp_path, tokenizers):
    """Without a generation prompt the role line is part of what must be written."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers(NO_MARKER))
    assert "Two." in decode(profile, 0)[1]
    assert "What is two?" not in decode(profile, 0)[1]


def test_first_token_is_never_a_label(tmp_path, tokenizers):
    """A conversation that opens with an answer loses the label no position predicts."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT[1:]}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers(HEADERLESS))
    mask = TokenCache.open(profile.cache_dir).label_mask(0)
    assert mask[:2].tolist() == [False, True]


def test_answers_that_hold_markers_do_not_end_early(tmp_path, tokenizers):
    """An end marker written inside an answer is label like the rest."""
    chat = [CHAT[0], {"role": "assistant", "content": "Say <|im_end|> to stop."}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers())
    assert decode(profile, 0)[1] == "Say <|im_end|> to stop.<|im_end|>"


def test_token_across_the_border_is_a_label(tmp_path, tokenizers):
    """Where header and answer share a token, the ids differ from the prompt's from there on."""
    template = (
        "{% for m in messages %}{{ ('tw' if m.role == 'assistant' else '') + m.content }}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}tw{% endif %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": "o plus"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers(template))
    assert decode(profile, 0) == (
        "What is two?<|im_end|>two plus<|im_end|>",
        "wo plus<|im_end|>",  # "wo" is one token of "two"
    )


def test_rows_whose_labels_cannot_be_found_are_reported(tmp_path, tokenizers):
    """A template that moves earlier turns leaves a warning, never silence."""
    template = (
        "{% for m in messages[::-1] %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    rows = [{"messages": CHAT}, {"messages": [{"role": "assistant", "content": "Two."}]}]
    profile = profile_lengths(
        [write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizers(template)
    )
    assert profile.num_rows_without_labels == 1
    assert "labels_not_found" in [w.id for w in profile.warnings]


def test_no_template_gives_prompt_response_eos(tmp_path, tokenizers):
    """Prompt ids, then response ids with one EOS as labels."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "two plus", "response": " is four"}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers(None))
    assert decode(profile, 0) == ("two plus is four<|im_end|>", " is four<|im_end|>")


def test_text_labels_every_token_but_the_first(tmp_path, tokenizers):
    """Plain text ends with EOS; only its first token is no label."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "two plus two"}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers())
    assert decode(profile, 0)[0] == "two plus two<|im_end|>"
    assert profile.num_tokens - 1 == profile.num_label_tokens


@pytest.mark.parametrize(
    ("extra", "labels"),
    [({}, 3), ({"labels": [-100, 7, -100, 9]}, 2), ({"loss_mask": [0, 0, 0, 1]}, 1)],
)
def test_input_ids_are_taken_as_they_are(tmp_path, tokenizers, extra, labels):
    """Ids are kept; labels or loss_mask say what is learned, else every token is."""
    file = write_parquet(tmp_path / "a.parquet", [{"input_ids": [5, 7, 8, 9], **extra}])
    profile = profile_lengths([file], tokenizer_dir=tokenizers())
    assert TokenCache.open(profile.cache_dir).ids(0).tolist() == [5, 7, 8, 9]
    assert labels == profile.num_label_tokens


def test_parquet_lists_render_like_json_lists(tmp_path, tokenizers):
    """Nested lists of tool arguments and tools come out as JSON, with the same ids (A01)."""
    call = {"function": {"name": "f", "arguments": {"entity_list": ["a", "b"]}}}
    rows = [
        {"messages": [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": CHAT},
        {"messages": CHAT[:2]},
    ]
    rows = [{**row, "tools": [{"name": "f", "of": ["x"]}]} for row in rows]
    tokenizer = tokenizers(TOOLS)
    one = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizer)
    two = profile_lengths([write_parquet(tmp_path / "a.parquet", rows)], tokenizer_dir=tokenizer)
    assert '{"entity_list": ["a", "b"]}' in decode(two, 0)[1]
    assert np.array_equal(
        TokenCache.open(one.cache_dir).tokens, TokenCache.open(two.cache_dir).tokens
    )


def test_nulls_of_merged_schemas_are_dropped_and_json_nulls_kept(tmp_path, tokenizers):
    """Another row's argument names do not leak; nulls an author wrote as JSON stay (A02)."""
    rows = [
        {
            "messages": [
                CHAT[0],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
                },
            ],
            "tools": '[{"name": "f", "default": null}]',
        }
        for name, arguments in (("a", {"x": 1}), ("b", {"y": "s"}))
    ]
    file = write_parquet(tmp_path / "a.parquet", rows)
    profile = profile_lengths([file], tokenizer_dir=tokenizers(TOOLS))
    texts = [decode(profile, i) for i in range(2)]
    assert [labels for _, labels in texts] == ['{"x": 1}<|im_end|>', '{"y": "s"}<|im_end|>']
    assert '"default": null' in texts[0][0]


def test_mixed_tool_arguments_are_reported(tmp_path, tokenizers):
    """Arguments as text in one row, as an object in another: a warning, no crash (A02)."""
    rows = [
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]},
            ]
        }
        for a in ({"x": 1}, '{"x": 1}')
    ]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    profile = profile_lengths([file], tokenizer_dir=tokenizers(TOOLS))
    assert "mixed_tool_arguments" in [w.id for w in profile.warnings]


def test_parts_become_text(tmp_path, tokenizers):
    """Text parts are joined without separator; other parts are counted."""
    parts = [
        {"type": "text", "text": "Two"},
        {"type": "text", "value": "."},
        {"type": "image", "url": "x"},
    ]
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": parts}]}]
    profile = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizers())
    assert decode(profile, 0)[1] == "Two.<|im_end|>"
    assert [w.seen for w in profile.warnings if w.id == "dropped_parts"] == [
        "content parts left out: image (1)"
    ]


def test_null_and_structured_answers_are_skipped_by_reason(tmp_path, tokenizers):
    """Only null or non-text answers are skipped; empty ones stay; nothing reads None (A03)."""
    answers = ["four", None, "", "   ", 4, {"a": 1}, "two", "x", "y", "z"]
    rows = [{"prompt": "two?", "response": answer} for answer in answers]
    profile = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizers())
    assert profile.skipped == {"response is null": 1, "response is not text": 2}
    assert (profile.num_rows, profile.num_samples) == (10, 7)
    assert any("rows 4, 5" in w.seen for w in profile.warnings)
    assert not any("None" in decode(profile, i)[0] for i in range(7))


def test_nothing_usable_is_one_sentence(tmp_path, tokenizers):
    """A file whose answers are all null stops with the reason and its count (A03)."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": None}] * 3)
    with pytest.raises(DataError, match=r"response is null \(3\)"):
        profile_lengths([file], tokenizer_dir=tokenizers())
    assert not list((tmp_path / "cache").glob("tokens/*"))


def test_empty_null_and_user_only_chats(tmp_path, tokenizers):
    """Empty and null chats are skipped; a last user turn stays; no answer, no labels (A03)."""
    rows = [{"messages": m} for m in (CHAT, CHAT[:3], CHAT[:1], [], None)]
    profile = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizers())
    assert profile.skipped == {"messages are empty": 1, "messages are null": 1}
    assert decode(profile, 1)[0].endswith("And four?<|im_end|>\n")
    assert profile.num_rows_without_labels == 1


def test_data_without_any_label_is_refused(tmp_path, tokenizers):
    """Training on nothing is an error, not a run with loss zero (A16)."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT[:1]}] * 2)
    with pytest.raises(DataError, match="none of 2 rows"):
        profile_lengths([file], tokenizer_dir=tokenizers())


def test_refusing_template_is_counted(tmp_path, tokenizers):
    """A template that raises on a row skips that row only, and its words are shown."""
    template = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}"
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    profile = profile_lengths([file], tokenizer_dir=tokenizers(template + CHATML))
    assert profile.skipped == {"template refuses the row": 1}
    assert any("one turn only" in w.cause for w in profile.warnings)


def test_lone_surrogates_are_skipped(tmp_path, tokenizers):
    """Half a character cannot be tokenized: the row is skipped, the rest lives."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800"}\n{"text": "two"}\n')
    profile = profile_lengths([str(path)], tokenizer_dir=tokenizers())
    assert (profile.num_samples, sum(profile.skipped.values())) == (1, 1)


def test_chats_need_a_template(tmp_path, tokenizers):
    """Messages with a base tokenizer stop at once, with the remedy (A09)."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
        profile_lengths([file], tokenizer_dir=tokenizers(None))


def test_template_file_beside_the_tokenizer_is_used(tmp_path, tokenizers):
    """A chat_template.jinja put into the folder is the remedy that works (A09)."""
    directory = train_tokenizer(tmp_path / "t", chat_template=None)
    (directory / "chat_template.jinja").write_text(CHATML)
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    profile = profile_lengths([file], tokenizer_dir=str(directory))
    assert decode(profile, 0)[1] == "Two.<|im_end|>Four plus.<|im_end|>"


def test_truncation_stored_in_a_tokenizer_is_ignored(tmp_path):
    """A tokenizer saved with truncation on still gives uncut lengths."""
    directory = train_tokenizer(tmp_path / "t")
    state = json.loads((directory / "tokenizer.json").read_text())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (directory / "tokenizer.json").write_text(json.dumps(state))
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "two plus two is four"}])
    assert profile_lengths([file], tokenizer_dir=str(directory)).num_tokens > 4


@pytest.mark.parametrize("make", [False, True], ids=["missing", "empty"])
def test_missing_tokenizer_is_one_sentence(tmp_path, make):
    """A directory that is missing, or has no tokenizer.json, is named."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    if make:
        (tmp_path / "t").mkdir()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        profile_lengths([file], tokenizer_dir=str(tmp_path / "t"))


def test_damaged_tokenizer_is_one_sentence(tmp_path, tokenizers):
    """A tokenizer.json that is no JSON is our error, not a traceback."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{")
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(AutobatchError, match="cannot be read"):
        profile_lengths([file], tokenizer_dir=str(tmp_path / "t"))


def test_profiling_never_imports_torch(tmp_path, tokenizers):
    """The parent stays torch-free."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    code = (
        "import sys; from autobatch.dataset.lengths.profiling import profile_lengths; "
        f"profile_lengths([{file!r}], tokenizer_dir={tokenizers()!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
