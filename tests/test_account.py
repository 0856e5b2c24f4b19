"""The account of live CPU storages is exact to the 512-byte block, and refuses above its limit."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - torch may be absent
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from autobatch.engine.account import MemoryAccount, bytes_of  # noqa: E402
from autobatch.jobs import free_port  # noqa: E402
from autobatch.oom import out_of_memory_kind  # noqa: E402

SQUARE_BYTES = 64 * 64 * 4  # one (64, 64) fp32 matrix
MLP_BYTES = 64 * 32 * 4 + 512 + 32 * 8 * 4 + 512  # both biases are rounded up


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 4) -> None:
    model(torch.ones(rows, 64)).sum().backward()
    optimizer.step()


def test_a_storage_is_rounded_up_to_its_block() -> None:
    """One byte takes 512, 512 take 512, 513 take 1024, none take none."""
    sizes = {}
    with MemoryAccount() as account:
        for num_bytes in (0, 1, 512, 513):
            tensor = torch.empty(num_bytes, dtype=torch.uint8)
            sizes[num_bytes] = account.current_bytes
            del tensor
    assert sizes == {0: 0, 1: 512, 512: 512, 513: 1024}


def test_views_count_once() -> None:
    """However many tensors look at a storage, it is one."""
    with MemoryAccount() as account:
        matrix = torch.empty(64, 64)
        views = [matrix.t(), matrix[3:], matrix.view(-1), matrix.detach(), nn.Parameter(matrix)]
        assert account.current_bytes == SQUARE_BYTES
        del matrix
        assert account.current_bytes == SQUARE_BYTES
        views.clear()
        assert account.current_bytes == 0


def test_a_matmul_chain_peaks_at_its_live_matrices() -> None:
    """Input, the matrix made and the one it is made from: three at the peak, two after."""
    with MemoryAccount() as account:
        first = torch.ones(64, 64)
        chain = first @ first
        for _ in range(3):
            chain = chain @ first
    assert (account.current_bytes, account.peak_bytes) == (2 * SQUARE_BYTES, 3 * SQUARE_BYTES)


def test_in_place_and_out_operators_add_nothing_twice() -> None:
    """`add_` keeps its storage; an `out=` that grows is counted at its new size."""
    with MemoryAccount() as account:
        matrix, out = torch.ones(64, 64), torch.empty(0)
        matrix.add_(1).mul_(2)
        assert account.current_bytes == SQUARE_BYTES
        torch.add(matrix, 1, out=out)
        assert account.current_bytes == 2 * SQUARE_BYTES


def test_tensors_saved_for_backward_live_until_it_ends() -> None:
    """exp keeps its result for backward: it dies with the graph, leaving the gradient."""
    with MemoryAccount() as account:
        leaf = torch.ones(64, 64, requires_grad=True)
        loss = leaf.exp().sum()
        assert account.current_bytes == 2 * SQUARE_BYTES + 512
        loss.backward()
        assert account.current_bytes == 2 * SQUARE_BYTES + 512  # leaf, leaf.grad, loss
        assert account.peak_bytes >= 3 * SQUARE_BYTES


def test_cyclic_garbage_is_taken_off_when_collected() -> None:
    """A storage held by a reference cycle counts until the collector frees it."""
    with MemoryAccount() as account:
        cycle: list = [torch.ones(64, 64)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert account.current_bytes == 0


def test_kinds_of_a_small_mlp_are_exact() -> None:
    """Parameters, gradients, two AdamW moments plus one step counter of a block per parameter."""
    with MemoryAccount() as account:
        model = _mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer)
        assert account.breakdown(model, optimizer) == {
            "parameters": MLP_BYTES,
            "gradients": MLP_BYTES,
            "optimizer_state": 2 * MLP_BYTES + 4 * 512,
            "buffers": 0,
            "other": 0,
        }
        assert account.current_bytes == 4 * MLP_BYTES + 4 * 512


def test_what_existed_before_counts_once_tracked() -> None:
    """`track` takes modules with gradients, optimizers and containers; twice is once."""
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    account = MemoryAccount()
    account.track(model, [{"optimizer": optimizer}], list(model.parameters()))
    assert account.current_bytes == 4 * MLP_BYTES + 4 * 512
    assert bytes_of(model.parameters()) == MLP_BYTES


def test_each_training_step_returns_to_the_same_bytes() -> None:
    """From the second step on nothing leaks."""
    levels = []
    with MemoryAccount() as account:
        model = _mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            _step(model, optimizer)
            optimizer.zero_grad()
            levels.append(account.current_bytes)
    assert levels == [3 * MLP_BYTES + 4 * 512] * 5


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_the_limit_is_exact_to_the_byte(clip: bool, foreach: bool) -> None:
    """A training step fits in exactly its peak, and not in one byte less."""

    def steps(limit_bytes: int | None) -> int:
        with MemoryAccount(limit_bytes) as account:
            model = _mlp()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
            for _ in range(2):
                model(torch.ones(4, 64)).sum().backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
                optimizer.step()
                optimizer.zero_grad()
        return account.peak_bytes

    peak_bytes = steps(None)
    assert peak_bytes == steps(peak_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        steps(peak_bytes - 1)


def test_a_refusal_says_what_was_tried() -> None:
    """The operator, the bytes it would hold, the limit; recognised as an out-of-memory."""
    with MemoryAccount(1023) as account, pytest.raises(torch.OutOfMemoryError) as caught:
        torch.zeros(512, dtype=torch.uint8), torch.zeros(129)
    assert "zeros.default tried to hold 1536 bytes, limit 1023 bytes" in str(caught.value)
    assert out_of_memory_kind(caught.value) == "account"
    assert account.current_bytes == 0


def test_a_smaller_trial_works_after_a_refusal() -> None:
    """The unwinding frees, in forward or in backward, and the same model steps on."""
    with MemoryAccount() as account:
        model = _mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer)
        optimizer.zero_grad()
        level = account.current_bytes
        for spare_bytes in (1000, 40_000, 90_000, 140_000):
            account.limit_bytes = level + spare_bytes
            with pytest.raises(torch.OutOfMemoryError):
                _step(model, optimizer, rows=512)
            optimizer.zero_grad()
            assert level == account.current_bytes
        account.limit_bytes = level + MLP_BYTES + 40_000
        _step(model, optimizer, rows=4)


def test_phases_book_their_own_peaks() -> None:
    """A nested phase gives back to the outer one; each peak includes what was alive before."""
    with MemoryAccount() as account:
        with account.phase("forward"):
            kept = torch.ones(64, 64)
            with account.phase("loss"):
                torch.ones(64, 64) + kept
            after = kept + 1
        assert account.phase_peaks == {
            "forward": 2 * SQUARE_BYTES,
            "loss": 3 * SQUARE_BYTES,
        }
        del after
        account.reset_peaks()
        assert (account.peak_bytes, account.phase_peaks) == (SQUARE_BYTES, {})


def test_checkpointing_lowers_the_peak() -> None:
    """Recomputed activations are not alive together."""

    def peak_bytes(recompute: bool) -> int:
        layers = [nn.Sequential(*[nn.Linear(64, 64), nn.GELU()] * 4) for _ in range(8)]
        with MemoryAccount() as account:
            hidden = torch.ones(256, 64, requires_grad=True)
            for layer in layers:
                hidden = (
                    checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
                )
            hidden.sum().backward()
        return account.peak_bytes

    assert peak_bytes(True) < 0.6 * peak_bytes(False)


def test_fake_and_meta_tensors_take_nothing() -> None:
    """Shapes without storage do not count."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with MemoryAccount() as account:
        meta = torch.empty(64, 64, device="meta") + 1
        with FakeTensorMode():
            fake = torch.empty(64, 64) @ torch.empty(64, 64)
        assert account.current_bytes == 0
    del meta, fake


