"""The exact account of live tensor storages on the CPU.

Where CUDA's caching allocator counts and refuses, the CPU's does neither; this account does both,
so that a memory limit can be searched for on any machine. It sees what operators return (kernel
temporaries are not seen) in the thread that entered it, where the CPU's backward runs too.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.units import round_up

BLOCK_BYTES = 512  # the unit of torch's caching allocator, c10/core/AllocatorConfig.h kMinBlockSize
SETTLE_SECS = 1e-3  # 300 of 300 gloo all-gathers were let go within 0.1 ms of a yield, 2026-12


class _Live(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int


class MemoryAccount(TorchDispatchMode):
    """Count live CPU storages while entered, and raise when they pass `limit_bytes`.

    A storage counts once however many tensors view it, rounded up to 512 bytes, from the operator
    that makes it to its death. Tensors made before count after `track`. Wrappers such as DTensor
    count through their local tensors; fake, meta and sparse tensors do not count.

    Raises:
        torch.OutOfMemoryError: out of the operator that passes the limit. What the unwinding
            frees is taken off, so a smaller trial can follow in the same process.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._current_bytes = 0
        self._live: dict[int, _Live] = {}  # by address of the storage
        # Deaths wait here: they may come from the garbage collector or a communication thread
        # in the middle of an addition, and appending is atomic.
        self._freed_bytes: deque[int] = deque()
        self._phase: str | None = None
        self._phase_peaks: dict[str, int] = {}
        self._changes: list[ExitStack] = []  # to torch, one for each time entered

    @property
    def current_bytes(self) -> int:
        """The bytes of all storages alive now."""
        while self._freed_bytes:
            self._current_bytes -= self._freed_bytes.popleft()
        return self._current_bytes

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The highest `current_bytes` by phase, since the last `reset_peaks`."""
        return dict(self._phase_peaks)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book peaks under `name` inside; a nested phase gives back to the outer one."""
        outer, self._phase = self._phase, name
        self._note_peak()
        try:
            yield
        finally:
            self._phase = outer
            self._note_peak()

    def reset_peaks(self) -> None:
        """Let peaks start again from what is alive now."""
        self.peak_bytes = 0
        self._phase_peaks.clear()
        self._note_peak()

    def track(self, *things: Any) -> None:
        """Count storages that existed before: of modules, optimizers, tensors, or containers.

        Raises:
            torch.OutOfMemoryError: if they pass the limit.
        """
        grown_bytes = sum(map(self._count, tensors_of(things)))
        if grown_bytes > 0 and self._is_over():
            raise torch.OutOfMemoryError(self._refusal("track"))

    def breakdown(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, int]:
        """Return counted bytes by kind; the kinds add up to `current_bytes`.

        A storage of two kinds belongs to the first: parameters, gradients, optimizer_state,
        buffers, other.
        """
        parameters = list(model.parameters())
        kinds: dict[str, Any] = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters],
            "optimizer_state": optimizer,
            "buffers": list(model.buffers()),
        }
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for kind, things in kinds.items():
            sizes[kind] = 0
            for tensor in tensors_of(things):
                key = tensor.untyped_storage()._cdata
                if key in self._live and key not in seen:
                    seen.add(key)
                    sizes[kind] += self._live[key].num_bytes
        sizes["other"] = self.current_bytes - sum(sizes.values())
        return sizes

    def __enter__(self) -> MemoryAccount:
        changes = ExitStack()
        changes.enter_context(_changed(torch.UntypedStorage, "resize_", self._resized))
        if dist.is_available():
            changes.enter_context(_changed(dist.Work, "wait", _settled))
        self._changes.append(changes)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._changes.pop().close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A mode is asked before the subclasses. Declining lets DTensor unwrap itself; its local
        # operators then come here one by one.
        if any(_is_wrapper(t) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(SETTLE_SECS)  # as in `_settled`
        if isinstance(result, torch.Tensor):
            grown_bytes = self._count(result)
        else:
            grown_bytes = sum(map(self._count, _outputs(result)))
        if grown_bytes > 0 and self._is_over():
            words = self._refusal(func)
            del result, args, kwargs  # the traceback keeps this frame; it must not keep them
            raise torch.OutOfMemoryError(words)
        return result

    def _count(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0
        if _is_wrapper(type(tensor)):
            return sum(map(self._count, tensors_of(tensor)))
        return self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> int:
        """Bring the account up to date with one storage; return the bytes it grew by."""
        if storage.device.type != "cpu":  # a fake tensor's storage is on meta
            return 0
        key, num_bytes = storage._cdata, round_up(storage.nbytes(), BLOCK_BYTES)
        live = self._live.get(key)
        if live is None or live.storage() is not storage:
            if live is not None:  # the address of a dead storage, used again
                self._freed_bytes.append(live.num_bytes)
            self._live[key] = _Live(weakref.ref(storage, self._on_death(key)), num_bytes)
            grown_bytes = num_bytes
        elif live.num_bytes != num_bytes:
            self._live[key] = live._replace(num_bytes=num_bytes)
            grown_bytes = num_bytes - live.num_bytes
        else:
            return 0
        self._current_bytes += grown_bytes
        if grown_bytes > 0:
            self._note_peak()
        return grown_bytes

    def _is_over(self) -> bool:
        if self.limit_bytes is None or self.current_bytes <= self.limit_bytes:
            return False
        time.sleep(SETTLE_SECS)  # refuse only what no other thread is about to free
        return self.current_bytes > self.limit_bytes

    def _refusal(self, maker: Any) -> str:
        return (
            f"CPU account: {maker} tried to hold {self.current_bytes} bytes, "
            f"limit {self.limit_bytes} bytes"
        )

    def _on_death(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        live_storages, freed_bytes = self._live, self._freed_bytes

        def uncount(reference: weakref.ref[torch.UntypedStorage]) -> None:
            live = live_storages.get(key)
            if live is not None and live.storage is reference:
                del live_storages[key]
                freed_bytes.append(live.num_bytes)

        return uncount

    def _note_peak(self) -> None:
        current = self.current_bytes
        if current > self.peak_bytes:
            self.peak_bytes = current
        if self._phase is not None and current > self._phase_peaks.get(self._phase, -1):
            self._phase_peaks[self._phase] = current

    def _resized(self, resize_: Callable[..., Any]) -> Callable[..., Any]:
        # FSDP2 frees and refills its unsharded parameters by UntypedStorage.resize_, which is
        # no operator.
        def resize_and_count(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize_(storage, num_bytes)
            if self._count_storage(storage) > 0 and self._is_over():
                raise torch.OutOfMemoryError(self._refusal("resize_"))
            return result

        return resize_and_count


def _settled(wait: Callable[..., Any]) -> Callable[..., Any]:
    # gloo's thread lets go of a collective's tensors just after it reports the end, and needs
    # Python's lock for it. Unless it gets the time, peaks differ from run to run.
    def wait_and_settle(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(SETTLE_SECS)
        return result

    return wait_and_settle


@contextmanager
def _changed(owner: type, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change a method of a class inside, then leave the class exactly as it was."""
    own, before = vars(owner).get(name), getattr(owner, name)
    setattr(owner, name, change(before))
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


def bytes_of(things: Any) -> int:
    """Return the bytes of the distinct storages under modules, optimizers, tensors, containers.

    Counts as the account does: local parts of wrappers, 512-byte blocks.
    """
    storages = (tensor.untyped_storage() for tensor in tensors_of(things))
    sizes = {s._cdata: round_up(s.nbytes(), BLOCK_BYTES) for s in storages}
    return sum(sizes.values())


def tensors_of(things: Any) -> Iterator[torch.Tensor]:
    """Yield every plain strided tensor under modules (gradients too), optimizers, containers."""
    if isinstance(things, torch.Tensor):
        if _is_wrapper(type(things)):
            names, _ = things.__tensor_flatten__()  # type: ignore[attr-defined]
            yield from tensors_of([getattr(things, name) for name in names])
        elif things.layout is torch.strided:
            yield things
    elif isinstance(things, torch.nn.Module):
        for parameter in things.parameters():
            yield from tensors_of((parameter, parameter.grad))
        yield from tensors_of(things.buffers())
    elif isinstance(things, torch.optim.Optimizer):
        yield from tensors_of(list(things.state.values()))
    elif isinstance(things, dict):
        yield from tensors_of(things.values())
    elif isinstance(things, Iterable) and not isinstance(things, (str, bytes)):
        for thing in things:
            yield from tensors_of(thing)


def _outputs(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _outputs(part)


def _is_wrapper(tensor_type: type) -> bool:
    return hasattr(tensor_type, "__tensor_flatten__")
