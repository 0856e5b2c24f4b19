"""A model built for training: allocated layer by layer, sharded, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from autobatch.config import Config, toggles_of
from autobatch.engine.activations import apply_gradient_checkpointing
from autobatch.engine.adapters import adapted_modules, add_adapters
from autobatch.engine.attention import register_attention
from autobatch.engine.checks import check_toggles
from autobatch.engine.device import Device
from autobatch.engine.language_model import LanguageModel
from autobatch.engine.liger import apply_liger
from autobatch.engine.loss import chunk_tokens
from autobatch.engine.optimizer import make_optimizer
from autobatch.engine.sharding import DTYPES, MasterWeights, shard_module
from autobatch.engine.weights import CheckpointWeights, RandomWeights, WeightSource
from autobatch.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model that can be stepped, on its device."""

    config: Config
    device: Device
    module: LanguageModel
    named_parameters: dict[str, torch.nn.Parameter]  # master weights (this rank's shards)
    optimizer: torch.optim.AdamW
    publish: Callable[[], None]  # after an optimizer step: refresh the copies that compute


def build(config: Config, device: Device, *, random_init: bool) -> Engine:
    """Return the engine of a config: layers are allocated and sharded one after the other.

    `random_init` is how a probe builds: it needs shapes, not weights. The largest part of the
    model that is ever whole on a rank is one layer, or the embedding.

    Raises:
        ConfigError: for a toggle that this version or device does not have.
        ModelError: for a model that cannot be built or whose weights do not match.
    """
    toggles = toggles_of(config)
    check_toggles(toggles, config)
    with device.phase("build"):
        model = _meta_model(config)
        if toggles.use_liger:
            apply_liger(model)
        if config.model.lora_rank:
            add_adapters(model, config.model, dtype=DTYPES[config.engine.state_dtype])
        source: WeightSource
        if random_init or config.model.init == "random":
            source = RandomWeights(model, seed=config.data.seed)
        else:
            source = CheckpointWeights(model, Path(str(config.model.path)), seed=config.data.seed)
        apply_gradient_checkpointing(model, toggles.gradient_checkpointing)
        model.train()
        chunk = toggles.loss_chunk_tokens or chunk_tokens(
            hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size
        )
        module = LanguageModel(
            model,
            loss_kernel=toggles.loss_kernel,
            chunk=chunk,
            use_varlen=toggles.attn_implementation == "varlen",
            max_length=config.data.max_length,
        )
        if toggles.compile:
            for layer in model.get_decoder().layers:
                layer.compile()
        _allocate(module, source, device, config)
        prefix = "causal_lm."
        named = dict(module.named_parameters())
        publish: Callable[[], None] = _nothing
        if device.mesh is None:
            masters = MasterWeights(module, DTYPES[config.engine.param_dtype])
            named, publish = masters.named, masters.publish
        optimizer = make_optimizer(named.values(), config.optim)
    return Engine(
        config=config,
        device=device,
        module=module,
        named_parameters={name.removeprefix(prefix): p for name, p in named.items()},
        optimizer=optimizer,
        publish=publish,
    )


def _meta_model(config: Config) -> PreTrainedModel:
    """Return the model without storage, in the precision of the master weights."""
    path = str(config.model.path)
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
        hf_config = hf_config.get_text_config(decoder=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=_base_dtype(config),
                attn_implementation=register_attention(),
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ModelError(f"the model {path} cannot be built: {first}") from error
    if getattr(hf_config, "attention_dropout", 0.0):
        raise ModelError(
            f"{path} sets attention_dropout={hf_config.attention_dropout}, which packed rows "
            "cannot have; set it to 0 in its config.json"
        )
    return model


def _base_dtype(config: Config) -> torch.dtype:
    """Return the precision the model is kept in: a frozen one needs no master weights."""
    frozen = config.model.lora_rank > 0
    return DTYPES[config.engine.param_dtype if frozen else config.engine.state_dtype]


def _allocate(module: LanguageModel, source: WeightSource, device: Device, config: Config) -> None:
    """Give every meta tensor its storage and values, sharding each layer at once."""
    model = module.causal_lm
    names = {inner: name for name, inner in model.named_modules()}
    tied = _tied_names(model)
    for layer in model.get_decoder().layers:
        _materialise(layer, names, source, device.torch_device)
        if device.mesh is not None:
            shard_module(layer, device.mesh, config)
    in_layers = {inner for layer in model.get_decoder().layers for inner in layer.modules()}
    for inner in model.modules():
        if inner not in in_layers:
            _fill_own(inner, names[inner], source, device.torch_device, skip=tied)
    for name, target in tied.items():
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = model.get_parameter(target)
    if device.mesh is not None:
        shard_module(module, device.mesh, config)


def _materialise(
    part: torch.nn.Module,
    names: dict[torch.nn.Module, str],
    source: WeightSource,
    device: torch.device,
) -> None:
    for inner in part.modules():
        _fill_own(inner, names[inner], source, device, skip={})


def _fill_own(
    module: torch.nn.Module,
    name: str,
    source: WeightSource,
    device: torch.device,
    skip: dict[str, str],
) -> None:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if not own or all(f"{name}.{key}" in skip for key, _ in own):
        return
    module.to_empty(device=device, recurse=False)
    source.fill(name, module)


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names that share another name's parameter: {lm_head.weight: embed…}."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in _all_named_parameters(model):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def _all_named_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _nothing() -> None:
    pass


def adapted(engine: Engine) -> list[str]:
    """Return the modules that LoRA adapts, none in full fine-tuning."""
    return adapted_modules(list(engine.named_parameters))
