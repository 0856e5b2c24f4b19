"""On a GPU: kernels against plain float32, limits kept by the allocator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

pytestmark = pytest.mark.gpu


def test_every_kernel_is_close_to_float32() -> None:
    """Attention, losses, checkpointing forms, Liger: the rows of benchmarks/gpu_correctness.py."""
    from gpu_correctness import all_rows

    far = [row for row in all_rows() if row["error"] > row["limit"]]
    assert [] == far
