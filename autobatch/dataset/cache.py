"""Keep rendered samples on disk, memory-mapped."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autobatch.dataset.rendering import Sample
from autobatch.errors import DataError

_VERSION = 1
_NEXT_MOVE = "run autobatch profile again"


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """All samples of a data set; a sample is its index. Legend: N samples, T tokens of all.

    Open one with `TokenCache.open`; the arrays are maps of the files, read when touched.
    """

    directory: Path
    files: tuple[str, ...]
    starts: np.ndarray  # int64 (N,), where a sample starts in `tokens`
    lengths: np.ndarray  # int64 (N,), uncut
    label_tokens: np.ndarray  # int64 (N,), uncut
    tokens: np.ndarray  # int32 (T,)
    labels: np.ndarray  # uint8 (T,), 1 = label
    sources: np.ndarray  # int64 (N, 2): file index, row index

    @classmethod
    def open(cls, directory: str | Path) -> TokenCache:
        """Return the cache in a directory.

        Raises:
            DataError: if it is missing, incomplete or of another version.
        """
        folder = Path(directory)
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["version"] != _VERSION:
                raise DataError(
                    f"token cache {folder} has version {meta['version']}, this autobatch reads "
                    f"{_VERSION}; {_NEXT_MOVE}"
                )
            num_samples, num_tokens = int(meta["num_samples"]), int(meta["num_tokens"])
            table = _map(folder / "samples.bin", np.int64, (num_samples, 4))
            tokens = _map(folder / "tokens.bin", np.int32, (num_tokens,))
            labels = _map(folder / "labels.bin", np.uint8, (num_tokens,))
            files = tuple(meta["files"])
        except FileNotFoundError as error:
            raise DataError(
                f"token cache {folder} is missing or incomplete; {_NEXT_MOVE}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"token cache {folder} is damaged; {_NEXT_MOVE}") from error
        lengths = np.array(table[:, 0])
        return cls(
            directory=folder,
            files=files,
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            label_tokens=np.array(table[:, 1]),
            tokens=tokens,
            labels=labels,
            sources=table[:, 2:],
        )

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.lengths)

    def ids(self, i: int) -> np.ndarray:
        """Return the token ids of a sample, int32 (length,)."""
        start = int(self.starts[i])
        return np.asarray(self.tokens[start : start + int(self.lengths[i])])

    def label_mask(self, i: int) -> np.ndarray:
        """Return which tokens of a sample are labels, bool (length,)."""
        start = int(self.starts[i])
        return np.asarray(self.labels[start : start + int(self.lengths[i])]).astype(bool)

    def source(self, i: int) -> tuple[str, int]:
        """Return the file of a sample with its row in that file, 0-based."""
        file_index, row_index = self.sources[i]
        return self.files[int(file_index)], int(row_index)


def write_cache(directory: Path, samples: Iterable[Sample], *, files: Sequence[str]) -> TokenCache:
    """Write samples as they come and return the cache; a reader sees all of it or nothing.

    Raises:
        DataError: if there are no samples, or the folder cannot be written.
    """
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".writing-"))
        _write(temporary, samples, files)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    except OSError as error:
        if directory.exists() and (directory / "meta.json").exists():
            return TokenCache.open(directory)  # another process was first
        raise DataError(
            f"cannot write the token cache {directory}: {error.strerror or error}; "
            "free space, or set AUTOBATCH_CACHE to another folder"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return TokenCache.open(directory)


def _write(folder: Path, samples: Iterable[Sample], files: Sequence[str]) -> None:
    num_samples = num_tokens = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "labels.bin").open("wb") as labels,
        (folder / "samples.bin").open("wb") as table,
    ):
        for sample in samples:
            tokens.write(sample.ids.tobytes())
            labels.write(sample.label_mask.astype(np.uint8).tobytes())
            row = (
                len(sample.ids),
                int(sample.label_mask.sum()),
                sample.file_index,
                sample.row_index,
            )
            table.write(np.array(row, dtype=np.int64).tobytes())
            num_samples += 1
            num_tokens += len(sample.ids)
        for stream in (tokens, labels, table):
            stream.flush()
            os.fsync(stream.fileno())
    if not num_samples:
        return  # the caller says why nothing was left
    meta = {
        "version": _VERSION,
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "files": list(files),
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _map(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if path.stat().st_size != size_bytes:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size_bytes}")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