def test_a_resized_storage_is_followed() -> None:
    """Freeing by resize_ counts down, refilling counts up and can be refused."""
    with MemoryAccount(SQUARE_BYTES + 512) as account:
        storage = torch.empty(64, 64).untyped_storage()
        storage.resize_(0)
        assert account.current_bytes == 0
        storage.resize_(512)
        assert account.current_bytes == 512
        with pytest.raises(torch.OutOfMemoryError, match="resize_ tried to hold"):
            storage.resize_(SQUARE_BYTES + 513)


def test_torch_is_left_as_it_was_found() -> None:
    """Leaving the account, even nested or by an exception, restores what it changed exactly."""

    def own_methods() -> tuple[object, object]:
        return vars(torch.UntypedStorage).get("resize_"), vars(dist.Work).get("wait")

    before = own_methods()
    with pytest.raises(KeyError), MemoryAccount(), MemoryAccount():
        raise KeyError
    assert before == own_methods()


def test_torch_own_tracker_agrees() -> None:
    """The peak equals MemTracker's where every tensor is a multiple of a block."""
    from torch.distributed._tools.mem_tracker import MemTracker

    def step() -> None:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(32, 128)).square().sum(0).backward(torch.ones(128))
        optimizer.step()

    tracker, account = MemTracker(), MemoryAccount()
    with tracker:
        step()
    with account:
        step()
    assert account.peak_bytes == tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_fsdp_ranks_hold_exactly_their_half(tmp_path: Path) -> None:
    """Sharded state is halved (odd rows padded); whole layers appear at the peak only."""
    arguments = (free_port(), str(tmp_path))
    torch.multiprocessing.spawn(_fsdp_rank, args=arguments, nprocs=2)
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        # (64, 64) and (63, 64): a rank holds 32 rows of each, the second padded on rank 1
        half = 2 * 32 * 64 * 4
        state = {"parameters": half, "gradients": half, "optimizer_state": 2 * half + 2 * 512}
        assert state | {"buffers": 0, "other": 0} == seen["breakdown"]
        assert [3 * half + 2 * 512] * 3 == seen["levels"]
        assert len(set(seen["peaks"])) == 1
        # both layers whole after forward, because they are not resharded; then freed by resize_
        assert seen["after_forward"] - seen["levels"][0] >= SQUARE_BYTES + 63 * 64 * 4
        assert seen["after_forward"] - seen["levels"][0] < 2 * SQUARE_BYTES + 8 * 512 + 4 * 2048
        assert seen["forward_peak"] >= seen["after_forward"]
        assert seen["refused"]
        assert seen["after_refusal"] == seen["levels"][0]


