"""Run state on disk: sharded checkpoints, and a Hugging Face directory written in shards."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from autobatch.engine.adapters import write_adapter
from autobatch.engine.build import Engine
from autobatch.engine.sharding import DTYPES
from autobatch.storage import write_json

# Files that make a tokenizer directory; copied as they are.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_SHARD_BYTES = 2 * 2**30


def save_state(engine: Engine, directory: Path) -> None:
    """Write master weights and optimizer state; each rank writes its shards."""
    dcp.save(_state(engine), checkpoint_id=directory, no_dist=engine.device.mesh is None)


def load_state(engine: Engine, directory: Path) -> None:
    """Read what `save_state` wrote, by any number of ranks, into the engine."""
    state = _state(engine)
    dcp.load(state, checkpoint_id=directory, no_dist=engine.device.mesh is None)
    step = state["optimizer.step"]
    for parameter in engine.named_parameters.values():
        if parameter.requires_grad:
            engine.optimizer.state[parameter]["step"].fill_(float(step))
    engine.publish()


def export_hf(
    engine: Engine, directory: Path, *, tokenizer_path: Path, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write a directory that `from_pretrained` loads, in the precision of the compute.

    Tensors are gathered one at a time and written in files of at most about `shard_bytes`, so
    no rank ever holds a whole state. All ranks must call it; rank 0 writes. The directory
    appears whole or not at all.
    """
    dtype = DTYPES[engine.config.engine.param_dtype]
    if engine.config.model.lora_rank:
        _export_adapter(engine, directory, tokenizer_path)
        return
    partial = directory.with_name(f".{directory.name}.partial")
    writer = _ShardWriter(partial, shard_bytes) if engine.device.rank == 0 else None
    for name, parameter in engine.named_parameters.items():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if writer is not None:
            writer.add(name, tensor.to(dtype).cpu().contiguous())
        del tensor
    if writer is not None:
        writer.finish()
        _write_model_files(engine, partial, dtype, tokenizer_path)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    if engine.device.mesh is not None:
        dist.barrier()


def _export_adapter(engine: Engine, directory: Path, tokenizer_path: Path) -> None:
    tensors = {}
    for name, parameter in engine.named_parameters.items():
        if parameter.requires_grad:
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            tensors[name] = tensor.cpu().contiguous()
    if engine.device.rank == 0:
        partial = directory.with_name(f".{directory.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        write_adapter(partial, tensors, engine.config.model)
        _copy_files(tokenizer_path, TOKENIZER_FILES, partial)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    if engine.device.mesh is not None:
        dist.barrier()


def _state(engine: Engine) -> dict[str, Any]:
    """Return every tensor of the run state by name; moments that do not exist yet are made."""
    state: dict[str, Any] = {}
    step = 0.0
    for name, parameter in engine.named_parameters.items():
        if not parameter.requires_grad:
            continue  # a frozen base is not run state
        state[f"model.{name}"] = parameter.detach()
        moments = engine.optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter)
            moments["exp_avg_sq"] = torch.zeros_like(parameter)
        step = float(moments["step"])
        state[f"optimizer.exp_avg.{name}"] = moments["exp_avg"]
        state[f"optimizer.exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    state["optimizer.step"] = step
    return state


class _ShardWriter:
    """Collects tensors and writes a safetensors file whenever enough have come."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, then name the files as Hugging Face does."""
        self._flush()
        num_shards = len(self._shards)
        if num_shards == 1:
            self._shard_path(1).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            file_name = f"model-{number:05d}-of-{num_shards:05d}.safetensors"
            self._shard_path(number).rename(self._directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        write_json(
            self._directory / "model.safetensors.index.json",
            {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map},
        )

    def _flush(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, number: int) -> Path:
        return self._directory / f"shard-{number}"


def _write_model_files(
    engine: Engine, directory: Path, dtype: torch.dtype, tokenizer_path: Path
) -> None:
    model = engine.module.causal_lm
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    source = Path(str(engine.config.model.path))
    _copy_files(source, ("generation_config.json",), directory)
    _copy_files(tokenizer_path, TOKENIZER_FILES, directory)


def _copy_files(source: Path, names: Sequence[str], target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
