"""Text from data made safe to print, names made short."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import takewhile

from autobatch.records import DataSource, LengthProfile

_JOINERS = "\u200c\u200d"  # emoji and many scripts are written with them
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_FEW_FIELDS = 8


def printable(text: str) -> str:
    """Return text in one line, with what moves a cursor or turns the writing round escaped.

    These are control, format and surrogate characters: a name may hold a line break, an
    escape sequence, half of a character, or a mark that shows the rest in reverse.
    """
    return "".join(
        c.encode("unicode_escape", "surrogatepass").decode()
        if unicodedata.category(c) in _UNSEEN and c not in _JOINERS
        else c
        for c in text
    )


def shortened(text: str, num_chars: int) -> str:
    """Return text of at most `num_chars`, its middle left out where it is longer."""
    if len(text) <= num_chars:
        return text
    head = (num_chars - 1) * 2 // 5
    return f"{text[:head]}…{text[len(text) - (num_chars - 1 - head) :]}"


def common_folder(files: Sequence[str]) -> str:
    """Return the folder all files lie in, with its last slash, "" where there is none."""
    folders = [file.rpartition("/")[0].split("/") for file in files]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*folders, strict=False))
    folder = "/".join(names[0] for names in shared)
    return f"{folder}/" if folder or any(file.startswith("/") for file in files) else ""


def data_name(data: DataSource, *, num_chars: int = 60) -> str:
    """Return a short name of the data: the file in its folder, or the folder of several."""
    folder = common_folder(data.files)
    last = folder.rstrip("/").rpartition("/")[2]
    if len(data.files) == 1:
        name = data.files[0][len(folder) :]
        return shortened(printable(f"{last}/{name}" if last else name), num_chars)
    name = f"({len(data.files):,} files)"
    return f"{shortened(printable(last), num_chars - len(name) - 1)} {name}".strip()


def data_columns(data: DataSource) -> str:
    """Return the format with the columns it reads, where they bear another name."""
    named = {key.removesuffix("_key"): name for key, name in data.keys.items()}
    columns = ", ".join(
        f"{key}: {name}" for key, name in named.items() if name not in (key, data.format)
    )
    return printable(f"{data.format} ({columns})" if columns else data.format)


def coverage(profile: LengthProfile) -> tuple[str, str]:
    """Return how much of the data was read, in a word and in a sentence."""
    rows = counted(profile.num_rows, "row")
    if getattr(profile, "sampled", None):
        return "sampled", f"Estimated from a part of {rows}; the longest rows are exact."
    if not profile.complete:
        return "partial", f"Reading stopped early: the numbers are of {rows} only."
    return "complete", f"Everything was read: {rows}."


def in_words(value: object) -> str:
    """Return a plain value (dict, list, scalar) of a record as words."""
    if isinstance(value, dict):
        return ", ".join(
            f"{printable(str(key)).replace('_', ' ')} {in_words(part)}"
            for key, part in list(value.items())[:_FEW_FIELDS]
        )
    if isinstance(value, (list, tuple)):
        more = f" and {len(value) - _FEW_FIELDS} more" if len(value) > _FEW_FIELDS else ""
        return "; ".join(in_words(part) for part in value[:_FEW_FIELDS]) + more
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return printable(str(value))


def cost_of(profile: LengthProfile) -> str:
    """Return what the advised max_length cuts."""
    advised = profile.max_length.recommended
    option = next((o for o in profile.max_length.curve if o.max_length == advised), None)
    if option is None or not option.rows_cut:
        return "cuts no row"
    share = option.rows_cut / max(1, profile.num_samples)
    return f"cuts {counted(option.rows_cut, 'row')} ({percent(share)})"


def counted(number: float, name: str) -> str:
    """Return a number with the name of what is counted, in the plural where it is not one."""
    return f"{number:,.0f} {name}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Return a share in percent; what is not nothing is never shown as nothing."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.1%}"