def _fsdp_rank(rank: int, port: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    levels: list[int] = []
    peaks: list[int] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 63, bias=False))
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        return model, torch.optim.AdamW(model.parameters())

    with MemoryAccount() as account:
        model, optimizer = build()
        for _ in range(3):
            account.reset_peaks()
            with account.phase("forward"):
                loss = model(torch.ones(4, 64)).sum()
            after_forward, forward_peak = account.current_bytes, account.phase_peaks["forward"]
            loss.backward()
            del loss
            optimizer.step()
            breakdown = account.breakdown(model, optimizer)
            optimizer.zero_grad()
            levels.append(account.current_bytes)
            peaks.append(account.peak_bytes)
        account.limit_bytes = levels[-1] + SQUARE_BYTES // 2
        try:
            model(torch.ones(4, 64)).sum().backward()
            refused = False
        except torch.OutOfMemoryError:
            refused = True
        account.limit_bytes = None
        del model, optimizer
        gc.collect()
        model, optimizer = build()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_refusal = account.current_bytes
    seen = {
        "breakdown": breakdown,
        "levels": levels,
        "peaks": peaks[1:],  # the first step has no optimizer state yet
        "after_forward": after_forward,
        "forward_peak": forward_peak,
        "refused": refused,
        "after_refusal": after_refusal,
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
