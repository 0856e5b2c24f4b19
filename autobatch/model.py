"""The shape of a decoder, read from its config.json, with what it costs to train.

`H` hidden_size, `V` vocab_size, `L` num_hidden_layers, `N` num_attention_heads,
`K` num_key_value_heads, `D` head_dim, `I` intermediate_size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autobatch.errors import ModelError
from autobatch.records import ModelSpec
from autobatch.storage import read_text, user_path
from autobatch.units import format_value

# Values that transformers fills in where config.json is silent, as of transformers 5.24
# (models/<family>/configuration_<family>.py, checked 2026-12-01). Published gemma 3 text_configs
# name little more than their sizes.
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "llama": {},
    "mistral": {},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
}
# RMSNorm vectors a layer carries: of H values, of D values (q_norm and k_norm).
_LAYER_NORMS = {
    "qwen2": (2, 0),
    "qwen3": (2, 2),
    "llama": (2, 0),
    "mistral": (2, 0),
    "gemma": (2, 0),
    "gemma2": (4, 0),
    "gemma3_text": (4, 2),
}
_LARGEST_FIELD = 2**31 - 1  # of a shape
_LARGEST_FACTOR = 2**46  # FLOPs a token: 10 trillion weights; FLOPs of a long row still fit int64
# Sections of config.json that only a model with eyes or ears has.
_MEDIA_SECTIONS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual")
_ENCODERS = {"albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"}
# Read into the hash only: they change the layers without changing ModelSpec.
_EXTRA_SHAPE_FIELDS = (
    "hidden_act",
    "layer_types",
    "mlp_bias",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "sliding_window",
    "use_sliding_window",
)


def read_model_spec(path: str | Path) -> ModelSpec:
    """Return the shape of the causal language model in a directory.

    Reads `config.json` as JSON; of a multimodal config its `text_config`.

    Raises:
        ModelError: if the directory or its config.json is missing or damaged, a shape field is
            missing or impossible, or the model is no causal language model.
    """
    folder = user_path(path)
    config = _read_config(folder, str(path))
    _check_causal_lm(config, folder)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    config = {key: value for key, value in config.items() if value is not None}
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{folder}/config.json names no model_type; use a complete model config")

    known = _FAMILY_DEFAULTS.get(model_type, {}) | config
    where = f"{folder}/config.json"
    hidden = _positive(known, "hidden_size", where)
    heads = _positive(known, "num_attention_heads", where)
    kv_heads = _positive({"num_key_value_heads": heads} | known, "num_key_value_heads", where)
    if heads % kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={kv_heads}; correct one of them"
        )
    if "head_dim" not in known and hidden % heads:
        raise ModelError(
            f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}; "
            "correct one of them or add head_dim"
        )
    shape: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _positive(known, "num_hidden_layers", where),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _positive({"head_dim": hidden // heads} | known, "head_dim", where),
        "intermediate_size": _positive(known, "intermediate_size", where),
        "vocab_size": _positive(known, "vocab_size", where),
        "max_position_embeddings": (
            _positive(known, "max_position_embeddings", where)
            if "max_position_embeddings" in known
            else None
        ),
        "tie_word_embeddings": bool(known.get("tie_word_embeddings", False)),
        "attention_bias": _attention_bias(model_type, known),
    }
    hashed = shape | {key: known[key] for key in _EXTRA_SHAPE_FIELDS if key in known}
    spec = ModelSpec(
        path=str(path),
        **shape,
        config_hash=hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest(),
        has_weights=_has_weights(folder),
    )
    if max(_flops_factors(spec)) > _LARGEST_FACTOR:
        raise ModelError(f"{where} describes a model beyond 10 trillion weights; correct its sizes")
    return spec


def takes_media(path: str | Path) -> bool:
    """Return whether config.json describes a model that sees or hears beside reading.

    Raises:
        ModelError: if the directory or its config.json is missing or damaged.
    """
    config = _read_config(user_path(path), str(path))
    return any(name in config for name in _MEDIA_SECTIONS)


def _read_config(folder: Path, named: str) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        if not folder.is_dir():
            raise ModelError(
                f"model path {format_value(named)} is no directory; give the folder that holds "
                "config.json"
            )
        config = json.loads(read_text(file))
    except FileNotFoundError:
        raise ModelError(
            f"{folder} has no config.json; give the folder of a complete model"
        ) from None
    except OSError as error:
        raise ModelError(
            f"cannot read {format_value(str(file))} ({error.strerror or error}); check the path "
            "and its permissions"
        ) from error
    except RecursionError as error:
        raise ModelError(f"{file} is nested too deeply; fetch the model again") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}); fetch the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object; fetch the model again")
    return config


def _check_causal_lm(config: Mapping[str, Any], folder: Path) -> None:
    architectures = config.get("architectures") or []
    if isinstance(architectures, str):
        architectures = [architectures]
    if not isinstance(architectures, list):
        raise ModelError(
            f"{folder}/config.json: architectures={format_value(architectures)} is no list of "
            "names; correct it"
        )
    endings: tuple[str, ...] = ("ForCausalLM", "LMHeadModel")
    if isinstance(config.get("text_config"), Mapping):
        endings += ("ForConditionalGeneration",)
    causal = not config.get("is_encoder_decoder") and (
        any(str(name).endswith(endings) for name in architectures)
        if architectures
        else str(config.get("model_type")) not in _ENCODERS
    )
    if not causal:
        seen = ", ".join(map(str, architectures)) or config.get("model_type")
        raise ModelError(
            f"{folder} holds {seen}, which is no causal language model; "
            "choose a model whose config.json names a ...ForCausalLM architecture"
        )


def _positive(config: Mapping[str, Any], field: str, where: str) -> int:
    if field not in config:
        raise ModelError(f"{where} lacks {field}; use a complete config of a decoder")
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{where}: {field}={format_value(value)} is no positive whole number; correct it"
        )
    if value > _LARGEST_FIELD:
        raise ModelError(f"{where}: {field}={format_value(value)} is nonsense; correct it")
    return value


def _attention_bias(model_type: str, config: Mapping[str, Any]) -> bool:
    if model_type in ("qwen2", "qwen2_moe"):
        return True  # fixed in the code of the family, whatever config.json says
    if model_type == "mistral":
        return False  # likewise
    return bool(config.get("attention_bias", False))


def _has_weights(folder: Path) -> bool:
    # training_args.bin, optimizer.bin and a LoRA adapter are no weights of the model
    return any(folder.glob("pytorch_model*.bin")) or any(
        not file.name.startswith("adapter_") for file in folder.glob("*.safetensors")
    )


def num_matmul_parameters(spec: ModelSpec) -> int:
    """Return the weights of all linear layers, without embedding lookup or output head.

    A family that `num_parameters` does not know is taken for a dense decoder with a gated MLP.
    """
    query = spec.num_attention_heads * spec.head_dim
    key_value = spec.num_key_value_heads * spec.head_dim
    attention = spec.hidden_size * (query + 2 * key_value) + query * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_hidden_layers * (attention + mlp)


def num_parameters(spec: ModelSpec) -> int | None:
    """Return the number of parameters, tied ones once; None for a family not known exactly.

    Known: qwen2, qwen3, llama (without `mlp_bias`), mistral, gemma, gemma2, gemma3_text.
    """
    if spec.model_type not in _LAYER_NORMS:
        return None
    norms_of_hidden, norms_of_head = _LAYER_NORMS[spec.model_type]
    per_layer = norms_of_hidden * spec.hidden_size + norms_of_head * spec.head_dim
    if spec.attention_bias:
        heads = spec.num_attention_heads + 2 * spec.num_key_value_heads
        per_layer += heads * spec.head_dim
        if spec.model_type != "qwen2":  # there o_proj has none
            per_layer += spec.hidden_size
    embedding = spec.vocab_size * spec.hidden_size
    tables = embedding if spec.tie_word_embeddings else 2 * embedding
    final_norm = spec.hidden_size
    return num_matmul_parameters(spec) + spec.num_hidden_layers * per_layer + tables + final_norm


def model_flops(
    spec: ModelSpec, *, num_tokens: int, num_label_tokens: int, sum_squared_lengths: int
) -> int:
    """Return the floating-point operations of forward and backward, every weight trained.

    6·matmul parameters·tokens + 6·V·H·label tokens + 6·L·N·D·Σlength²: two operations a
    multiply-add, backward twice the forward, causal attention half of the square. Recomputation
    is not counted. Source: PaLM, arXiv:2204.02311, appendix B (there without the causal half,
    and with the head on every token).
    """
    per_token, per_label_token, per_squared_length = _flops_factors(spec)
    return (
        per_token * num_tokens
        + per_label_token * num_label_tokens
        + per_squared_length * sum_squared_lengths
    )


def row_flops(spec: ModelSpec, lengths: np.ndarray, label_tokens: np.ndarray) -> np.ndarray:
    """Return `model_flops` of each row alone: (num_rows,) int64, from tokens and label tokens."""
    per_token, per_label_token, per_squared_length = _flops_factors(spec)
    tokens = np.asarray(lengths, dtype=np.int64)
    labels = np.asarray(label_tokens, dtype=np.int64)
    return per_token * tokens + per_label_token * labels + per_squared_length * tokens * tokens


def _flops_factors(spec: ModelSpec) -> tuple[int, int, int]:
    return (
        6 * num_matmul_parameters(spec),
        6 * spec.vocab_size * spec.hidden_size,
        6 * spec.num_hidden_layers * spec.num_attention_heads * spec.head_dim,
    )
