"""The checks of config values that no type can say."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from typing import Any

from autobatch.config.schema import SECTIONS, Config
from autobatch.errors import ConfigError
from autobatch.records import SCHEMA_VERSION
from autobatch.units import format_value

CHOICES: dict[str, tuple[str, ...]] = {
    "data.truncation": ("error", "right", "left", "drop"),
    "data.pad_to": ("longest", "max_length"),
    "model.init": ("pretrained", "random"),
    "model.loss_kernel": ("fused", "chunked", "logits"),
    "model.gradient_checkpointing": ("none", "selective", "selective_matmul", "every_2", "full"),
    "model.attn_implementation": (
        "auto",
        "varlen",
        "reference",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
    ),
    "engine.strategy": ("fsdp2", "single"),
    "engine.state_dtype": ("fp32", "bf16"),
    "engine.param_dtype": ("bf16", "fp32"),
    "engine.reduce_dtype": ("fp32", "bf16"),
    "optim.name": ("adamw",),
    "optim.lr_scheduler": ("cosine", "linear", "constant"),
    "trainer.resume_mode": ("auto", "disable"),
    "trainer.device": ("cuda", "cpu"),
}
LOGGERS = ("console", "jsonl")  # both are always written
_AT_LEAST: dict[str, float] = {
    "data.max_length": 2,
    "data.train_batch_size": 1,
    "data.max_token_len_per_gpu": 1,
    "data.micro_batch_size_per_gpu": 1,
    "data.val_fraction": 0,
    "data.seed": 0,
    "model.loss_chunk_tokens": 1,
    "model.lora_rank": 0,
    "optim.lr": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps_ratio": 0,
    "optim.clip_grad": 0,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.max_ckpt_to_keep": 1,
    "trainer.nproc_per_node": 1,
    "trainer.nnodes": 1,
}
_LARGEST_WHOLE = 2**31 - 1  # of keys not named here: counts of rows, tokens, steps, processes
_AT_MOST: dict[str, float] = {
    "data.seed": 2**32 - 1,  # numpy's largest seed
    "optim.warmup_steps_ratio": 1,
    "trainer.total_epochs": 10_000_000,
    "trainer.total_training_steps": 10_000_000,
}


def check_config(config: Config) -> None:
    """Check what no type can say.

    Raises:
        ConfigError: for a value outside its choices or range.
    """
    if config.schema_version != SCHEMA_VERSION:
        raise ConfigError(
            f"schema_version {format_value(config.schema_version)} is not the {SCHEMA_VERSION} "
            "that this autobatch reads; tune again with this version"
        )
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise ConfigError(
                f"{key}={_shown(value)} is not one of {', '.join(choices)}; "
                f"{_nearest(str(value), choices)}"
            )
    for key, least in _AT_LEAST.items():
        value = _get(config, key)
        if value is not None and not value >= least:  # NaN fails too
            raise ConfigError(f"{key}={_shown(value)} is below {least:g}; give {least:g} or more")
    for section, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            _check_size(f"{section}.{field.name}", _get(config, f"{section}.{field.name}"))
    unknown = [name for name in config.trainer.logger if name not in LOGGERS]
    if unknown:
        raise ConfigError(
            f"trainer.logger={_shown(unknown[0])} does not work in this version; "
            f"use [{', '.join(LOGGERS)}]"
        )
    if config.data.val_fraction >= 1:
        raise ConfigError(
            f"data.val_fraction={config.data.val_fraction} leaves no row to train on; "
            "give a value below 1"
        )
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise ConfigError(
            f"optim.betas={list(config.optim.betas)} is not two numbers in [0, 1); use [0.9, 0.95]"
        )


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is no finite number; give one such as 0.1")
    most = _AT_MOST.get(key, _LARGEST_WHOLE if isinstance(value, int) else math.inf)
    if isinstance(value, (int, float)) and value > most:
        raise ConfigError(f"{key}={_shown(value)} is above {most}; give {most} or less")


def _shown(value: Any) -> str:
    return format_value(value).strip("'")


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _nearest(value: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, list(choices), n=1, cutoff=0.3)
    return f"did you mean {close[0]}?" if close else "choose one of them"
