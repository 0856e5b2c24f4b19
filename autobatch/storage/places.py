"""Where files lie: output folders, caches, records shipped with the tool."""

from __future__ import annotations

import os
from pathlib import Path

from autobatch.errors import AutobatchError
from autobatch.storage.files import write_atomic

# What commands leave for one another in an output folder.
DEFAULT_OUT = "autobatch-out"
PROFILE_FILE = "profile.json"
PROFILE_PNG_FILE = "profile.png"
PROFILE_PAGE_FILE = "profile.html"
TRIALS_FILE = "trials.jsonl"
TUNED_FILE = "tuned.yaml"
METRICS_FILE = "metrics.jsonl"


def cache_root() -> Path:
    """Return the folder of token caches: AUTOBATCH_CACHE, else the XDG cache.

    Raises:
        AutobatchError: if it begins with the home of nobody.
    """
    chosen = os.environ.get("AUTOBATCH_CACHE")
    if chosen:
        return user_path(chosen)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "autobatch"


def user_path(text: str | Path) -> Path:
    """Return a path with its leading `~` or `~name` replaced by that home.

    Raises:
        AutobatchError: if there is no such home.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise AutobatchError(
            f"{str(text)!r} begins with a home folder that is not known here; write the whole path"
        ) from error


def shipped_dir(name: str) -> Path:
    """Return a folder of records shipped with the tool, `gpus` or `lengths`.

    The installed package holds them as `autobatch/profiles`, a checkout as `profiles`.

    Raises:
        AutobatchError: if neither is there.
    """
    package = Path(__file__).parent.parent
    for root in (package, package.parent):
        folder = root / "profiles" / name
        if folder.is_dir():
            return folder
    raise AutobatchError(
        f"{package / 'profiles' / name} is missing, so this installation is incomplete; "
        "install autobatch-sft again"
    )


def make_out_dir(path: Path) -> Path:
    """Create an output folder that git ignores, and return it.

    Raises:
        AutobatchError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        ignored = (path / ".gitignore").exists()
    except OSError as error:
        raise AutobatchError(
            f"cannot make the output folder {path}: {error.strerror or error}; choose another --out"
        ) from error
    if not ignored:
        write_atomic(path / ".gitignore", "*\n")
    return path
