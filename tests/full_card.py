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


@triton.jit
def _double(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets) * 2)


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
    vector = torch.ones(64, device="cuda")
    held = _fill()
    try:
        if library == "triton":
            _double[(1,)](vector, torch.empty_like(vector), BLOCK=64)
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
