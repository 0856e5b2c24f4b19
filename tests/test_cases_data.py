"""Failures of real life (data, lengths, tokenizers), each shown by the tests that CASES names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny import CHATML, TOOLS, train_tokenizer, write_jsonl, write_parquet
from tiny_model import tiny_model
from transformers import PreTrainedTokenizerFast

from autobatch import api
from autobatch.cli import main
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.errors import AutobatchError, ConfigError
from autobatch.records import LengthProfile
from autobatch.storage import read_jsonl

# The letters are those of the collection of public reports; "here" is this file.
CASES = {
    "A01": {  # lists come back as numpy arrays
        "rendering": "parquet_lists_render_like_json_lists",
        "here": "a_step_is_made_on_nested_columns",
    },
    "A02": {  # Arrow merges tool schemas
        "rendering": "nulls_of_merged_schemas_are_dropped_and_json_nulls_kept "
        "mixed_tool_arguments_are_reported",
        "here": "merged_schemas_cost_no_token",
    },
    "A03": {  # null, empty and non-string responses
        "rendering": "null_and_structured_answers_are_skipped_by_reason "
        "nothing_usable_is_one_sentence empty_null_and_user_only_chats",
        "here": "skipped_rows_are_named_by_reason a_file_without_use_is_exit_1",
    },
    "A04": {  # columns do not match the configured keys
        "files": "first_matching_format_wins prompt_key_alone_finds_its_partner "
        "wrong_columns_are_one_sentence",
        "cache": "unknown_sharegpt_roles_are_listed",
    },
    "A06": {  # parquet files that open elsewhere but not here
        "files": "one_large_row_group_is_streamed unknown_feature_metadata_is_ignored "
        "shards_with_other_columns_are_refused encoded_strings_read_as_strings no_rows_is_an_error "
        "cut_parquet_is_damaged",
        "here": "a_file_without_use_is_exit_1",
    },
    "A07": {  # one enormous row decides everything
        "advice": "one_outlier_is_cut_and_the_run_warned nothing_is_cut_where_rows_are_alike "
        "two_groups_are_told_with_their_shares",
        "here": "one_enormous_row_is_told_and_not_followed",
    },
    "A09": {  # a base model has no chat template
        "rendering": "chats_need_a_template template_file_beside_the_tokenizer_is_used",
        "checks": "pairs_without_a_template_are_said",
        "here": "no_template_stops_before_anything_starts "
        "the_template_used_lies_beside_the_weights",
    },
    "A10": {  # pad token: missing, equal to EOS, or outside the embedding
        "checks": "padding_by_position_keeps_the_end padding_outside_the_embedding",
        "here": "the_last_eos_is_a_label_whatever_pads padding_outside_the_embedding_is_refused",
    },
    "A12": {  # turn by turn differs from the whole conversation
        "checks": "thinking_in_the_last_turn_only_differs "
        "a_template_that_wants_a_user_refuses_single_messages "
        "templates_that_print_each_message_alike_do_not_differ",
    },
    "A14": {  # truncation removes the whole answer
        "advice": "answers_behind_a_long_prompt_are_counted_as_lost",
        "truncation": "rows_that_lose_their_whole_answer_are_counted",
        "engine_step": "two_ranks_give_the_step_of_one non_finite_loss_leaves_the_weights",
        "here": "rows_without_labels_are_left_out_and_counted",
    },
    "A16": {  # the assistant mask is all zero
        "rendering": "labels_are_answers_with_end_marker first_token_is_never_a_label "
        "data_without_any_label_is_refused",
        "here": "generation_marks_change_no_label",
    },
    "A17": {  # image columns and placeholders
        "advice": "images_withhold_the_advice marks_without_their_images_are_listed "
        "image_bytes_are_never_read",
    },
}
ASKED = {"role": "user", "content": "What is two?"}
TOLD = {"role": "assistant", "content": "Two."}


@pytest.mark.parametrize("case", CASES)
def test_every_case_names_tests_that_exist(case: str) -> None:
    """A renamed test is missed here."""
    for name, tests in CASES[case].items():
        dataset = f"test_dataset_{name}.py"
        file = Path(__file__).with_name(dataset) if name != "here" else Path(__file__)
        file = file if file.exists() else Path(__file__).with_name(f"test_{name}.py")
        source = file.read_text()
        assert [] == [test for test in tests.split() if f"def test_{test}(" not in source]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer whose template prints tools and the arguments of calls."""
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TOOLS))


