"""A profile's picture with its page, drawn beside its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from autobatch.records import LengthProfile
from autobatch.reporting.page import Origin, profile_page
from autobatch.reporting.png import profile_png
from autobatch.storage import PROFILE_PAGE_FILE, PROFILE_PNG_FILE, to_plain, write_atomic


def draw_profile(
    profile: LengthProfile, folder: Path, *, origin: Origin, say: Callable[[str], None]
) -> None:
    """Write profile.png and profile.html; those of the very same record are left as they are.

    A file that cannot be drawn is said in one sentence and is missing afterwards: a picture
    that is there always shows the record beside it.
    """
    record = json.dumps([to_plain(profile), dict(origin.versions)], sort_keys=True)
    mark = f"record {hashlib.sha256(record.encode('utf-8', 'backslashreplace')).hexdigest()}"
    drawings: dict[str, Callable[[], str | bytes]] = {
        PROFILE_PNG_FILE: lambda: profile_png(profile, mark=mark),
        PROFILE_PAGE_FILE: lambda: profile_page(profile, origin=origin, mark=mark),
    }
    for name, draw in drawings.items():
        path = folder / name
        if _shows(path, mark):
            continue
        try:
            write_atomic(path, draw())
        except Exception as error:  # whatever a font or a disk does, the profile is not lost
            _remove(path)
            first = (str(error).strip().splitlines() or ["no message"])[0][:200]
            say(
                f"{path} could not be drawn ({type(error).__name__}: {first}); the profile is whole"
            )


def remove_drawings(folder: Path) -> None:
    """Remove the picture with its page, which would show an earlier record."""
    for name in (PROFILE_PNG_FILE, PROFILE_PAGE_FILE):
        _remove(folder / name)


def _shows(path: Path, mark: str) -> bool:
    try:
        with path.open("rb") as stream:
            return mark.encode() in stream.read(4000)  # both keep it at their beginning
    except OSError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):  # a folder of that name, or no permission: nothing of ours
        path.unlink(missing_ok=True)
