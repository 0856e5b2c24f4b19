"""Tiny engines for tests, and a worker that steps one batch under many cuts on any rank count."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autobatch.config import Config, load_config, resolve
from autobatch.engine.build import build
from autobatch.engine.device import claim
from autobatch.engine.step import optimizer_step
from autobatch.engine.tensors import MicroBatchTensors, Row, make_tensors, random_rows
from autobatch.plan.microbatches import cut_by_rows, pack_by_tokens
from autobatch.units import round_up

ROW_LENGTHS = (5, 17, 30, 9, 3, 21, 8, 40, 2, 11, 6, 13)


def config_for(model_dir: Path, **values: Any) -> Config:
    """Return a CPU config in fp32; keyword `a__b` sets key `a.b`."""
    settings = {
        "model.path": str(model_dir),
        "trainer.device": "cpu",
        "engine.param_dtype": "fp32",
        "model.init": "random",
        **{key.replace("__", "."): value for key, value in values.items()},
    }
    return resolve(load_config(None, [f"{k}={v}" for k, v in settings.items()]))


def sample_rows(vocab_size: int = 512) -> list[Row]:
    """Return rows whose first third is no label; the row of 2 tokens has none at all."""
    rows = random_rows(ROW_LENGTHS, vocab_size=vocab_size, generator=np.random.default_rng(0))
    for row in rows:
        row.label_mask[: len(row.ids) // 3 + 1] = False
        if len(row.ids) == 2:
            row.label_mask[:] = False
    return rows


def cut(rows: list[Row], *, size: int, by_tokens: bool, padded: bool) -> list[MicroBatchTensors]:
    """Return the micro-batches of rows under one cut."""
    lengths = [len(row.ids) for row in rows]
    parts = pack_by_tokens(lengths, size) if by_tokens else cut_by_rows(lengths, size)
    return [
        make_tensors(
            [rows[i] for i in part],
            padded_to=round_up(max(lengths[i] for i in part), 8) if padded else None,
        )
        for part in parts
    ]


def step_cases(config: Config, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return loss and gradient norm of the second of two steps, for each cut of the same rows.

    A case: size, by_tokens, padded, and `split`, the number of rows that rank 0 takes.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    results = []
    rows = sample_rows()
    with claim(config, memory_limit_bytes=2**32) as device:
        for case in cases:
            engine = build(config, device, random_init=True)
            borders = [0, case.get("split", len(rows)), len(rows)]
            shares = [rows[a:b] for a, b in itertools.pairwise(borders)][:world_size]
            kind = {key: case[key] for key in ("size", "by_tokens", "padded")}
            cuts = [cut(share, **kind) if share else [] for share in shares]
            most = max(len(c) for c in cuts)
            filler = make_tensors([rows[8]], is_filler=True)
            mine = [*cuts[rank], *[filler] * (most - len(cuts[rank]))]
            for _ in range(2):
                result = optimizer_step(engine, mine, learning_rate=1e-3)
            results.append(
                {
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "num_label_tokens": result.num_label_tokens,
                }
            )
    return results


def main() -> None:
    """Step the cases of a job file on this rank; rank 0 writes the results."""
    torch.set_num_threads(1)
    job_dir = Path(sys.argv[1])
    job = json.loads((job_dir / "job.json").read_text())
    results = step_cases(config_for(Path(job["model"]), **job["values"]), job["cases"])
    if os.environ.get("RANK", "0") == "0":
        (job_dir / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
