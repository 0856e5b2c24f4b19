"""How people spell keys and values: verl's names, other dtype words, the nearest known key."""

from __future__ import annotations

import difflib
from typing import Any

from autobatch.config.schema import SECTIONS, known_keys
from autobatch.errors import ConfigError

# Spellings of both verl trainers that mean the same (facts: verl 0.7.0 and 0.9.1 schemas).
ALIASES = {
    "model.partial_pretrain": "model.path",
    "use_remove_padding": "model.use_remove_padding",
    "model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "model.strategy": "engine.strategy",
    "model.fsdp_config.model_dtype": "engine.state_dtype",
    "model.fsdp_config.cpu_offload": "engine.cpu_offload",
    "engine.model_dtype": "engine.state_dtype",
    "engine.dtype": "engine.param_dtype",
    "engine.offload_policy": "engine.cpu_offload",
    "optim.lr_warmup_steps_ratio": "optim.warmup_steps_ratio",
    "optim.lr_scheduler_type": "optim.lr_scheduler",
    "optim.optimizer": "optim.name",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.n_gpus_per_node": "trainer.nproc_per_node",
    "trainer.seed": "data.seed",
}
# What others call it, or a user tries first: last part of a key -> the key here.
_OTHER_WORDS = {
    "max_steps": "trainer.total_training_steps",
    "total_steps": "trainer.total_training_steps",
    "num_steps": "trainer.total_training_steps",
    "num_train_epochs": "trainer.total_epochs",
    "epochs": "trainer.total_epochs",
    "save_steps": "trainer.save_freq",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "batch_size": "data.train_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size_per_gpu",
    "max_seq_length": "data.max_length",
    "cutoff_len": "data.max_length",
}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_DTYPE_KEYS = ("engine.state_dtype", "engine.param_dtype", "engine.reduce_dtype")


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """Return a key and its value in our own spelling."""
    name = ALIASES.get(key, key)
    if key == "model.enable_gradient_checkpointing" and value is not None:
        value = "full" if str(value).lower() == "true" else "none"
    if name in _DTYPE_KEYS:
        value = _DTYPES.get(str(value), value)
    if name == "optim.name" and isinstance(value, str):
        value = value.lower()
    if name in ("data.train_files", "data.val_files", "trainer.logger"):
        value = [] if value is None else [value] if isinstance(value, str) else value
    return name, value


def check_known(key: str) -> None:
    """Refuse a key that the schema does not have.

    Raises:
        ConfigError: naming the nearest known key.
    """
    known = known_keys()
    if key in known or key in ("tuning", "schema_version"):
        return
    last = key.rsplit(".", 1)[-1]
    by_last = [k for k in known if k.rsplit(".", 1)[-1] == last]
    close = by_last or [_OTHER_WORDS[w] for w in [last] if w in _OTHER_WORDS]
    close = close or difflib.get_close_matches(key, [*known, *ALIASES], n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"sections are {', '.join(SECTIONS)}"
    raise ConfigError(f"unknown key {key}; {hint}")
