"""One optimizer step over micro-batches, the same in a probe and in training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autobatch.engine.build import Engine
from autobatch.engine.tensors import MicroBatchTensors


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm is not a finite number; the weights are unchanged."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step gave; loss, norm and counts are over all ranks."""

    loss: float  # summed loss / label tokens of the step
    grad_norm: float  # before clipping
    num_label_tokens: int
    num_tokens: int  # real tokens
    micro_batch_secs: tuple[float, ...]  # this rank: forward and backward
    optimizer_secs: float  # this rank: clip, step, zero_grad
    step_secs: float


def optimizer_step(
    engine: Engine, micro_batches: Sequence[MicroBatchTensors], *, learning_rate: float
) -> StepResult:
    """Step once over the micro-batches of this rank.

    The label tokens of all micro-batches and ranks are counted first; every backward pass then
    takes the summed loss divided by that count, so the gradient does not depend on how the
    batch was cut. (FSDP averages over ranks, which the factor `world_size` undoes.)

    Raises:
        NonFiniteError: before the weights change.
    """
    start = time.perf_counter()
    device = engine.device
    counts = device.sum_over_ranks(
        torch.tensor(
            [
                sum(m.num_label_tokens for m in micro_batches),
                sum(m.num_tokens for m in micro_batches if m.num_label_tokens),
            ],
            device=device.torch_device,
        )
    )
    num_label_tokens, num_tokens = (int(n) for n in counts.tolist())
    scale = device.world_size / num_label_tokens
    total = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    micro_batch_secs = []
    for micro_batch in micro_batches:
        began = time.perf_counter()
        batch = micro_batch.to(device.torch_device)
        with device.phase("forward"):
            loss = engine.module(batch)
            scaled = loss * scale
        with device.phase("backward"):
            scaled.backward()
        total += loss.detach()
        del loss, scaled, batch
        micro_batch_secs.append(time.perf_counter() - began)
    began = time.perf_counter()
    with device.phase("optimizer"):
        mean_loss = float(device.sum_over_ranks(total)) / num_label_tokens
        grad_norm = clip_gradients(engine)
        if not math.isfinite(mean_loss) or not math.isfinite(grad_norm):
            engine.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"loss is {mean_loss}, gradient norm is {grad_norm}")
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
        engine.publish()
    end = time.perf_counter()
    return StepResult(
        loss=mean_loss,
        grad_norm=grad_norm,
        num_label_tokens=num_label_tokens,
        num_tokens=num_tokens,
        micro_batch_secs=tuple(micro_batch_secs),
        optimizer_secs=end - began,
        step_secs=end - start,
    )


def clip_gradients(engine: Engine) -> float:
    """Clip the gradients to `optim.clip_grad` (0: never) and return their norm before."""
    parameters = [p for p in engine.named_parameters.values() if p.grad is not None]
    most = engine.config.optim.clip_grad or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return float(norm)
