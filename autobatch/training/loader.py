"""The micro-batches of one rank, replayed from the plan and read ahead from the cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from autobatch.config.schema import DataConfig
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.truncation import cut_sample
from autobatch.engine.tensors import MicroBatchTensors, Row, make_tensors
from autobatch.plan.epochs import Plan, StepPlan, iter_steps, num_steps
from autobatch.plan.microbatches import MicroBatch

_STEPS_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class LoadedStep:
    """One optimizer step's data on this rank, and how long the training waited for it."""

    plan: StepPlan
    micro_batches: list[MicroBatchTensors]
    wait_secs: float


class StepLoader:
    """Reads steps ahead in a thread of its own.

    Iterating starts at optimizer step `start`, counted from 0. The host tensors are made in that
    thread too, so the account of the training thread never counts them; a probe counts its own.
    """

    def __init__(
        self, plan: Plan, cache: TokenCache, data: DataConfig, *, rank: int, start: int = 0
    ) -> None:
        self._plan = plan
        self._cache = cache
        self._data = data
        self._rank = rank
        self._start = start
        self._queue: queue.Queue[tuple[StepPlan, list[MicroBatchTensors]] | BaseException | None]
        self._queue = queue.Queue(maxsize=_STEPS_AHEAD)

    def __iter__(self) -> Iterator[LoadedStep]:
        if self._start >= num_steps(self._plan):
            return
        threading.Thread(target=self._read, daemon=True, name="step-loader").start()
        while True:
            began = time.perf_counter()
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            step, tensors = item
            wait_secs = time.perf_counter() - began
            yield LoadedStep(plan=step, micro_batches=tensors, wait_secs=wait_secs)

    def _read(self) -> None:
        try:
            for step in iter_steps(self._plan, start=self._start):
                tensors = [
                    make_tensors(self._rows(m), padded_to=m.padded_to, is_filler=m.is_filler)
                    for m in step.ranks[self._rank]
                ]
                self._queue.put((step, tensors))
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def _rows(self, micro_batch: MicroBatch) -> list[Row]:
        rows = []
        for sample in micro_batch.samples:
            cut = cut_sample(
                self._cache.ids(sample),
                self._cache.label_mask(sample),
                max_length=self._data.max_length,
                truncation=self._data.truncation,
            )
            assert cut is not None, "the plan holds a sample that truncation drops"
            rows.append(Row(ids=cut[0], label_mask=cut[1]))
        return rows
