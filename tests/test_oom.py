"""An out-of-memory is recognised from every allocator; a bug is never taken for one."""

from __future__ import annotations

import pytest

from autobatch.oom import out_of_memory_kind, out_of_memory_kind_of_text

CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CPU = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
CPU += "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


class _ArrayMemoryError(MemoryError):
    """Named as numpy names its own."""


OUT_OF_MEMORY = [
    ("cuda_allocator", OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ("cuda", RuntimeError("CUDA error: out of memory")),
    ("cublas", RuntimeError(CUBLAS)),
    ("cpu_allocator", RuntimeError(CPU)),
    ("device_pool", RuntimeError("Failed to allocate 1048576 bytes on device 0")),
    ("python", MemoryError()),
    ("triton", RuntimeError("Triton Error [CUDA]: out of memory")),
    ("cudnn", RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
    ("nccl", RuntimeError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'")),
    ("cuda", RuntimeError("CUDA driver error: out of memory")),
    ("cpu_allocator", OSError(12, "Cannot allocate memory")),
    ("cpu_allocator", RuntimeError("std::bad_alloc")),
    ("python", _ArrayMemoryError("Unable to allocate 8.00 GiB for an array")),
    ("account", OutOfMemoryError("CPU account: mm tried to hold 9 bytes, limit 8 bytes")),
]
OTHER = [
    ValueError("memory format option is only supported by strided tensors"),
    RuntimeError("shape mismatch: value tensor of shape [4] cannot be broadcast"),
    KeyboardInterrupt(),
    RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"),
    ValueError("--on-out-of-memory takes skip or stop"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
]


@pytest.mark.parametrize(("kind", "error"), OUT_OF_MEMORY, ids=lambda v: str(v)[:30])
def test_every_allocator_is_recognised(kind: str, error: BaseException) -> None:
    """Each allocator's out-of-memory has its kind, whatever its punctuation."""
    assert kind == out_of_memory_kind(error)


@pytest.mark.parametrize("error", OTHER, ids=lambda v: repr(v)[:40])
def test_a_bug_is_no_out_of_memory(error: BaseException) -> None:
    """Errors that merely mention memory, and interrupts, end a search at once."""
    assert out_of_memory_kind(error) is None


@pytest.mark.parametrize("explicit", [True, False])
def test_a_wrapped_out_of_memory_is_still_seen(explicit: bool) -> None:
    """Causes and contexts are followed, however deep."""
    with pytest.raises(ValueError, match="outer") as caught:
        _raise_wrapped(explicit)
    assert out_of_memory_kind(caught.value) == "cuda_allocator"


def _raise_wrapped(explicit: bool) -> None:
    try:
        try:
            raise OutOfMemoryError("CUDA out of memory.")
        except RuntimeError as error:
            if explicit:
                raise RuntimeError("step failed") from error
            raise RuntimeError("step failed")  # noqa: B904 - the implicit context is the test
    except RuntimeError:
        raise ValueError("outer")  # noqa: B904


def test_a_group_is_searched() -> None:
    """An exception group with one out-of-memory in it is one."""
    group = ExceptionGroup("ranks", [ValueError("x"), MemoryError()])
    assert out_of_memory_kind(group) == "python"


def test_a_circular_chain_ends() -> None:
    """Two errors that name each other as cause are each looked at once."""
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert out_of_memory_kind(first) is None


def test_an_interrupt_during_an_out_of_memory_is_an_interrupt() -> None:
    """Ctrl-C while a trial unwinds stops the search."""
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = MemoryError()
    assert out_of_memory_kind(interrupt) is None


def test_torch_own_class_is_recognised_without_words() -> None:
    """The class of the installed torch counts even with a message of its own."""
    torch = pytest.importorskip("torch")
    assert out_of_memory_kind(torch.OutOfMemoryError("no room")) == "cuda_allocator"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cuda_allocator", "[rank1]: torch.OutOfMemoryError: no room"),
        ("cuda_allocator", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried"),
        ("python", "  File x\nMemoryError"),
        ("python", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB"),
        ("cpu_allocator", "terminate called after throwing an instance of 'std::bad_alloc'"),
        ("nccl", "ncclUnhandledCudaError: Call failed.\nLast error:\nFailed to CUDA calloc 8 b"),
        (None, "ValueError: MemoryError is not a valid option"),
        (None, "RuntimeError: shape mismatch"),
        (None, ""),
    ],
)
def test_last_words_of_a_child_are_judged(kind: str | None, text: str) -> None:
    """A dead child's log tells an out-of-memory from a bug."""
    assert kind == out_of_memory_kind_of_text(text)
