"""One optimizer step gives the same loss and gradient for every cut of the batch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ROW_LENGTHS, config_for, sample_rows, step_cases
from tiny_model import tiny_model

from autobatch.engine.build import build
from autobatch.engine.device import claim
from autobatch.engine.step import NonFiniteError, optimizer_step
from autobatch.engine.tensors import make_tensors
from autobatch.errors import ConfigError
from autobatch.jobs import start_ranks

ROWS = [{"size": size, "by_tokens": False} for size in (1, 2, 3, 12)]
TOKENS = [{"size": size, "by_tokens": True, "padded": False} for size in (40, 57, 165)]
CASES: list[dict[str, Any]] = [
    *({**case, "padded": False} for case in ROWS),
    *({**case, "padded": True} for case in ROWS),
    *TOKENS,
]


def _on_ranks(tmp_path: Path, num_ranks: int, **job: Any) -> list[dict[str, float]]:
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).parent / "engine_cases.py"
    path = os.pathsep.join([str(script.parent.parent), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, str(script), str(tmp_path)]
    with start_ranks(
        argv, num_ranks=num_ranks, job_dir=tmp_path, env={"PYTHONPATH": path}
    ) as children:
        assert children.wait(120)
        ended = children.ended()
    assert ended is not None
    assert (0,) * num_ranks == ended.exit_codes, ended.log_tail
    results: list[dict[str, float]] = json.loads((tmp_path / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def whole_batch(model: Path) -> dict[str, float]:
    """The reference: all rows in one micro-batch on one rank."""
    case = {"size": 12, "by_tokens": False, "padded": False}
    return step_cases(config_for(model, engine__strategy="single"), [case])[0]


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_any_cut_gives_the_same_step(
    model: Path, whole_batch: dict[str, float], strategy: str
) -> None:
    """1, 2, 3, 12 rows and token budgets, padded and padding-free, are one step."""
    for result in step_cases(config_for(model, engine__strategy=strategy), CASES):
        assert whole_batch == pytest.approx(result, rel=1e-5)


@pytest.mark.parametrize("kernel", ["logits", "chunked"])
@pytest.mark.parametrize(
    "checkpointing", ["none", "selective", "selective_matmul", "every_2", "full"]
)
def test_toggles_give_the_same_step(
    model: Path, whole_batch: dict[str, float], kernel: str, checkpointing: str
) -> None:
    """Loss kernels and checkpointing change memory and time only."""
    config = config_for(
        model,
        engine__strategy="single",
        model__loss_kernel=kernel,
        model__loss_chunk_tokens=16,
        model__gradient_checkpointing=checkpointing,
    )
    case = {"size": 3, "by_tokens": False, "padded": False}
    assert whole_batch == pytest.approx(step_cases(config, [case])[0], rel=1e-5)


def test_two_ranks_give_the_step_of_one(
    model: Path, whole_batch: dict[str, float], tmp_path: Path
) -> None:
    """Also where one rank's rows carry no label at all (split 12: rank 1 has only fillers)."""
    cases = [{**case, "split": split} for case in CASES for split in (4, 12)]
    values = {"engine.strategy": "fsdp2"}
    for result in _on_ranks(tmp_path, 2, model=str(model), values=values, cases=cases):
        assert whole_batch == pytest.approx(result, rel=1e-5)


def test_resharding_after_forward_give_the_step_of_one(
    model: Path, whole_batch: dict[str, float], tmp_path: Path
) -> None:
    """Parameters are gathered again for the backward pass."""
    cases = [{"size": 57, "by_tokens": True, "padded": False, "split": 7}]
    values = {"engine.strategy": "fsdp2", "engine.reshard_after_forward": True}
    results = _on_ranks(tmp_path, 2, model=str(model), values=values, cases=cases)
    assert whole_batch == pytest.approx(results[0], rel=1e-5)


def test_single_equals_fsdp2_bit_for_bit_in_bf16(model: Path) -> None:
    """Master weights without FSDP compute what FSDP's mixed precision computes."""
    case = {"size": 57, "by_tokens": True, "padded": False}
    single, fsdp2 = (
        step_cases(config_for(model, engine__strategy=s, engine__param_dtype="bf16"), [case])[0]
        for s in ("single", "fsdp2")
    )
    assert single == fsdp2


def test_label_tokens_of_the_step_are_counted_once(whole_batch: dict[str, float]) -> None:
    """The count equals the label masks', the row without labels adds none."""
    expected = sum(int(row.label_mask[1:].sum()) for row in sample_rows())
    assert expected == whole_batch["num_label_tokens"]
    assert 2 in ROW_LENGTHS


def test_non_finite_loss_leaves_the_weights(model: Path) -> None:
    """A NaN stops the step before the optimizer."""
    config = config_for(model, engine__strategy="single")
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=True)
        norm = engine.named_parameters["model.norm.weight"]
        before = {n: p.detach().clone() for n, p in engine.named_parameters.items()}
        norm.data[0] = float("nan")
        with pytest.raises(NonFiniteError, match="loss is nan"):
            optimizer_step(engine, [make_tensors(sample_rows())], learning_rate=1.0)
        after = engine.named_parameters["model.embed_tokens.weight"]
        assert bool((before["model.embed_tokens.weight"] == after).all())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model__compile": True}, "model.compile=True needs CUDA"),
        ({"model__use_liger": True}, "model.use_liger=True"),
        ({"model__loss_kernel": "fused"}, "model.loss_kernel=fused"),
        ({"model__quantization": "nf4"}, "model.quantization=nf4"),
        ({"model__lora_rank": 8, "model__target_modules": "[lm_head]"}, "names lm_head"),
        ({"model__lora_rank": 8, "model__target_modules": "[q_porj]"}, "q_porj"),
        ({"model__attn_implementation": "varlen"}, "attn_implementation=varlen"),
        ({"engine__cpu_offload": True}, "engine.cpu_offload=True"),
    ],
)
def test_forms_of_later_versions_are_refused_by_name(
    model: Path, values: dict[str, Any], words: str
) -> None:
    """A setting that would be ignored is an error that names it."""
    config = config_for(model, engine__strategy="single", **values)
    with (
        claim(config, memory_limit_bytes=2**32) as device,
        pytest.raises(ConfigError, match=words),
    ):
        build(config, device, random_init=True)
