"""LoRA: small trained matrices beside a frozen model, by PEFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from transformers import PreTrainedModel

from autobatch.config.schema import ModelConfig
from autobatch.errors import ConfigError

# The loss reads the head's weight itself, and tied pairs would drift apart.
_REFUSED_TARGETS = ("lm_head", "embed_tokens")


def add_adapters(model: PreTrainedModel, config: ModelConfig, *, dtype: torch.dtype) -> None:
    """Freeze the model and put LoRA matrices, in `dtype`, beside its target modules.

    Raises:
        ConfigError: if a target is the head or embedding, or names no module.
    """
    targets = config.target_modules
    names = [targets] if isinstance(targets, str) else list(targets)
    refused = [name for name in names if name in _REFUSED_TARGETS]
    if refused:
        raise ConfigError(
            f"model.target_modules names {refused[0]}, whose adapter the loss would not see; "
            "leave it out (all-linear leaves it out by itself)"
        )
    try:
        with torch.device("meta"):
            inject_adapter_in_model(_lora_config(config), model)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"model.target_modules={targets} does not fit: {first}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def is_adapter(name: str) -> bool:
    """Return whether a parameter or module name is a LoRA matrix."""
    return ".lora_A." in f"{name}." or ".lora_B." in f"{name}."


def base_name(name: str) -> str:
    """Return the name that a parameter has in the checkpoint of the model alone."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def fill_adapter(name: str, module: torch.nn.Module) -> None:
    """Initialise a LoRA matrix as PEFT does: A uniform as a linear layer, B zero."""
    for parameter in module.parameters(recurse=False):
        if ".lora_B." in f"{name}.":
            parameter.zero_()
        else:
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))


def adapted_modules(names: Sequence[str]) -> list[str]:
    """Return the modules that have an adapter, from the parameter names."""
    return sorted({name.split(".lora_A.")[0] for name in names if ".lora_A." in name})


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], config: ModelConfig) -> None:
    """Write the directory that `peft` loads: its config and the trained matrices."""
    renamed = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = _lora_config(config)
    lora.base_model_name_or_path = config.path
    lora.target_modules = {name.rpartition(".")[2] for name in adapted_modules(list(tensors))}
    lora.inference_mode = True
    lora.save_pretrained(str(directory))


def _lora_config(config: ModelConfig) -> LoraConfig:
    targets = config.target_modules
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
