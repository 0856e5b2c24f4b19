"""Tell which files of a data set are its training rows, by its description or by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from autobatch.errors import DataError

SUFFIXES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
}
PACKED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")
# What people and libraries lay beside rows; none of them holds rows.
_DESCRIPTIONS = {
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("config.json", "package.json", "metadata.json"),
}
_GLOB_WORDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
# The words that `datasets` looks for (its data_files.py, version 4), lower case.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def kind_of(name: str) -> str | None:
    """Return the kind of a file by its name, whatever packs it: parquet, jsonl ..., or None."""
    path = PurePosixPath(name)
    if path.name in _DESCRIPTIONS:
        return None
    return SUFFIXES.get(suffix_of(name))


def suffix_of(name: str) -> str:
    """Return the last suffix of a name before that of a compression, lower case."""
    path = PurePosixPath(name)
    if path.suffix.lower() in PACKED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix.lower()


def split_of(name: str) -> str | None:
    """Return train, validation or test where a path has such a word, else None.

    The last word counts: `train/gsm8k-test.parquet` is a test file.
    """
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    for word in reversed(words):
        for split, spellings in _SPLIT_WORDS.items():
            if word in spellings:
                return split
    return None


def check_one_kind(names: Sequence[str], *, where: str, example: str) -> None:
    """Refuse files of different kinds, which may be the same rows twice.

    Raises:
        DataError: if there are several kinds.
    """
    kinds = sorted({kind_of(name) or "" for name in names})
    if len(kinds) > 1:
        words = ["JSON" if kind.startswith("json") else kind for kind in kinds]
        mixed = " and ".join(sorted(set(words), reverse=True))
        if len(set(words)) == 1:
            mixed = " and ".join(kinds)
        raise DataError(
            f"{where} mixes {mixed} files, perhaps the same rows twice; "
            f"name one kind, such as {example}"
        )


def choose_files(
    names: Sequence[str],
    *,
    where: str,
    card: Mapping[str, Any],
    config: str | None = None,
    split: str | None = None,
) -> list[str]:
    """Return the data files of one config and split of a repository, in order.

    `card` is the metadata of its README, whose `configs` name the files of each split; without
    them folders are configs and names tell the split. The split is train where nothing else
    is said. `where` is the data set as the user named it, without config and split.

    Raises:
        DataError: if there are several configs or splits and none is named, or the one named
            is not there, or files of two kinds.
    """
    data_files = [name for name in names if kind_of(name) and not _is_hidden(name)]
    if not data_files:
        raise DataError(
            f"{where} holds no parquet, arrow, jsonl, json or csv file; try "
            f"{where}@refs/convert/parquet, which the Hub makes of many data sets"
        )
    described = [c for c in card.get("configs") or () if isinstance(c, Mapping)]
    chosen: list[str] | None = None
    if described:
        entry = _config(described, where=where, config=config)
        config = str(entry.get("config_name", "default")) if len(described) > 1 else config
        root = str(entry.get("data_dir") or "").strip("./")
        if entry.get("data_files"):
            chosen = _described(data_files, entry["data_files"], where, config, split, root=root)
        elif root:
            data_files = [name for name in data_files if name.startswith(f"{root}/")]
    elif config is not None:
        data_files = _folder(data_files, config, where=where)
    else:
        _check_one_folder(data_files, where=where)
    if chosen is None:
        chosen = _by_name(data_files, where=where, config=config, split=split)
    if not chosen:
        raise DataError(
            f"{where} describes {config or 'its'} files, but none of them is there; "
            f"name them, as in hf://datasets/{where}/FILE"
        )
    folder = str(PurePosixPath(chosen[0]).parent)
    check_one_kind(
        chosen,
        where=where,
        example=f"hf://datasets/{where}/{'' if folder == '.' else folder + '/'}"
        f"*{suffix_of(chosen[0])}",
    )
    return chosen


def _is_hidden(name: str) -> bool:
    return any(part[0] in "._" for part in PurePosixPath(name).parts)


def _config(
    described: Sequence[Mapping[str, Any]], *, where: str, config: str | None
) -> Mapping[str, Any]:
    names = [str(entry.get("config_name", "default")) for entry in described]
    if config is not None:
        if config in names:
            return described[names.index(config)]
        raise DataError(f"{where} has no config {config!r}; it has {', '.join(names)}")
    if len(described) == 1:
        return described[0]
    for entry, name in zip(described, names, strict=True):
        if entry.get("default") is True or name == "default":
            return entry
    raise DataError(
        f"{where} has {len(names)} configs: {', '.join(names)}; name one, as {where}:{names[0]}"
    )


def _described(
    names: Sequence[str],
    data_files: Any,
    where: str,
    config: str | None,
    split: str | None,
    *,
    root: str,
) -> list[str]:
    """Return the files that a config's `data_files` (text, list, list of split and path) name."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        is_named = isinstance(entry, Mapping)
        paths = entry.get("path") if is_named else entry
        patterns = paths if isinstance(paths, list) else [paths]
        found = by_split.setdefault(str(entry.get("split", "train")) if is_named else "train", [])
        for pattern in map(str, patterns):
            whole = f"{root}/{pattern}" if root else pattern
            found += [n for n in names if n not in found and matches(n, whole)]
    return by_split[_pick(by_split, where=where, config=config, split=split)]


def matches(name: str, pattern: str) -> bool:
    """Return whether a path fits a glob in which `*` stays in its folder and `**` does not."""
    expression = "".join(
        _GLOB_WORDS.get(word) or (word if word[:1] == "[" else re.escape(word))
        for word in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern.removeprefix("./"))
    )
    return re.fullmatch(expression, name) is not None


def _folder(names: Sequence[str], config: str, *, where: str) -> list[str]:
    if config == "default":
        return list(names)
    inside = [name for name in names if name.startswith(f"{config}/")]
    if not inside:
        folders = sorted({name.split("/")[0] for name in names if "/" in name})
        raise DataError(
            f"{where} has no config {config!r}; "
            + (f"its folders are {', '.join(folders)}" if folders else "it has no configs")
        )
    return inside


def _check_one_folder(names: Sequence[str], *, where: str) -> None:
    """Refuse folders that each have splits of their own (`en/train`, `fr/train`)."""
    folders = sorted({n.split("/")[0] for n in names if "/" in n and split_of(n.split("/", 1)[1])})
    if len(folders) > 1 and not any(split_of(folder) for folder in folders):
        raise DataError(
            f"{where} has {len(folders)} configs: {', '.join(folders)}; name one, as "
            f"{where}:{folders[0]}"
        )


def _by_name(
    names: Sequence[str], *, where: str, config: str | None, split: str | None
) -> list[str]:
    by_split: dict[str, list[str]] = {}
    for name in names:
        found = split_of(name) or "train"  # as `datasets` has it: what names no split is train
        by_split.setdefault(found, []).append(name)
    return by_split[_pick(by_split, where=where, config=config, split=split)]


def _pick(
    by_split: Mapping[str, Sequence[str]], *, where: str, config: str | None, split: str | None
) -> str:
    names = list(by_split)
    if split in names:
        return str(split)
    if split is None and ("train" in names or len(names) == 1):
        return "train" if "train" in names else names[0]
    example = f"{where}:{config or 'default'}:{names[0] if names else 'train'}"
    raise DataError(
        f"{where} has no split {split or 'train'!r}; it has {', '.join(names) or 'none'}: "
        f"name one, as {example}"
    )
