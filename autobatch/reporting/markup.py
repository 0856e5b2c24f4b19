"""Pieces of HTML: escaped text, tables, bars in cells."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from autobatch.reporting.words import printable


class Markup(str):
    """Text that is HTML already; every other text is escaped when it is put into a page."""


def clean(value: object) -> str:
    """Return a value as HTML: markup as it is, anything else printable and escaped."""
    return value if isinstance(value, Markup) else html.escape(printable(str(value)))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """Return an element with its content; `class_` and `data_x` become class and data-x."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{clean(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(map(clean, content))}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Return parts one after the other."""
    return Markup("\n".join(map(clean, parts)))


def table(
    caption: str,
    heads: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    words: Sequence[int] = (),
    chosen: int | None = None,
) -> Markup:
    """Return a table that scrolls sideways where it is wide.

    The columns `words` hold words, the others numbers. The row `chosen` is marked. The first
    cell of a row is its head.
    """

    def kind(place: int) -> str | None:
        return None if place in words else "n"

    head = joined(tag("th", h, scope="col", class_=kind(i)) for i, h in enumerate(heads))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=kind(0)),
            *(tag("td", cell, class_=kind(i)) for i, cell in enumerate(row[1:], start=1)),
            class_="chosen" if number == chosen else None,
        )
        for number, row in enumerate(rows)
    ]
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", head)),
        tag("tbody", joined(body)),
    )
    return tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=caption)


def shaded(words: str, share: float) -> Markup:
    """Return a number over a bar of its share."""
    bar = tag("i", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%")
    return tag("span", bar, tag("b", words), class_="shaded")


def facts(pairs: Sequence[tuple[str, object]]) -> Markup:
    """Return names with their values."""
    return tag("dl", joined(tag("div", tag("dt", name), tag("dd", v)) for name, v in pairs))
