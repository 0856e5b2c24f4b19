"""Rows of token ids as the tensors of one micro-batch.

Legend: N rows, T tokens of the line, L padded length, K labelled positions. Everything is made
on the host from host integers, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample after the cut."""

    ids: np.ndarray  # (L,) int32
    label_mask: np.ndarray  # (L,) bool: this token is a target


@dataclass(frozen=True, kw_only=True)
class MicroBatchTensors:
    """What one forward and backward pass takes."""

    input_ids: torch.Tensor  # (1, T) packed, (N, L) padded; int64
    position_ids: torch.Tensor  # as input_ids; restarts at 0 in each row
    cu_seqlens: torch.Tensor | None  # (N + 1,) int32 borders of packed rows, None when padded
    row_lengths: tuple[int, ...]  # real tokens of each row
    label_index: torch.Tensor  # (K,) int64: flat positions whose next token is a target
    labels: torch.Tensor  # (K,) int64: those next tokens

    @property
    def num_label_tokens(self) -> int:
        """Targets of this micro-batch; 0 for a filler."""
        return self.labels.shape[0]

    @property
    def num_tokens(self) -> int:
        """Real tokens: padding does not count."""
        return sum(self.row_lengths)

    def to(self, device: torch.device) -> MicroBatchTensors:
        """Return the tensors on a device."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if device.type == "cuda":  # from pinned memory, so that the host need not wait
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return MicroBatchTensors(
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            cu_seqlens=None if self.cu_seqlens is None else move(self.cu_seqlens),
            row_lengths=self.row_lengths,
            label_index=move(self.label_index),
            labels=move(self.labels),
        )


def make_tensors(
    rows: Sequence[Row], *, padded_to: int | None = None, is_filler: bool = False
) -> MicroBatchTensors:
    """Return a micro-batch: rows packed into one line, or padded on the right to `padded_to`.

    A filler keeps its tokens and loses its labels.
    Example: rows of 2 and 3 tokens packed give position_ids 0 1 0 1 2 and cu_seqlens 0 2 5.
    """
    lengths = [len(row.ids) for row in rows]
    starts = (
        np.concatenate([[0], np.cumsum(lengths)[:-1]])
        if padded_to is None
        else np.arange(len(rows)) * padded_to
    )
    num_slots = sum(lengths) if padded_to is None else len(rows) * padded_to
    ids = np.zeros(num_slots, dtype=np.int64)  # id 0 pads: never attended to, never a label
    positions = np.zeros(num_slots, dtype=np.int64)
    index: list[np.ndarray] = []
    for row, start, length in zip(rows, starts, lengths, strict=True):
        ids[start : start + length] = row.ids
        positions[start : start + length] = np.arange(length)
        if not is_filler:
            index.append(start + np.flatnonzero(row.label_mask[1:]))
    label_index = np.concatenate(index) if index else np.zeros(0, dtype=np.int64)
    shape = (1, num_slots) if padded_to is None else (len(rows), padded_to)
    return MicroBatchTensors(
        input_ids=torch.from_numpy(ids.reshape(shape)),
        position_ids=torch.from_numpy(positions.reshape(shape)),
        cu_seqlens=None
        if padded_to is not None
        else torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        row_lengths=tuple(lengths),
        label_index=torch.from_numpy(label_index.astype(np.int64)),
        labels=torch.from_numpy(ids[label_index + 1]),
    )


def random_rows(
    lengths: Sequence[int], *, vocab_size: int, generator: np.random.Generator
) -> list[Row]:
    """Return rows of random ids in which every token but the first is a label.

    A probe steps them: more labels than any real row of that length can have.
    """
    rows = []
    for length in lengths:
        mask = np.ones(length, dtype=bool)
        mask[0] = False
        ids = generator.integers(0, vocab_size, size=length, dtype=np.int32)
        rows.append(Row(ids=ids, label_mask=mask))
    return rows
