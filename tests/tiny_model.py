"""Tiny model directories for tests: a config.json of a real model class, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny_model(directory: Path, kind: str = "qwen2", **changes: Any) -> Path:
    """Write the config.json of a 2-layer model with 512 tokens, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": kind,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        **KINDS[kind],
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
