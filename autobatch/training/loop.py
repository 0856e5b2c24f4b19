"""The training loop of one rank: plan, load, step, record, save, export."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autobatch.config import Config, candidate_of
from autobatch.dataset.lengths.planning import plan_of
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.engine.build import Engine, build
from autobatch.engine.device import claim
from autobatch.engine.optimizer import learning_rate
from autobatch.engine.state import export_hf, load_state, save_state
from autobatch.engine.step import optimizer_step
from autobatch.errors import RunError, StaleError
from autobatch.hardware.present import named_of, present_gpus
from autobatch.model import model_flops, read_model_spec
from autobatch.oom import out_of_memory_kind
from autobatch.plan.epochs import Plan, StepPlan, num_steps, order_hash, plan_hash
from autobatch.records import ModelSpec
from autobatch.training import checkpoints, metrics
from autobatch.training.loader import StepLoader


@dataclass
class Progress:
    """The optimizer step that is being made, for the words of an error."""

    step: int | None = None


def train(
    config: Config,
    run_dir: Path,
    *,
    cache_dir: Path,
    memory_limit_bytes: int,
    num_ranks: int,
    progress: Progress,
) -> None:
    """Train as the plan says, from the newest checkpoint on, and export the model.

    Raises:
        StaleError: if the plan is not the one that was certified.
        RunError: if a checkpoint cannot be continued.
    """
    cache = TokenCache.open(cache_dir)
    spec = read_model_spec(str(config.model.path))
    plan = plan_of(config, candidate_of(config), cache, spec, num_ranks=num_ranks)
    _check_certified(config, plan)
    order = order_hash(plan)
    with claim(config, memory_limit_bytes=memory_limit_bytes) as device:
        resume = _checkpoint(config, run_dir, order)
        # a checkpoint holds what is trained; a frozen base comes from its own files
        skip_weights = resume is not None and not config.model.lora_rank
        engine = build(config, device, random_init=skip_weights)
        start = 0
        if resume is not None:
            start = checkpoints.read_mark(resume).step
            _load(engine, resume)
        if device.rank == 0:
            metrics.cut_back(run_dir / metrics.FILE_NAME, num_steps=start)
            if start < num_steps(plan):  # an export of fewer steps is not this run's result
                shutil.rmtree(run_dir / "hf", ignore_errors=True)
        _steps(engine, plan, cache, run_dir, spec, start=start, order=order, progress=progress)
        tokenizer = config.model.tokenizer_path or config.model.path
        with device.phase("save"):
            export_hf(engine, run_dir / "hf", tokenizer_path=Path(str(tokenizer)))


def _steps(
    engine: Engine,
    plan: Plan,
    cache: TokenCache,
    run_dir: Path,
    spec: ModelSpec,
    *,
    start: int,
    order: str,
    progress: Progress,
) -> None:
    config, device = engine.config, engine.device
    total = num_steps(plan)
    flops_per_sec = _measured_flops_per_sec(config, num_ranks=device.world_size)
    loader = StepLoader(plan, cache, config.data, rank=device.rank, start=start)
    for step in loader:
        progress.step = step.plan.index + 1
        # Dropout, where a model has any, depends on the step only: a resumed step is the same.
        torch.manual_seed((config.data.seed << 32) + step.plan.index)
        device.reset_peaks()
        rate = learning_rate(step.plan.index, num_steps=total, config=config.optim)
        result = optimizer_step(engine, step.micro_batches, learning_rate=rate)
        memory = device.memory_use()
        peak_reserved_bytes = device.max_over_ranks(memory.peak_reserved_bytes)
        if device.rank == 0:
            metrics.append_row(
                run_dir / metrics.FILE_NAME,
                step=step,
                result=result,
                peak_reserved_bytes=peak_reserved_bytes,
                num_alloc_retries=memory.num_alloc_retries,
                learning_rate=rate,
                flops=_step_flops(spec, step.plan),
                flops_per_sec=flops_per_sec,
            )
        done, every = progress.step, config.trainer.save_freq
        if done == total or (every > 0 and done % every == 0):
            with device.phase("save"):
                _save(engine, run_dir, step=done, order=order)


def _step_flops(spec: ModelSpec, step: StepPlan) -> int:
    lengths = [n for rank in step.ranks for m in rank if not m.is_filler for n in m.lengths]
    return model_flops(
        spec,
        num_tokens=sum(lengths),
        num_label_tokens=step.num_label_tokens,
        sum_squared_lengths=sum(n * n for n in lengths),
    )


def _measured_flops_per_sec(config: Config, *, num_ranks: int) -> float | None:
    """Return the bf16 rate of the cards here, if somebody measured it for this card.

    Adapters need other arithmetic than the formula's, so LoRA has no MFU.
    """
    if config.trainer.device != "cuda" or config.model.lora_rank:
        return None
    cards = present_gpus()
    named = named_of(cards[0].vendor_name) if cards else None
    if named is None or not named.tested or named.bf16_flops_per_sec is None:
        return None
    return named.bf16_flops_per_sec * num_ranks


def _save(engine: Engine, run_dir: Path, *, step: int, order: str) -> None:
    device = engine.device
    try:
        if device.rank == 0:
            checkpoints.prepare(run_dir, step)
        _barrier(engine)
        save_state(engine, checkpoints.partial_directory_of(run_dir, step))
        _barrier(engine)
        if device.rank == 0:
            checkpoints.complete(run_dir, step=step, order_hash=order, num_ranks=device.world_size)
            checkpoints.thin_out(run_dir, most=engine.config.trainer.max_ckpt_to_keep)
        _barrier(engine)
    except Exception as error:  # torch wraps what the file system says in errors of many types
        if out_of_memory_kind(error):
            raise
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"the checkpoint after step {step} cannot be written to {run_dir} ({words}); free "
            "space there, then launch again"
        ) from error


def _load(engine: Engine, path: Path) -> None:
    try:
        load_state(engine, path)
    except Exception as error:  # damaged bytes fail in many ways
        if out_of_memory_kind(error):
            raise
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"the checkpoint {path} cannot be read ({words}); move it away to continue from the "
            "one before"
        ) from error


def _barrier(engine: Engine) -> None:
    if engine.device.mesh is not None:
        dist.barrier()


def _checkpoint(config: Config, run_dir: Path, order: str) -> Path | None:
    if config.trainer.resume_mode == "disable":
        return None
    return checkpoints.to_resume(run_dir, order_hash=order)[0]


def _check_certified(config: Config, plan: Plan) -> None:
    certified = ((config.tuning or {}).get("certificate") or {}).get("plan_hash")
    if certified is not None and certified != plan_hash(plan):
        raise StaleError(
            "the micro-batches of this run are not the ones that were certified; "
            "run `autobatch tune` again for this data, seed and number of ranks"
        )
