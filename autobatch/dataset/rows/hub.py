"""Fetch data files and tokenizers from the Hugging Face Hub, each by the commit it was found at.

The Hub's own library reads its own variables: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autobatch.dataset.rows.hub_errors import download_command, http_errors, hub_errors_told
from autobatch.dataset.rows.splits import choose_files, kind_of, matches
from autobatch.errors import AutobatchError, DataError
from autobatch.storage import cache_root, read_json, write_json

_NAME = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME}?)(?::(?P<config>[\w.-]+)(?::(?P<split>[\w.-]+))?)?(?:@(?P<revision>[^@\s]+))?"
)
_URL = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME}/{_NAME}?)(?:@(?P<revision>[^/@]+|refs/[^/@]+/[^/@]+))?(?:/(?P<path>.*))?"
)
_PAGE = re.compile(
    rf"https?://(?P<host>[^/]+)/datasets/(?P<repo>{_NAME}/{_NAME})"
    r"(?:/(?:resolve|blob|tree|viewer)(?:/(?P<revision>[^/?]+)(?:/(?P<path>[^?]*))?)?)?/?(?:\?.*)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# All that decides the ids of a row, and the shape of the model; never its weights.
_MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("special_tokens_map.json", "added_tokens.json"),
)


@dataclass(frozen=True, kw_only=True)
class HubData:
    """A data set on the Hub as the user named it."""

    repo: str  # owner/name
    revision: str | None = None  # a branch, tag or commit; None: main
    config: str | None = None
    split: str | None = None
    path: str | None = None  # a file, folder or glob in it; None: found by its README


@dataclass(frozen=True, kw_only=True)
class FetchedFile:
    """A file of the Hub with its copy in the Hub's cache."""

    url: str  # hf://datasets/OWNER/NAME@COMMIT/PATH
    local_path: str
    revision: str  # the commit


def parse_data(name: str) -> HubData | None:
    """Return the data set that a name means, None if it is no name of the Hub's.

    Names are `owner/name[:config[:split]][@revision]`, `hf://datasets/owner/name[@revision][/path]`
    or the address of its page. What exists here, or lies in a folder that exists, is a path.
    """
    if "://" in name:
        match = _URL.fullmatch(name) or _PAGE.fullmatch(name)
        if match is None:
            return None
        found = {key: value or None for key, value in match.groupdict().items()}
        if "host" in found and found.pop("host") not in _hosts():
            return None
        if "/viewer" in name:
            found |= {"revision": None, "path": None}
        return HubData(**found)  # type: ignore[arg-type]
    match = _ID.fullmatch(name)
    if match is None or kind_of(name) or _is_here(name):
        return None
    return HubData(**match.groupdict())


def parse_model(name: str) -> tuple[str, str | None] | None:
    """Return (owner/name, revision) of a model of the Hub, None if the name is a path.

    What exists here, or lies in a folder that exists, is a path.
    """
    match = _ID.fullmatch(name)
    if match is None or match["config"] or _is_here(name):
        return None
    return match["repo"], match["revision"]


def _hosts() -> set[str]:
    """Return the hosts whose pages are the Hub's: its own, and the mirror in use."""
    mirror = os.environ.get("HF_ENDPOINT", "").rstrip("/").rpartition("://")[2]
    return {"huggingface.co", "www.huggingface.co", "hf.co", mirror}


def _is_here(name: str) -> bool:
    return os.path.exists(name) or os.path.exists(name.split("/")[0])


def fetch_model(repo: str, revision: str | None) -> str:
    """Return a folder with the tokenizer and config of a model of the Hub, without its weights.

    The folder lies in the Hub's cache, named by the commit.

    Raises:
        ModelError: if the Hub cannot be reached, or does not give them.
    """
    with hub_errors_told(repo, revision, "model"):
        return _snapshot(repo, revision, "model", _MODEL_FILES)


