"""Where a model's first weights come from: a seed, or a checkpoint read tensor by tensor."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from autobatch.engine.adapters import base_name, fill_adapter, is_adapter
from autobatch.errors import ModelError


class WeightSource(Protocol):
    """Fills a freshly allocated module, which is one part of a model."""

    def fill(self, name: str, module: torch.nn.Module) -> None:
        """Set the module's own parameters and buffers; `name` is its place in the model."""


class RandomWeights:
    """The model class's own initialisation, from one seed per module.

    A module's values depend on the seed and its name only, so they are the same for any number
    of ranks and any order of filling.
    """

    def __init__(self, model: PreTrainedModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed

    def fill(self, name: str, module: torch.nn.Module) -> None:
        """Initialise one module."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(name.encode()) ^ self._seed)
            if is_adapter(name):
                fill_adapter(name, module)
            else:
                self._model._init_weights(module)


class CheckpointWeights:
    """A Hugging Face checkpoint: safetensors read one tensor at a time.

    Checkpoints whose names are not the model's (old layouts, *.bin files) are converted by
    transformers, whole and in host memory.

    Raises:
        ModelError: if the checkpoint is damaged or lacks tensors of the model.
    """

    def __init__(self, model: PreTrainedModel, path: Path, *, seed: int) -> None:
        self._random = RandomWeights(model, seed=seed)  # buffers, adapters
        wanted = {base_name(n) for n, _ in model.named_parameters() if not is_adapter(n)}
        self._files = _safetensors_files(path)
        self._open: dict[Path, object] = {}
        self._converted: dict[str, torch.Tensor] = {}
        if not wanted <= set(self._files):
            self._converted = _convert(path, model.dtype, wanted)

    def fill(self, name: str, module: torch.nn.Module) -> None:
        """Copy one module's parameters from the checkpoint; compute its buffers."""
        if is_adapter(name) or next(module.buffers(recurse=False), None) is not None:
            self._random.fill(name, module)
        if is_adapter(name):
            return
        for key, parameter in module.named_parameters(recurse=False):
            full_name = base_name(f"{name}.{key}")
            value = self._read(full_name)
            if value.shape != parameter.shape:
                raise ModelError(
                    f"{full_name} has shape {tuple(value.shape)} in the weights and "
                    f"{tuple(parameter.shape)} by config.json; use files of one model"
                )
            with torch.no_grad():
                parameter.copy_(value)

    def _read(self, name: str) -> torch.Tensor:
        if self._converted:
            return self._converted[name]
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path].get_tensor(name)  # type: ignore[attr-defined]


def _safetensors_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, {} when there are no safetensors."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        missing = sorted({f for f in names.values() if not (path / f).exists()})
        if missing:
            raise ModelError(f"{path} lacks {missing[0]}, which its index names; copy it again")
        return {name: path / file for name, file in names.items()}
    single = path / "model.safetensors"
    if not single.exists():
        return {}
    try:
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), single)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{single} is damaged ({error}); copy it again") from error


def _convert(path: Path, dtype: torch.dtype, wanted: set[str]) -> dict[str, torch.Tensor]:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"the weights in {path} cannot be read: {first}") from error
    missing = sorted(set(info["missing_keys"]) & wanted)
    if missing:
        raise ModelError(
            f"the weights in {path} lack {len(missing)} tensors of the model, first {missing[0]}; "
            "use files of one model"
        )
    return dict(model.named_parameters())