def rows_with_call(arguments: Any, **message: Any) -> dict[str, Any]:
    """Make a row in which the assistant calls a tool."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": [call], **message}]}


def tokens(profile: LengthProfile) -> list[int]:
    """Return all ids of a profile."""
    assert profile.cache_dir is not None
    return [int(i) for i in TokenCache.open(profile.cache_dir).tokens]


def labels(profile: LengthProfile, i: int = 0) -> str:
    """Return the text of the labels of a sample."""
    assert profile.cache_dir is not None
    cache = TokenCache.open(profile.cache_dir)
    fast = PreTrainedTokenizerFast.from_pretrained(profile.tokenizer)
    return str(fast.decode(cache.ids(i)[cache.label_mask(i)]))


# ---- rows ----------------------------------------------------------------------------


def test_merged_schemas_cost_no_token(tmp_path: Path, tokenizer: str) -> None:
    """Parquet gives each call the arguments of all; the ids are those of the rows (A02)."""
    rows = [rows_with_call({"x": 1}, content=""), rows_with_call({"y": "s"}, content=None)]
    merged = profile_lengths([write_parquet(tmp_path / "a.parquet", rows)], tokenizer_dir=tokenizer)
    apart = profile_lengths([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer_dir=tokenizer)
    assert tokens(apart) == tokens(merged)
    assert ['{"x": 1}<|im_end|>', '{"y": "s"}<|im_end|>'] == [labels(merged, i) for i in (0, 1)]


def test_skipped_rows_are_named_by_reason(tmp_path: Path, tokenizer: str) -> None:
    """Null answers of parquet, where pandas has NaN: places and counts, no word of it (A03)."""
    answers = ["four", None, "", "   ", None, "two"]
    rows = [{"prompt": "two?", "response": answer} for answer in answers]
    file = write_parquet(tmp_path / "a.parquet", rows)
    profile = profile_lengths([file], tokenizer_dir=tokenizer)
    assert {"response is null": 2} == profile.skipped
    assert [1, 4] == [place.row for place in profile.skipped_rows["response is null"]]
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    text = fast.decode(tokens(profile))
    assert "nan" not in text
    assert "None" not in text


def damaged(path: Path) -> str:
    """Write a parquet file that lost its last bytes."""
    write_parquet(path, [{"text": "a"}])
    path.write_bytes(path.read_bytes()[:-20])
    return str(path)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: write_parquet(p, [{"prompt": "a", "response": None}] * 3), "response is"),
        (lambda p: write_parquet(p, [{"text": None}] * 3), "text is null (3)"),
        (damaged, "file damaged or incomplete: "),
        (lambda p: write_parquet(p, []), "has no rows"),
    ],
    ids=["null answers", "null text", "cut", "empty"],
)
def test_a_file_without_use_is_exit_1(
    tmp_path: Path, tokenizer: str, write: Any, words: str
) -> None:
    """And one plain sentence (A03, A06)."""
    file = write(tmp_path / "a.parquet")
    command = ["profile", file, "--tokenizer", tokenizer, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, command)
    assert (1, "") == (result.exit_code, result.stdout)
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("autobatch: "))
    assert words in said


def test_one_enormous_row_is_told_and_not_followed(tmp_path: Path, tokenizer: str) -> None:
    """999 rows of 41 to 60 tokens, one of 200,000: what cutting it costs is said (A07)."""
    rows = [{"input_ids": [5] * (41 + i % 20), "labels": [5] * (41 + i % 20)} for i in range(999)]
    rows.append({"input_ids": [5] * 200_000, "labels": [-100] * 199_990 + [5] * 10})
    file = write_parquet(tmp_path / "a.parquet", rows)
    profile = profile_lengths([file], tokenizer_dir=tokenizer)
    assert (50, 58, 59, 60, 200_000) == tuple(
        getattr(profile.length, name) for name in ("p50", "p90", "p95", "p99", "max")
    )
    advised = profile.max_length.recommended
    assert 64 == advised
    (option,) = (o for o in profile.max_length.curve if o.max_length == advised)
    assert (1, 10, 1) == (option.rows_cut, option.label_tokens_lost, option.rows_without_labels)
    widest = profile.max_length.curve[-1].padding_fraction
    assert widest.to_max_length > 0.99
    assert widest.sorted < widest.to_longest
    assert widest.packed < 0.01
    assert (999, 200_000) == (profile.longest[0].row, profile.longest[0].length_tokens)


@pytest.mark.parametrize("pad", [None, "<|im_end|>"], ids=["none", "eos"])
def test_the_last_eos_is_a_label_whatever_pads(tmp_path: Path, pad: str | None) -> None:
    """Labels are known by their place, not by their id (A10)."""
    folder = train_tokenizer(tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": pad}))
    rows = [{"question": "two", "answer": answer} for answer in ("plus", "plus two plus two")]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    profile = profile_lengths([file], tokenizer_dir=str(folder))
    assert ["plus<|im_end|>", "plus two plus two<|im_end|>"] == [labels(profile, i) for i in (0, 1)]


def test_generation_marks_change_no_label(tmp_path: Path) -> None:
    """A template with marks gives the labels of the same template without (A16)."""
    marked = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASKED, TOLD] * 2}])
    found = []
    for name, template in (("plain", CHATML), ("marked", marked)):
        folder = train_tokenizer(tmp_path / name, chat_template=template)
        profile = profile_lengths([file], tokenizer_dir=str(folder))
        found.append((tokens(profile), labels(profile)))
    assert found[0] == found[1]
    assert "Two.<|im_end|>Two.<|im_end|>" == found[0][1]


# ---- runs ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one step: where it lies, what was said, the profile of its rows."""

    directory: Path
    said: str
    profile: LengthProfile


