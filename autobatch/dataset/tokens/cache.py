"""Keep rendered samples on disk, memory-mapped."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autobatch.dataset.tokens.samples import SampleBatch
from autobatch.errors import AutobatchError, DataError
from autobatch.storage import read_json

_VERSION = 1
_WRITING = ".writing-"  # what a folder is called while it is written, then host-pid-random
_STALE_SECS = 24 * 3600
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
    complete: bool = True  # False: some of the rows only, by --sample or an interrupt

    @classmethod
    def open(cls, directory: str | Path, *, partial_ok: bool = False) -> TokenCache:
        """Return the cache in a directory; one of some of the rows only where `partial_ok`.

        Raises:
            DataError: if it is missing, incomplete or of another version.
        """
        folder = Path(directory)
        try:
            if not (folder / "meta.json").is_file():
                raise FileNotFoundError
            meta = read_json(folder / "meta.json")
            if meta["version"] != _VERSION:
                raise DataError(
                    f"token cache {folder} has version {meta['version']}, this autobatch reads "
                    f"{_VERSION}; {_NEXT_MOVE}"
                )
            complete = bool(meta.get("complete", True))
            if not complete and not partial_ok:
                raise DataError(
                    f"token cache {folder} holds only some of the rows; {_NEXT_MOVE}, without "
                    "--sample, and let it finish"
                )
            num_samples, num_tokens = int(meta["num_samples"]), int(meta["num_tokens"])
            table = _map(folder / "samples.bin", np.int64, (num_samples, 4))
            tokens = _map(folder / "tokens.bin", np.int32, (num_tokens,))
            labels = _map(folder / "labels.bin", np.uint8, (num_tokens,))
            files = tuple(map(str, meta["files"]))
            lengths, label_tokens = np.array(table[:, 0]), np.array(table[:, 1])
            if int(lengths.sum()) != num_tokens or (label_tokens > lengths).any():
                raise ValueError(f"{folder} holds other lengths than tokens")
            if (label_tokens < 0).any() or (table[:, 2] >= len(files)).any():
                raise ValueError(f"{folder} holds impossible samples")
            _let_go(table)
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(
                f"token cache {folder} is missing or incomplete; {_NEXT_MOVE}"
            ) from error
        except (
            AutobatchError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            OverflowError,
        ) as error:
            raise DataError(f"token cache {folder} is damaged; {_NEXT_MOVE}") from error
        return cls(
            directory=folder,
            files=files,
            starts=np.cumsum(lengths) - lengths,
            lengths=lengths,
            label_tokens=label_tokens,
            tokens=tokens,
            labels=labels,
            sources=table[:, 2:],
            complete=complete,
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


def write_cache(
    directory: Path,
    batches: Iterable[SampleBatch],
    *,
    files: Sequence[str],
    is_complete: Callable[[], bool] = lambda: True,
) -> TokenCache:
    """Write samples as they come and return the cache; a reader sees all of it or nothing.

    `is_complete` is asked at the end; where it says no, `partial_name` names the folder. What
    killed writers left beside it is removed.

    Raises:
        DataError: if there are no samples, or the folder cannot be written.
    """
    parts: list[Path] = []
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(directory.parent)
        parts.append(_new_folder(directory.parent))
        complete = _write(parts[0], batches, files, is_complete)
        if not complete:
            directory = partial_name(directory)
        if directory.exists():  # renamed, not removed: its files may be unreadable
            parts.append(_new_folder(directory.parent))
            directory.rename(parts[1])
        parts[0].rename(directory)
    except OSError as error:
        try:
            return TokenCache.open(directory, partial_ok=True)  # another process was first
        except DataError:
            raise DataError(
                f"cannot write the token cache {directory}: {error.strerror or error}; "
                "free space, or set AUTOBATCH_CACHE to another folder"
            ) from error
    finally:
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
    return TokenCache.open(directory, partial_ok=True)


def partial_name(directory: Path) -> Path:
    """Return what a cache that holds only some of the rows is called."""
    return directory.with_name(f"{directory.name}-partial")


def _new_folder(parent: Path) -> Path:
    prefix = f"{_WRITING}{socket.gethostname()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(dir=parent, prefix=prefix))


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_WRITING}*"):
        host, _, rest = folder.name.removeprefix(_WRITING).rpartition("-")[0].rpartition("-")
        try:
            newest = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
        except OSError:  # unreadable, or its writer was done meanwhile
            continue
        is_ours = host == socket.gethostname() and rest.isdecimal()
        if time.time() - newest > _STALE_SECS or (is_ours and not _is_alive(int(rest))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    return True


def _write(
    folder: Path,
    batches: Iterable[SampleBatch],
    files: Sequence[str],
    is_complete: Callable[[], bool],
) -> bool:
    num_samples = num_tokens = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "labels.bin").open("wb") as labels,
        (folder / "samples.bin").open("wb") as table,
    ):
        for batch in batches:
            tokens.write(batch.ids.data)
            labels.write(batch.labels.data)
            table.write(batch.table.data)
            num_samples += batch.num_samples
            num_tokens += len(batch.ids)
        for stream in (tokens, labels, table):
            stream.flush()
            os.fsync(stream.fileno())
    complete = is_complete()
    if not num_samples:
        return complete  # the caller says why nothing was left
    meta = {
        "version": _VERSION,
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "files": list(files),
        "complete": complete,
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return complete


def _let_go(array: np.ndarray) -> None:
    """Take the pages of a map out of this process; they are read again when touched."""
    if isinstance(array, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _map(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if path.stat().st_size != size_bytes:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {size_bytes}")
    return np.memmap(path, dtype=dtype, mode="r", shape=shape)
