"""One optimizer step over micro-batches, the same in a probe and in training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from autobatch.engine.build import Engine
from autobatch.engine.device import secs_between
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
    device = engine.device
    began = time.perf_counter()
    marks = [device.mark()]
    num_label_tokens, num_tokens = device.sum_counts(
        sum(m.num_label_tokens for m in micro_batches),
        sum(m.num_tokens for m in micro_batches if m.num_label_tokens),
    )
    scale = device.world_size / num_label_tokens
    total = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    for micro_batch in micro_batches:
        batch = micro_batch.to(device.torch_device)
        with device.phase("forward"):
            loss = engine.module(batch)
            scaled = loss * scale
        with device.phase("backward"):
            scaled.backward()
        total += loss.detach()
        del loss, scaled, batch
        marks.append(device.mark())
    with device.phase("optimizer"):
        norm = clip_gradients(engine)
        summed_loss, grad_norm = torch.stack([device.sum_over_ranks(total), norm]).tolist()
        mean_loss = summed_loss / num_label_tokens
        if not math.isfinite(mean_loss) or not math.isfinite(grad_norm):
            engine.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(f"loss is {mean_loss}, gradient norm is {grad_norm}")
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        engine.optimizer.step()
        engine.optimizer.zero_grad(set_to_none=True)
        engine.publish()
        marks.append(device.mark())
        device.wait()
    return StepResult(
        loss=mean_loss,
        grad_norm=grad_norm,
        num_label_tokens=num_label_tokens,
        num_tokens=num_tokens,
        micro_batch_secs=tuple(secs_between(a, b) for a, b in pairwise(marks[:-1])),
        optimizer_secs=secs_between(marks[-2], marks[-1]),
        step_secs=time.perf_counter() - began,
    )


def clip_gradients(engine: Engine) -> torch.Tensor:
    """Clip the gradients to `optim.clip_grad` (0: never); return their norm before, () float64."""
    parameters = [p for p in engine.named_parameters.values() if p.grad is not None]
    most = engine.config.optim.clip_grad or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(parameters, most)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    return norm.double()