def launch(model: Path, data: str, directory: Path) -> list[str]:
    """Make one step over all rows in a directory; return what was said."""
    (config := directory.with_name("config.yaml")).write_text("{}")
    overrides = [
        *(f"model.path={model}", f"data.train_files=[{data}]", "model.init=random"),
        *("data.max_token_len_per_gpu=512", "trainer.device=cpu", "engine.param_dtype=fp32"),
        *("trainer.total_training_steps=1", f"trainer.output_dir={directory}"),
    ]
    said: list[str] = []
    report = api.launch(config, overrides=overrides, talk=said.append)
    assert report.finished
    return said


def model_with(directory: Path, template: str | None, **changes: Any) -> Path:
    """Make a model directory whose tokenizer has a template, or none."""
    model = tiny_model(directory, vocab_size=640, max_position_embeddings=512, **changes)
    return train_tokenizer(model, chat_template=template)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step on parquet rows with tools, lists in arguments, and a row without an answer."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        rows_with_call({"entity_list": ["a", "b"]}, content=""),
        {"messages": [ASKED, TOLD]},
        {"messages": [ASKED]},
    ]
    rows = [{**row, "tools": [{"name": "f", "of": ["x"]}]} for row in rows]
    data = write_parquet(folder / "a.parquet", rows)
    model = model_with(folder / "model", TOOLS)
    said = launch(model, data, folder / "run")
    profile = profile_lengths([data], tokenizer_dir=str(model))
    return Run(directory=folder / "run", said="\n".join(said), profile=profile)


def test_a_step_is_made_on_nested_columns(run: Run) -> None:
    """The loop trains on the label tokens that the profile counted (A01)."""
    (row,) = read_jsonl(run.directory / "metrics.jsonl")
    assert 1 == run.profile.num_rows_without_labels
    assert run.profile.num_label_tokens == row["num_label_tokens"]


def test_rows_without_labels_are_left_out_and_counted(run: Run) -> None:
    """They would be batches of nothing (A14)."""
    (row,) = read_jsonl(run.directory / "metrics.jsonl")
    assert run.profile.num_tokens > row["num_tokens"]
    assert "1 of 3 samples have no label token and are left out" in run.said


def test_the_template_used_lies_beside_the_weights(run: Run) -> None:
    """Inference prints what training saw (A09)."""
    fast = PreTrainedTokenizerFast.from_pretrained(run.directory / "hf")
    assert TOOLS == fast.chat_template


def test_no_template_stops_before_anything_starts(tmp_path: Path) -> None:
    """With the remedy in the sentence; no run directory is made (A09)."""
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASKED, TOLD]}])
    model = model_with(tmp_path / "model", None)
    with pytest.raises(AutobatchError, match=r"no chat template.*add chat_template\.jinja"):
        launch(model, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_padding_outside_the_embedding_is_refused(tmp_path: Path) -> None:
    """Also where no row is ever padded (A10)."""
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASKED, TOLD]}])
    model = model_with(tmp_path / "model", CHATML)
    fast = PreTrainedTokenizerFast.from_pretrained(model)
    num_tokens = len(fast)
    fast.add_special_tokens({"pad_token": "<|pad|>"})
    fast.save_pretrained(str(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": num_tokens}))
    with pytest.raises(ConfigError, match=rf"token id {num_tokens}, .* has {num_tokens} rows"):
        launch(model, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()
