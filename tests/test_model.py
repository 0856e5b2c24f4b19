"""A model's shape and costs agree with the model that transformers builds."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from autobatch.errors import ModelError
from autobatch.model import (
    model_flops,
    num_matmul_parameters,
    num_parameters,
    read_model_spec,
    row_flops,
)

SHARED = Path(os.environ.get("AUTOBATCH_SHARED", Path(__file__).parents[2] / "shared"))
PUBLISHED = SHARED / "data" / "model_configs"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CASES = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"attention_bias": False}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": None, "tie_word_embeddings": None}),
    ("mistral", {"head_dim": 20}),
    ("mistral", {"attention_bias": True}),
    ("gemma", {}),
    ("gemma", {"tie_word_embeddings": None}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {"tie_word_embeddings": True}),
    ("gemma3_text", {"head_dim": 16, "attention_bias": True}),
]


def write_model(folder: Path, **changes) -> Path:
    """Write a tiny config.json; None leaves a field out."""
    config = {k: v for k, v in (TINY | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_parameters_are_those_of_the_real_model(tmp_path, model_type, changes):
    """Counted without torch, equal to the module that transformers builds."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path, model_type=model_type, **changes)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linears = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    spec = read_model_spec(folder)
    assert (sum(p.numel() for p in model.parameters()), linears) == (
        num_parameters(spec),
        num_matmul_parameters(spec),
    )


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no shared data here")
def test_parameters_are_those_that_were_published():
    """Nine published configs, each with its known count."""
    known = json.loads((PUBLISHED / "params.json").read_text())
    expected = {model["name"]: model["params"] for model in known}
    assert expected == {
        name: num_parameters(read_model_spec(PUBLISHED / name)) for name in expected
    }


def test_an_unknown_family_has_an_unknown_count(tmp_path):
    """A count is exact or it is None."""
    spec = read_model_spec(write_model(tmp_path, model_type="newest"))
    assert None is num_parameters(spec)


def test_missing_fields_take_their_defaults(tmp_path):
    """Heads share nothing, head_dim divides hidden_size, nothing is tied or biased."""
    folder = write_model(tmp_path, num_key_value_heads=None, tie_word_embeddings=None)
    spec = read_model_spec(folder)
    assert (4, 12, False, False) == (
        spec.num_key_value_heads,
        spec.head_dim,
        spec.tie_word_embeddings,
        spec.attention_bias,
    )


def test_a_nested_text_config_is_the_model(tmp_path):
    """Of a multimodal config the decoder counts, with the defaults of its family."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    assert ("gemma3_text", 8, 4, 256, 262208, True) == (
        spec.model_type,
        spec.num_attention_heads,
        spec.num_key_value_heads,
        spec.head_dim,
        spec.vocab_size,
        spec.tie_word_embeddings,
    )


def test_the_hash_follows_the_shape(tmp_path):
    """Another layer is another model; another dropout or folder is not."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    first = read_model_spec(write_model(folders[0])).config_hash
    assert first == read_model_spec(write_model(folders[1], attention_dropout=0.1)).config_hash
    assert first != read_model_spec(write_model(folders[2], num_hidden_layers=3)).config_hash


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("pytorch_model.bin", True),
        ("training_args.bin", False),
        ("adapter_model.safetensors", False),
        (".gitkeep", False),
    ],
)
def test_weights_are_seen_by_their_files(tmp_path, file, expected):
    """Left-overs of a training run are no weights."""
    write_model(tmp_path)
    (tmp_path / file).touch()
    assert expected == read_model_spec(tmp_path).has_weights


def test_a_missing_directory_is_one_sentence(tmp_path):
    """The path is named as the user wrote it."""
    with pytest.raises(ModelError, match="is no directory; give the folder"):
        read_model_spec(tmp_path / "nowhere")


def test_a_directory_without_config_is_one_sentence(tmp_path):
    """What is missing is named."""
    with pytest.raises(ModelError, match=r"has no config\.json; give"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_is_one_sentence(tmp_path, text):
    """Neither half a file nor other JSON is a config."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"JSON.*; fetch the model again"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": 0}, "vocab_size=0 is no positive whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' is no positive whole number"),
        ({"intermediate_size": True}, "intermediate_size=True is no positive"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads=3"),
        ({"hidden_size": 50}, "hidden_size=50 is no multiple of num_attention_heads=4"),
        ({"model_type": None}, "names no model_type"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
        ({"architectures": None, "model_type": "bert"}, "no causal language model"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "no causal language model",
        ),
    ],
)
def test_a_config_that_is_no_decoder_is_refused(tmp_path, changes, words):
    """The field and its value are named, with the next move."""
    with pytest.raises(ModelError, match=words) as caught:
        read_model_spec(write_model(tmp_path, **changes))
    assert ";" in str(caught.value)


def test_flops_follow_the_formula(tmp_path):
    """Two operations a weight and token, three times, with half the attention square."""
    spec = read_model_spec(write_model(tmp_path))
    matmul = 2 * (48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 80)
    expected = 6 * matmul * 10 + 6 * 100 * 48 * 7 + 6 * 2 * 4 * 12 * 58
    assert expected == model_flops(spec, num_tokens=10, num_label_tokens=7, sum_squared_lengths=58)


def test_the_flops_of_rows_add_up(tmp_path):
    """A micro-batch costs what its rows cost."""
    spec = read_model_spec(write_model(tmp_path))
    rows = row_flops(spec, np.array([3, 7]), np.array([2, 5]))
    total = model_flops(spec, num_tokens=10, num_label_tokens=7, sum_squared_lengths=9 + 49)
    assert (np.int64, total) == (rows.dtype, rows.sum())


def test_the_flops_of_a_large_model_and_a_long_row_fit_int64(tmp_path):
    """A million tokens through eighty layers stay exact."""
    spec = read_model_spec(write_model(tmp_path))
    big = dataclasses.replace(
        spec,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=128256,
    )
    tokens = 10**6
    exact = model_flops(
        big, num_tokens=tokens, num_label_tokens=tokens, sum_squared_lengths=tokens**2
    )
    assert exact == row_flops(big, np.array([tokens]), np.array([tokens]))[0]