def fetch_data(data: HubData) -> list[FetchedFile]:
    """Return the data files of a data set, fetched where the Hub's cache has them not.

    Raises:
        DataError: if the Hub cannot be reached or refuses, or it is not clear which files are
            meant.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    with hub_errors_told(data.repo, data.revision, "dataset"):
        folder = Path(_snapshot(data.repo, data.revision, "dataset", ["README.md"]))
        commit = folder.name
        pinned = replace(data, revision=commit)
        names = _names(pinned, folder)
        chosen = _choose(data, names, folder)
        if any(not (folder / name).is_file() for name in chosen):
            patterns = [glob.escape(name) for name in chosen]
            with suppress(LocalEntryNotFoundError):  # no network: told below, by name
                _snapshot(data.repo, commit, "dataset", patterns)
        missing = [name for name in chosen if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{data.repo} is in the Hub's cache without {missing[0]}, and the Hub cannot be "
            f"reached; fetch it where there is a network: {download_command(data.repo, 'dataset')}"
        )
    return [
        FetchedFile(
            url=f"hf://datasets/{data.repo}@{commit}/{name}",
            local_path=str(folder / name),
            revision=commit,
        )
        for name in chosen
    ]


def _snapshot(repo: str, revision: str | None, kind: str, patterns: Sequence[str]) -> str:
    from huggingface_hub import snapshot_download  # slow: not paid by local runs

    return str(
        snapshot_download(
            repo, repo_type=kind, revision=revision, allow_patterns=list(patterns), etag_timeout=15
        )
    )


def _names(data: HubData, folder: Path) -> list[str]:
    """Return the paths of all files of a commit; kept, so that they are known offline too."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError

    listing = cache_root() / "hub" / f"{data.repo.replace('/', '--')}@{data.revision}.json"
    try:
        return [str(name) for name in read_json(listing)]
    except (AutobatchError, TypeError):
        pass
    if not constants.HF_HUB_OFFLINE:
        try:
            names = HfApi().list_repo_files(data.repo, revision=data.revision, repo_type="dataset")
        except GatedRepoError:
            raise
        except http_errors():
            pass  # no network: what another program has fetched may be all
        else:
            write_json(listing, sorted(names))
            return sorted(names)
    here = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    _check_shards(data, here)
    return here


def _check_shards(data: HubData, names: Sequence[str]) -> None:
    """Refuse a set of numbered files (train-00000-of-00005) that is not whole."""
    found: dict[tuple[str, str], int] = {}
    for name in names:
        if match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})(.*)", name):
            series = (match[1], match[2])
            found[series] = found.get(series, 0) + 1
    for (name, count), num_here in found.items():
        if num_here != int(count):
            raise DataError(
                f"{data.repo} is only in part in the Hub's cache ({num_here} of {int(count)} files "
                f"of {name}), and the Hub cannot be reached; fetch it where there is a network: "
                f"{download_command(data.repo, 'dataset')}"
            )


def _choose(data: HubData, names: Sequence[str], folder: Path) -> list[str]:
    if data.path is None:
        card = _card(folder / "README.md")
        return choose_files(names, where=data.repo, card=card, config=data.config, split=data.split)
    path = data.path.strip("/")
    if path in names:
        chosen = [path]
    else:
        pattern = path if any(sign in path for sign in "*?[") else f"{path}/*"
        chosen = [name for name in names if kind_of(name) and matches(name, pattern)]
    if not chosen:
        near = ", ".join([name for name in names if kind_of(name)][:5]) or "no data file"
        raise DataError(f"{data.repo} has no data file {path}; it has {near}")
    return chosen


def _card(readme: Path) -> dict[str, Any]:
    """Return the metadata at the head of a README, empty where there is none or it is broken."""
    import yaml

    try:
        text = readme.read_text(encoding="utf-8", errors="replace")
        head = re.match(r"\s*---\r?\n(.*?)\r?\n---", text, re.DOTALL)
        card = yaml.safe_load(head[1]) if head else None
    except (OSError, yaml.YAMLError):
        return {}
    return card if isinstance(card, dict) else {}
