"""On a GPU: kernels against float32, memory that is kept and refused, settings that arrive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).parent
sys.path.append(str(TESTS.parent / "benchmarks"))

pytestmark = pytest.mark.gpu

# 33 M parameters: a step with few tokens peaks in the optimizer, one with many before it
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory with the config of a small model."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def _python(*arguments: str, environment: dict[str, str] | None = None) -> Any:
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_is_close_to_float32() -> None:
    """Attention, losses, checkpointing forms, Liger: the rows of benchmarks/gpu_correctness.py."""
    from gpu_correctness import all_rows

    far = [row for row in all_rows() if row["error"] > row["limit"]]
    assert [] == far


def test_selective_checkpointing_keeps_what_it_says() -> None:
    """A layer's input, and for `selective` attention's output and log-sum-exp; within 2 %."""
    import gpu_checkpointing

    rows = list(gpu_checkpointing.kept_rows())
    told = [row for row in rows if row["expected"]]
    assert len(told) == 4
    for row in told:
        assert row["kept_bytes_per_token_layer"] == pytest.approx(row["expected"], rel=0.02), row


@pytest.mark.parametrize("library", ["triton", "cublas", "cuda"])
def test_a_full_card_is_recognised_in_each_library(library: str) -> None:
    """Real errors of a card with no byte left, raised by the first call of a library."""
    found = _python(str(TESTS / "full_card.py"), library, environment={"PYTHONPATH": _path()})
    assert found["error"] is not None, found
    assert found["kind"] is not None, found


def _path() -> str:
    return os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))


def _error_under(model_dir: Path, *, phase: str, num_tokens: int) -> tuple[str | None, set[str]]:
    """Step under a cap just below a phase's own peak; return the error's kind, phases entered."""
    import torch
    from gpu_correctness import GIB, config_of

    from autobatch.engine.build import build
    from autobatch.engine.device import claim
    from autobatch.engine.step import optimizer_step
    from autobatch.engine.tensors import make_tensors, random_rows
    from autobatch.oom import out_of_memory_kind

    config = config_of(model_dir, model__loss_kernel="logits")
    generator = np.random.default_rng(0)
    batch = make_tensors(random_rows([num_tokens], vocab_size=32000, generator=generator))
    with claim(config, memory_limit_bytes=100 * GIB) as device:
        engine = build(config, device, random_init=True)
        device.reset_peaks()
        optimizer_step(engine, [batch], learning_rate=0.0)
        peaks = device.memory_use().phase_peaks
        engine.optimizer.state.clear()
        torch.cuda.empty_cache()
        device.reset_peaks()
        earlier = [peaks[name] for name in peaks if name != phase]
        assert peaks[phase] > max(earlier) or phase == "forward", peaks
        total = torch.cuda.get_device_properties(0).total_memory
        cap = peaks[phase] - 16 * 2**20
        torch.cuda.set_per_process_memory_fraction(cap / total)
        try:
            optimizer_step(engine, [batch], learning_rate=0.0)
        except Exception as error:
            kind = out_of_memory_kind(error)
        else:
            kind = None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return kind, set(device.memory_use().phase_peaks)


@pytest.mark.parametrize(
    ("phase", "num_tokens", "entered"),
    [
        ("forward", 4096, {"forward"}),
        ("backward", 4096, {"forward", "backward"}),
        ("optimizer", 8, {"forward", "backward", "optimizer"}),
    ],
)
def test_out_of_memory_is_recognised_in_each_phase(
    model_dir: Path, phase: str, num_tokens: int, entered: set[str]
) -> None:
    """The allocator's error is told apart wherever the step is, and the phase is known."""
    kind, phases = _error_under(model_dir, phase=phase, num_tokens=num_tokens)
    assert (kind, phases) == ("cuda_allocator", entered)


def test_the_allocator_setting_arrives_before_torch() -> None:
    """Ours and the user's are both in force in a child, as torch itself tells."""
    from autobatch.hardware.environment import child_environment

    code = (
        "import json, torch; torch.cuda.init(); s = torch.cuda.memory._snapshot(); "
        "s = s['allocator_settings']; print(json.dumps("
        "{k: s[k] for k in ('expandable_segments', 'max_split_size')}))"
    )
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    before = dict(os.environ)
    os.environ.update(given)
    try:
        environment = child_environment(1, device="cuda")
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = _python("-c", code, environment={**given, **environment})
    assert found == {"expandable_segments": True, "max_split_size": 512 * 2**20}
