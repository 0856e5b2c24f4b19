"""`autobatch probe`: one candidate, stepped for real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autobatch.api.inputs import Talk, model_dir
from autobatch.api.machine import find_machine, prober_on
from autobatch.config import candidate_of, load_config, overridden_keys, resolve, with_values
from autobatch.errors import ConfigError
from autobatch.model import read_model_spec
from autobatch.probing.runner import error_of
from autobatch.records import Load, Trial
from autobatch.storage import DEFAULT_OUT, make_out_dir
from autobatch.units import round_up

DEFAULT_TIMEOUT_SECS = 900.0


def probe(
    *,
    model: str,
    length: int,
    tokens: int | None = None,
    micro_batch_size: int | None = None,
    out: str | Path = DEFAULT_OUT,
    gpu: str | None = None,
    device: str | None = None,
    num_gpus: int = 1,
    memory_limit: str | int | None = None,
    headroom: str | int | None = None,
    seconds: float | None = None,
    overrides: Sequence[str] = (),
    talk: Talk,
) -> Trial:
    """Step packed rows of `length` tokens up to `tokens`, or padded rows of that length.

    Weights are random: memory and speed depend on shapes only.

    Raises:
        ConfigError: if not exactly one of `tokens` and `micro_batch_size` is given, or a value
            cannot work.
        RunError: if the child fails other than by memory or time.
    """
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--seconds {seconds:g} is not positive; give e.g. 600")
    if (tokens is None) == (micro_batch_size is None):
        raise ConfigError(
            "give --tokens T with --length L (packed rows), or --micro-batch-size B with "
            "--length L (padded rows)"
        )
    machine = find_machine(
        device=device,
        gpu=gpu,
        num_gpus=num_gpus,
        memory_limit=memory_limit,
        headroom=headroom,
        talk=talk,
    )
    lengths = _lengths(length=length, tokens=tokens, micro_batch_size=micro_batch_size)
    folder = model_dir(model)
    values: dict[str, Any] = {
        "model.path": folder,
        "trainer.device": machine.device,
        "trainer.nproc_per_node": machine.data_parallel_size,
        "model.use_remove_padding": tokens is not None,
        "data.use_dynamic_bsz": tokens is not None,
        "data.max_token_len_per_gpu": tokens,
        "data.micro_batch_size_per_gpu": micro_batch_size,
    }
    keys = overridden_keys(overrides)
    if machine.data_parallel_size == 1 and "engine.strategy" not in keys:
        values["engine.strategy"] = "single"
    config = with_values(
        load_config(None, overrides), {k: v for k, v in values.items() if k not in keys}
    )
    read_model_spec(folder)
    out_dir = make_out_dir(Path(out))
    padded_to = None if tokens is not None else round_up(length, 8)
    talk(f"stepping {len(lengths)} rows of {length} tokens, twice in each of two steps")
    with prober_on(machine, config, out_dir) as runner:
        trial = runner.run(
            candidate_of(resolve(config)),
            Load(micro_batches=(lengths, lengths), padded_to=padded_to),
            timeout_secs=DEFAULT_TIMEOUT_SECS if seconds is None else seconds,
        )
    if trial.outcome == "error":
        raise error_of(trial, out_dir=out_dir / "probes")
    return trial


def _lengths(*, length: int, tokens: int | None, micro_batch_size: int | None) -> tuple[int, ...]:
    if length < 2:
        raise ConfigError(f"--length {length} is below 2; one token predicts nothing")
    if micro_batch_size is not None:
        if micro_batch_size < 1:
            raise ConfigError(f"--micro-batch-size {micro_batch_size} is below 1; use 1 or more")
        return (length,) * micro_batch_size
    assert tokens is not None
    if tokens < length:
        raise ConfigError(f"--tokens {tokens} is below --length {length}; give at least one row")
    rows, rest = divmod(tokens, length)
    return (length,) * rows + ((rest,) if rest > 1 else ())
