"""The candidates worth trying: toggle sets in order of promise, sizes, loads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product

from autobatch.config import Config, default_attention, toggles_of
from autobatch.errors import ConfigError
from autobatch.plan.microbatches import MicroBatch
from autobatch.records import Candidate, Load, Toggles

_BUDGET_KEY = "data.max_token_len_per_gpu"
_ROWS_KEY = "data.micro_batch_size_per_gpu"
# Searched toggles, the value that most likely trains fastest first.
_CHOICES: dict[str, tuple[bool | str, ...]] = {
    "model.use_remove_padding": (True, False),
    "model.gradient_checkpointing": ("none", "full"),
    "model.loss_kernel": ("chunked", "logits"),
}


def toggle_sets(
    config: Config, *, num_ranks: int, fixed_keys: Collection[str]
) -> tuple[Toggles, ...]:
    """Return the toggle sets to try on the CPU, the most promising first.

    A key in `fixed_keys` (canonical, dotted) keeps the config's value; so does every toggle that
    is not searched. One rank needs no sharding machinery: its strategy is `single`.

    Raises:
        ConfigError: if the fixed keys leave no toggle set.
    """
    base = toggles_of(config)
    forms = _forms(config, fixed_keys)
    choices = {
        key.split(".")[1]: (getattr(base, key.split(".")[1]),) if key in fixed_keys else values
        for key, values in {**_CHOICES, "model.use_remove_padding": forms}.items()
    }
    strategy = base.strategy
    if "engine.strategy" not in fixed_keys:
        strategy = "single" if num_ranks == 1 else "fsdp2"
    attention = config.model.attn_implementation
    is_attention_fixed = "model.attn_implementation" in fixed_keys and attention != "auto"
    sets = []
    for values in product(*choices.values()):
        toggles = replace(base, strategy=strategy, **dict(zip(choices, values, strict=True)))
        usual = default_attention(
            use_remove_padding=toggles.use_remove_padding, device=config.trainer.device
        )
        if not is_attention_fixed:
            sets.append(replace(toggles, attn_implementation=usual))
        elif "model.use_remove_padding" in fixed_keys or attention == usual:
            sets.append(replace(toggles, attn_implementation=attention))
    return tuple(sets) or (replace(base, strategy=strategy),)


def left_out(config: Config, *, fixed_keys: Collection[str]) -> dict[str, str]:
    """Return the toggles that cannot be tried on this device, each with its reason."""
    if config.trainer.device == "cpu" and "model.use_liger" not in fixed_keys:
        return {"model.use_liger": "Liger needs CUDA"}
    return {}


def fixed_size(config: Config, fixed_keys: Collection[str]) -> int | None:
    """Return the size that the user fixed, None if it is to be searched."""
    budget, rows = _fixed_sizes(config, fixed_keys)
    return rows if budget is None else budget


def candidate_at(toggles: Toggles, size: int) -> Candidate:
    """Return the candidate of a toggle set at a size: tokens if padding-free, else rows."""
    if toggles.use_remove_padding:
        return Candidate(toggles=toggles, max_token_len_per_gpu=size)
    return Candidate(toggles=toggles, micro_batch_size_per_gpu=size)


def size_text(candidate: Candidate) -> str:
    """Return the size with its unit, such as `4096 tokens`."""
    unit = "row" if candidate.max_token_len_per_gpu is None else "token"
    return f"{candidate.size} {unit}{'' if candidate.size == 1 else 's'}"


def load_of(micro_batch: MicroBatch) -> Load:
    """Return what a trial steps for a worst micro-batch: it, twice in a step."""
    return Load(micro_batches=(micro_batch.lengths,) * 2, padded_to=micro_batch.padded_to)


def load_tokens(load: Load) -> int:
    """Return the computed tokens of one micro-batch of a load: padded ones count."""
    lengths = load.micro_batches[0]
    return sum(lengths) if load.padded_to is None else len(lengths) * load.padded_to


def _fixed_sizes(config: Config, fixed_keys: Collection[str]) -> tuple[int | None, int | None]:
    data = config.data
    return (
        data.max_token_len_per_gpu if _BUDGET_KEY in fixed_keys else None,
        data.micro_batch_size_per_gpu if _ROWS_KEY in fixed_keys else None,
    )


def _forms(config: Config, fixed_keys: Collection[str]) -> tuple[bool, ...]:
    """Return the values of use_remove_padding that go with every key the user fixed."""
    budget, rows = _fixed_sizes(config, fixed_keys)
    wanted = {}
    if "model.use_remove_padding" in fixed_keys:
        wanted["model.use_remove_padding"] = config.model.use_remove_padding
    if "data.use_dynamic_bsz" in fixed_keys:
        wanted["data.use_dynamic_bsz"] = config.data.use_dynamic_bsz
    if budget is not None:
        wanted[_BUDGET_KEY] = True
    if rows is not None:
        wanted[_ROWS_KEY] = False
    if len(set(wanted.values())) > 1:
        keys = " and ".join(f"{k}={_get(config, k)}" for k in wanted)
        raise ConfigError(
            f"{keys} do not go together; fix {_BUDGET_KEY} with use_remove_padding=true "
            f"(padding-free), or {_ROWS_KEY} with use_remove_padding=false (padded)"
        )
    return tuple(set(wanted.values())) or (True, False)


def _get(config: Config, key: str) -> bool | int | None:
    section, name = key.split(".")
    value: bool | int | None = getattr(getattr(config, section), name)
    return value
