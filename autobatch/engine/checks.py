"""Which switches the engine has on which device."""

from __future__ import annotations

from importlib.util import find_spec

from autobatch.config import Config
from autobatch.errors import ConfigError
from autobatch.records import Toggles

# The attention of each device, by use_remove_padding. All run in `attention.attend`.
ATTENTION: dict[str, dict[bool, tuple[str, ...]]] = {
    "cpu": {True: ("reference",), False: ("sdpa",)},
    "cuda": {True: ("varlen", "reference"), False: ("sdpa",)},
}


def check_toggles(toggles: Toggles, config: Config) -> None:
    """Refuse, by name, a switch that cannot work here.

    Raises:
        ConfigError: with the value, and what to use instead.
    """
    for key, value in (
        ("engine.cpu_offload", toggles.cpu_offload),
        ("model.quantization", config.model.quantization),
    ):
        if value:
            raise ConfigError(f"{key}={value} does not work in this version; leave it out")
    device = config.trainer.device
    for key, value, is_on in (
        ("model.use_liger", toggles.use_liger, toggles.use_liger),
        ("model.compile", toggles.compile, toggles.compile),
        ("model.loss_kernel", toggles.loss_kernel, toggles.loss_kernel == "fused"),
    ):
        if is_on and device != "cuda":
            raise ConfigError(f"{key}={value} needs CUDA; leave it out, or use trainer.device=cuda")
    if (toggles.use_liger or toggles.loss_kernel == "fused") and not find_spec("liger_kernel"):
        raise ConfigError(
            "model.use_liger and model.loss_kernel=fused need the package liger-kernel; "
            "install it, or leave them out"
        )
    attention = ATTENTION[device][toggles.use_remove_padding]
    if toggles.attn_implementation not in attention:
        raise ConfigError(
            f"model.attn_implementation={toggles.attn_implementation} does not work with "
            f"trainer.device={device}, model.use_remove_padding={toggles.use_remove_padding}; "
            f"use {' or '.join(attention)} or auto"
        )
    if toggles.attn_implementation == "varlen" and config.engine.param_dtype == "fp32":
        raise ConfigError(
            "engine.param_dtype=fp32 has no varlen attention, which computes in bf16; use "
            "engine.param_dtype=bf16, or model.attn_implementation=reference"
        )
