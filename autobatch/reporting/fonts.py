"""Fonts that hold the glyphs of a text, among those installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

BUNDLED = "DejaVu Sans"  # comes with matplotlib
# Sans-serif fonts with Chinese, of Linux, Windows, macOS, tried before any other.
_PREFERRED = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC"),
    *("Hiragino Sans GB", "Heiti SC", "Noto Sans CJK JP", "Droid Sans Fallback"),
    "Arial Unicode MS",
)
_MOST_FALLBACKS = 4


def families_for(texts: Iterable[str]) -> tuple[list[str], frozenset[str]]:
    """Return families that together hold the characters of texts, and those that none holds."""
    wanted = {ord(c) for text in texts for c in text if not c.isspace()}
    families = [BUNDLED]
    missing = wanted - _glyphs(BUNDLED)
    for family in _installed() if missing else ():
        found = missing & _glyphs(family)
        if found:
            families.append(family)
            missing -= found
        if not missing or len(families) > _MOST_FALLBACKS:
            break
    return families, frozenset(map(chr, missing))


def escaped(text: str, missing: frozenset[str]) -> str:
    """Return text with characters that cannot be drawn written as escapes, never as boxes."""
    return "".join(
        c.encode("unicode_escape", "surrogatepass").decode() if c in missing else c for c in text
    )


@cache
def _glyphs(family: str) -> frozenset[int]:
    """Return the code points a family can draw; nothing for a font that cannot be scaled."""
    from matplotlib import font_manager

    properties = font_manager.FontProperties(family=[family])  # a bare name is a pattern
    try:
        font = font_manager.get_font(
            font_manager.findfont(properties, fallback_to_default=False, rebuild_if_missing=False)
        )
        return frozenset(font.get_charmap()) if font.scalable else frozenset()
    except (OSError, RuntimeError, ValueError):  # removed or damaged since it was listed
        return frozenset()


def _installed() -> Iterator[str]:
    from matplotlib import font_manager

    # matplotlib's own last resort draws a box for any character: that is no glyph
    names = {
        entry.name
        for entry in font_manager.fontManager.ttflist
        if entry.weight in (400, "normal", "regular")
        and entry.style == "normal"
        and not entry.name.startswith("Last Resort")
    }
    preferred = [name for name in _PREFERRED if name in names]
    sans = sorted(name for name in names - set(preferred) if "Sans" in name)
    yield from (*preferred, *sans, *sorted(names.difference(preferred, sans)))
