"""Sizes as people write them, numbers as people read them."""

from __future__ import annotations

import re

from autobatch.errors import ConfigError

GIB = 2**30
_FACTORS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_NO_MEMORY_HAS = 2.0**60  # bytes
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, *, least: int = 1) -> int:
    """Return the bytes of a size such as `6GiB`, `80GB` or bare bytes, at least `least`.

    Raises:
        ConfigError: if the text is no size, or below `least` bytes, or beyond any memory.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"size {format_value(text)} is not understood; write it as 6GiB, 80GB or bytes"
        )
    size = float(match.group(1)) * factor
    if not size < _NO_MEMORY_HAS:
        raise ConfigError(f"size {format_value(text)} is beyond any memory; give a smaller size")
    num_bytes = int(size)
    if num_bytes < least:
        raise ConfigError(f"size {str(text)!r} is below {least} bytes; give a larger size")
    return num_bytes


def format_gib(num_bytes: int | float | None) -> str:
    """Return bytes as GiB for people, `-` for unknown; MiB below a tenth of a GiB."""
    if num_bytes is None:
        return "-"
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def format_count(number: int | float | None) -> str:
    """Return a count with thousands separators, `-` for unknown."""
    return "-" if number is None else f"{number:,.0f}"


def format_value(value: object, *, num_chars: int = 80) -> str:
    """Return any value as Python writes it, its middle left out where it is longer."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # beyond the digits or the depth that Python prints
        return f"a {type(value).__name__} too large to print"
    if len(text) <= num_chars:
        return text
    half = (num_chars - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def format_secs(secs: float) -> str:
    """Return a duration as `12.3 s`, `4 min 05 s` or `3 h 07 min`."""
    if secs < 60:
        return f"{secs:.1f} s"
    minutes, rest = divmod(round(secs), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
