"""The candidates worth trying: toggle sets in order of promise, sizes, loads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

from autobatch.config import Config, default_attention, toggles_of
from autobatch.errors import ConfigError
from autobatch.plan.settings import Plan
from autobatch.plan.worst import squarest_micro_batch, worst_micro_batch
from autobatch.records import Candidate, Load, Toggles

_BUDGET_KEY = "data.max_token_len_per_gpu"
_ROWS_KEY = "data.micro_batch_size_per_gpu"
# Searched toggles by device, the value that most likely trains fastest first. Every second layer
# (every_2) keeps as much as selective_matmul and repeats more: it is stepped when asked for.
_FORMS_OF_CHECKPOINTING = {
    "cpu": ("none", "full"),
    "cuda": ("none", "selective_matmul", "selective", "full"),
}
# (use_liger, loss_kernel): Liger's layers and its loss are one switch, `--liger`.
_KERNELS = {
    "cpu": ((False, "chunked"), (False, "logits")),
    "cuda": ((True, "fused"), (False, "chunked"), (False, "logits")),
}


def toggle_sets(
    config: Config, *, num_ranks: int, fixed_keys: Collection[str]
) -> tuple[Toggles, ...]:
    """Return the toggle sets to try on the config's device, the most promising first.

    A key in `fixed_keys` (canonical, dotted) keeps the config's value; so does every toggle that
    is not searched. One rank needs no sharding machinery: its strategy is `single`.

    Raises:
        ConfigError: if the fixed keys leave no toggle set.
    """
    base = toggles_of(config)
    if "engine.strategy" not in fixed_keys:
        base = replace(base, strategy="single" if num_ranks == 1 else "fsdp2")
    checkpointing: tuple[str, ...] = _FORMS_OF_CHECKPOINTING[config.trainer.device]
    if "model.gradient_checkpointing" in fixed_keys:
        checkpointing = (base.gradient_checkpointing,)
    attention = config.model.attn_implementation
    is_attention_fixed = "model.attn_implementation" in fixed_keys and attention != "auto"
    sets = []
    for use_remove_padding, form, (use_liger, kernel) in product(
        _forms(config, fixed_keys), checkpointing, _kernels(config, fixed_keys)
    ):
        usual = default_attention(
            use_remove_padding=use_remove_padding, device=config.trainer.device
        )
        if is_attention_fixed:
            if "model.use_remove_padding" not in fixed_keys and attention != usual:
                continue
            usual = attention
        sets.append(
            replace(
                base,
                use_remove_padding=use_remove_padding,
                gradient_checkpointing=form,
                use_liger=use_liger,
                loss_kernel=kernel,
                attn_implementation=usual,
            )
        )
    return tuple(sets) or (base,)


def _kernels(config: Config, fixed_keys: Collection[str]) -> tuple[tuple[bool, str], ...]:
    """Return the pairs of use_liger and loss_kernel that go with the keys the user fixed."""
    model = config.model
    is_liger_fixed = "model.use_liger" in fixed_keys
    is_loss_fixed = "model.loss_kernel" in fixed_keys
    if is_liger_fixed and is_loss_fixed:
        return ((model.use_liger, model.loss_kernel),)
    pairs: tuple[tuple[bool, str], ...] = _KERNELS[config.trainer.device]
    if is_liger_fixed:
        pairs = tuple(p for p in pairs if p[0] == model.use_liger)
        return pairs or ((model.use_liger, "chunked"),)
    if not _has_liger():
        pairs = tuple(p for p in pairs if not p[0])
    if is_loss_fixed:
        switches = sorted({p[0] for p in pairs}, reverse=True)
        pairs = tuple((use_liger, model.loss_kernel) for use_liger in switches)
    return pairs


def _has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def left_out(config: Config, *, fixed_keys: Collection[str]) -> dict[str, str]:
    """Return the toggles that cannot be tried here, each with its reason."""
    if "model.use_liger" in fixed_keys:
        return {}
    if config.trainer.device == "cpu":
        return {"model.use_liger": "Liger needs CUDA"}
    if not _has_liger():
        return {"model.use_liger": "the package liger-kernel is not installed"}
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


def load_of(plan: Plan) -> Load:
    """Return what a trial of a plan steps: its micro-batch of most tokens, twice in a step.

    Where packed rows of a larger sum of squared lengths exist, they are stepped too. (Padded, the
    longest row's micro-batch has the most rows as well.)

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    worst = worst_micro_batch(plan)[0]
    batches = [worst.lengths, worst.lengths]
    squarest = squarest_micro_batch(plan)
    if worst.padded_to is None and squarest.sum_squared_lengths > worst.sum_squared_lengths:
        batches.append(squarest.lengths)
    return Load(micro_batches=tuple(batches), padded_to=worst.padded_to)


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
