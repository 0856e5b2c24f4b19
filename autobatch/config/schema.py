"""The schema of a run's config: sections, keys, defaults, and the keys that tuning may write."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from autobatch.records import SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows, and how they become micro-batches."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    format: str = "auto"
    prompt_key: str | None = None
    response_key: str | None = None
    messages_key: str | None = None
    text_key: str | None = None
    tools_key: str | None = None
    input_key: str | None = None
    input_ids_key: str | None = None
    labels_key: str | None = None
    loss_mask_key: str | None = None
    max_length: int | None = None  # tokens; None: the longest row rounded up to 8
    truncation: str = "error"
    train_batch_size: int = 256  # global rows per optimizer step
    val_fraction: float = 0.0
    pad_to: str = "longest"
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = None  # tokens per micro-batch, padding-free
    micro_batch_size_per_gpu: int | None = None  # rows per micro-batch, padded
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and the switches of its forward and backward pass."""

    path: str | None = None
    tokenizer_path: str | None = None  # None: the model's own
    revision: str | None = None
    init: str = "pretrained"
    use_remove_padding: bool = True
    use_liger: bool = False
    loss_kernel: str = "chunked"
    loss_chunk_tokens: int | None = None  # rows of logits at a time; None: from H and V
    gradient_checkpointing: str = "none"
    attn_implementation: str = "auto"  # auto: varlen or reference when packed, sdpa when padded
    compile: bool = False
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: Any = "all-linear"
    quantization: str | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How state is split and in which precision it is kept."""

    strategy: str = "fsdp2"
    state_dtype: str = "fp32"  # master weights and moments
    param_dtype: str = "bf16"  # forward and backward
    reduce_dtype: str = "fp32"  # gradients between ranks
    reshard_after_forward: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate."""

    name: str = "adamw"
    lr: float = 1.0e-05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    lr_scheduler: str = "cosine"
    warmup_steps_ratio: float = 0.03
    weight_decay: float = 0.01
    clip_grad: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, where to, on what."""

    total_epochs: int = 3
    total_training_steps: int | None = None  # overrides total_epochs
    save_freq: int = -1  # optimizer steps between checkpoints; -1: at the end only
    test_freq: int = -1
    max_ckpt_to_keep: int | None = None
    resume_mode: str = "auto"
    output_dir: str = "autobatch-out/run"
    logger: list[str] = field(default_factory=lambda: ["console", "jsonl"])
    device: str = "cuda"
    nproc_per_node: int = 1
    nnodes: int = 1
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `tuning` holds the evidence and is None until `autobatch tune` ran."""

    schema_version: int = SCHEMA_VERSION
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tuning: dict[str, Any] | None = None


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "engine": EngineConfig,
    "optim": OptimConfig,
    "trainer": TrainerConfig,
}

# Where each toggle lives; the last part of a key is the field of `Toggles`.
TOGGLE_KEYS = (
    "model.use_remove_padding",
    "model.use_liger",
    "model.loss_kernel",
    "model.loss_chunk_tokens",
    "model.gradient_checkpointing",
    "model.attn_implementation",
    "model.compile",
    "engine.strategy",
    "engine.reshard_after_forward",
    "engine.cpu_offload",
)
SIZE_KEYS = (
    "data.micro_batch_size_per_gpu",
    "data.use_dynamic_bsz",
    "data.max_token_len_per_gpu",
)
TUNABLE_KEYS = SIZE_KEYS + TOGGLE_KEYS


def known_keys() -> list[str]:
    """Return every dotted key that a user may set."""
    return [f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)]


def type_of_key(key: str) -> str | None:
    """Return the annotation of a dotted key, such as `int | None`; None for an unknown key."""
    section, _, name = key.rpartition(".")
    kind = SECTIONS.get(section) if section else Config
    if kind is None:
        return None
    return {f.name: str(f.type) for f in dataclasses.fields(kind)}.get(name)
