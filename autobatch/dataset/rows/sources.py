"""Find the data files that people name: paths, folders, globs, URLs, data sets of the Hub."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autobatch.dataset.rows import hub, remote
from autobatch.dataset.rows.splits import SUFFIXES, check_one_kind, kind_of, split_of, suffix_of
from autobatch.dataset.rows.stored import (
    DataFile,
    open_stored,
    open_unpacked,
    packing_of,
    unreadable,
)
from autobatch.errors import AutobatchError, DataError
from autobatch.storage import read_json, user_path
from autobatch.units import format_value

# How files begin that are often taken for data, with what to do about each.
_OTHER_FILES = {
    b"PK\x03\x04": "is a zip archive; unpack it and name the files in it",
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run `git lfs pull` beside it",
    b"<!DOCTYPE": "is a web page, not the data; download the file itself",
    b"<html": "is a web page, not the data; download the file itself",
}


def find_files(files: Sequence[str]) -> tuple[DataFile, ...]:
    """Return the data files that names mean, folders and globs sorted by name.

    A name is a path, a folder (of data files, or as `datasets` saves them), a glob (`**`
    reaches into folders), a URL that fsspec knows, or a data set of the Hugging Face Hub
    (`owner/name[:config[:split]][@revision]`), which is fetched into the Hub's cache. What
    exists here wins over the Hub.

    Raises:
        DataError: if a file is missing, unreadable, no regular file or of no known kind, or a
            folder mixes kinds or splits.
    """
    if not files:
        raise DataError("no data file was given; name a parquet or jsonl file")
    found: list[DataFile] = []
    for name in map(str, files):
        try:
            found += _find(name)
        except OSError as error:
            raise unreadable(error.filename or name, error) from error
        except ValueError as error:  # a null character
            raise DataError(f"{format_value(name)} is no path ({error}); correct it") from error
    return tuple(found)


def _find(name: str) -> list[DataFile]:
    name = name.removeprefix("file://")
    data = hub.parse_data(name)
    if data is not None:
        return [_describe(Path(f.local_path), f) for f in hub.fetch_data(data)]
    if remote.is_url(name):
        return [_describe_remote(url) for url in _known(_data_only(remote.find(name)), where=name)]
    return [_describe(path) for path in _expand(name)]


def _expand(name: str) -> list[Path]:
    path = user_path(name)
    if path.is_dir():
        return _in_folder(path, name)
    if path.exists():
        return [path]
    found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
    files = [p for p in found if not p.is_dir()]
    if files and not Path(name).suffix:  # data/**: what else lies there is not meant
        files = [p for p in files if kind_of(p.name)]
    if not files and found:
        return [file for folder in found for file in _in_folder(folder, str(folder))]
    if not files:
        raise DataError(f"data file {name} does not exist; check the path")
    return files


def _in_folder(folder: Path, name: str) -> list[Path]:
    saved = _saved_by_datasets(folder, name)
    if saved is not None:
        return saved
    found = sorted(p for p in folder.iterdir() if kind_of(p.name) and p.is_file())
    if not found:
        deeper = next((p for p in sorted(folder.rglob("*")) if kind_of(p.name)), None)
        hint = f"{name.rstrip('/')}/**/*{suffix_of(deeper.name)}" if deeper else "the files"
        raise DataError(f"{name} holds no parquet or jsonl file; name {hint} themselves")
    return [Path(p) for p in _known([str(p) for p in found], where=name)]


def _data_only(names: Sequence[str]) -> Sequence[str]:
    """Return names without those of other kinds, unless none is left."""
    return [name for name in names if kind_of(name)] or names


def _known(names: Sequence[str], *, where: str) -> Sequence[str]:
    """Return the files of one folder; refuse those that are not meant to be read together."""
    if len(names) > 1:
        folder = where.rstrip("/")
        leaves = [name.rpartition("/")[2] for name in names]
        splits = sorted({split for leaf in leaves if (split := split_of(leaf))})
        first = "train" if "train" in splits else next(iter(splits), None)
        meant = f"*{first}*" if len(splits) > 1 else "*"
        check_one_kind(names, where=where, example=f"{folder}/{meant}{suffix_of(names[-1])}")
        if len(splits) > 1 and not any(sign in where for sign in "*?["):
            example = next(leaf for leaf in leaves if split_of(leaf) == first)
            raise DataError(
                f"{where} holds the splits {', '.join(splits)}; name the files of one, such as "
                f"{folder}/{example}"
            )
    return names


def _saved_by_datasets(folder: Path, name: str) -> list[Path] | None:
    """Return the files of a folder that `datasets` saved (`save_to_disk`), None for another."""
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = [str(split) for split in read_json(folder / "dataset_dict.json")["splits"]]
            if len(splits) == 1:
                return _in_folder(folder / splits[0], f"{name.rstrip('/')}/{splits[0]}")
            raise DataError(
                f"{name} holds the splits {', '.join(splits)}; name one, as "
                f"{name.rstrip('/')}/{'train' if 'train' in splits else splits[0]}"
            )
        if not (folder / "state.json").is_file():
            return None
        entries = read_json(folder / "state.json")["_data_files"]
        found = [folder / Path(str(entry["filename"])).name for entry in entries]
    except DataError:
        raise
    except (AutobatchError, LookupError, TypeError) as error:
        raise DataError(
            f"{name} is no whole folder of `datasets` ({error}); save the data set again"
        ) from error
    missing = next((path for path in found if not path.is_file()), None)
    if missing is not None:
        raise DataError(f"{name} lacks {missing.name}, which it names; save the data set again")
    if not found:
        raise DataError(f"{name} has no rows; give a folder with data")
    return found


def _describe(path: Path, fetched: hub.FetchedFile | None = None) -> DataFile:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe waits for ever
        raise DataError(
            f"{path} is no regular file, and rows are read more than once; "
            "write them to a parquet or jsonl file"
        )
    return _with_kind(
        DataFile(
            path=fetched.url if fetched else os.path.abspath(path),
            kind="",
            size_bytes=status.st_size,
            # the commit is in the URL of a file from the Hub; its copies have any time
            version="" if fetched else str(status.st_mtime_ns),
            local_path=os.path.abspath(path),
            revision=fetched.revision if fetched else None,
        ),
        name=path.name,
    )


def _describe_remote(url: str) -> DataFile:
    now = remote.stat(url)
    name = url.partition("?")[0] if url.startswith("http") else url
    file = DataFile(
        path=url, kind="", size_bytes=now.size_bytes, version=now.version, local_path=None
    )
    return _with_kind(file, name=name)


def _with_kind(file: DataFile, *, name: str) -> DataFile:
    with open_stored(file) as stream:
        start = stream.read(32)
    for magic, sentence in _OTHER_FILES.items():
        if start.startswith(magic):
            raise DataError(f"{file.path} {sentence}")
    kind = SUFFIXES.get(suffix_of(name))
    packing = packing_of(start)
    if packing is not None:
        with open_unpacked(file) as stream:
            start = stream.read(6)
    if start.startswith(b"PAR1"):
        kind = "parquet"
    elif start.startswith(b"ARROW1"):
        kind = "arrow"
    if kind is None:
        raise DataError(
            f"{file.path} is no parquet, jsonl or json file by its name; convert it to one of these"
        )
    if packing is not None and kind in ("parquet", "arrow"):
        raise DataError(
            f"{file.path} is a {kind} file inside {packing}, which cannot be read in parts; "
            "unpack it first"
        )
    return replace(file, kind=kind)
