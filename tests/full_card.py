"""Fill the card, then make the first call of a library: what does its out-of-memory look like?

    python tests/full_card.py triton|cublas|cuda

Prints {"error": class and first line, "kind": by autobatch.oom} or {"error": null}.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from autobatch.oom import out_of_memory_kind

MIB = 2**20
BLOCK = 65536


@triton.jit
def _less_largest(source, target, BLOCK: tl.constexpr):
    # One warp holds the whole row: far more than its registers, so the launch needs local memory.
    offsets = tl.arange(0, BLOCK)
    row = tl.load(source + offsets)
    tl.store(target + offsets, row - tl.max(row, axis=0))


def _fill() -> list[torch.Tensor]:
    held = []
    for size in (1024 * MIB, 64 * MIB, 2 * MIB):
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return held


def main(library: str) -> None:
    """Make the tensors, fill the card, call."""
    matrix = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(matrix)
    row = torch.ones(BLOCK, device="cuda")
    less = torch.empty_like(row)
    held = _fill()
    try:
        if library == "triton":
            _less_largest[(1,)](row, less, BLOCK=BLOCK, num_warps=1)
        elif library == "cublas":
            torch.mm(matrix, matrix, out=target)
        else:
            held.append(torch.empty(64 * MIB, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(json.dumps({"error": words, "kind": out_of_memory_kind(error)}))
    else:
        print(json.dumps({"error": None, "free": torch.cuda.mem_get_info()[0]}))


if __name__ == "__main__":
    main(sys.argv[1])
