"""A picture of token lengths as a PNG file."""

from __future__ import annotations

import io
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autobatch.records import LengthProfile
from autobatch.reporting.fonts import escaped, families_for
from autobatch.reporting.scales import (
    axis_of,
    even_ticks,
    fine_bins,
    labels_for,
    length_marks,
    stagger,
    token_ticks,
)
from autobatch.reporting.words import (
    cost_of,
    counted,
    coverage,
    data_columns,
    data_name,
    printable,
    shortened,
)

WIDTH, HEIGHT = 1800, 1080  # pixels
_DPI = 150
_MARGIN = 24.0
_LEFT, _RIGHT, _BOTTOM = 120.0, 1740.0, 868.0  # of the plot
_HEAD = 190.0  # where the label of the advised max_length stands
_LABEL_PIXELS = 40.0  # height of a row of labels above the plot
# Blue and vermilion of Okabe and Ito, told apart by all eyes (jfly.uni-koeln.de/color; values as
# other libraries quote them, checked 2026-12-01), with a paler vermilion for rows that are cut
BAR, CUT, ADVICE = "#0072b2", "#e9a06b", "#d55e00"
_CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no line runs through words
_INK, _SOFT, _FAINT = "#1d2430", "#5b6472", "#dfe3e8"


def profile_png(profile: LengthProfile, *, mark: str = "") -> bytes:
    """Return the distribution of lengths on a logarithmic axis; `mark` is kept in the file.

    p50, p95, p99, the longest row and the advised max_length are marked. Names in any script
    are drawn with an installed font, or escaped where no font has their characters.
    """
    with _fonts_untold():
        canvas = _Canvas(_texts(profile))
        _head(canvas)
        _plot(canvas, profile)
        return canvas.png(mark)


@contextmanager
def _fonts_untold() -> Iterator[None]:
    """Keep matplotlib's talk off stderr: a cache folder made, a weight that a font lacks."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _texts(profile: LengthProfile) -> dict[str, str]:
    word, _ = coverage(profile)
    complete = profile.num_samples == profile.num_rows
    rows = counted(profile.num_rows, "row")
    facts = [
        data_columns(profile.data),
        rows if complete else f"{profile.num_samples:,.0f} of {rows} rendered",
        counted(profile.num_tokens, "token"),
        f"tokenizer {shortened(printable(profile.tokenizer.rstrip('/').rpartition('/')[2]), 40)}",
        *([] if word == "complete" else [word]),
    ]
    reason = printable(profile.max_length.reason)
    return {
        "title": f"Tokens a row: {data_name(profile.data)}",
        "facts": shortened("  ·  ".join(facts), 150),
        "reason": "\n".join(textwrap.wrap(reason, 138, max_lines=2, placeholder=" …")),
    }


class _Canvas:
    """A sheet in pixels, (0, 0) at the upper left; nothing global to matplotlib is touched."""

    def __init__(self, texts: dict[str, str]) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._families, missing = families_for(texts.values())
        self.texts = {name: escaped(text, missing) for name, text in texts.items()}
        figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor="white")
        self._canvas = FigureCanvasAgg(figure)
        self._axes = figure.add_axes((0, 0, 1, 1))
        self._axes.set_axis_off()
        self._axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """Write words, smaller where the sheet ends; no dollar sign begins a formula."""
        style = {"fontsize": 11, "color": _INK, "va": "center", **style}
        text = self._axes.text(
            *(x, y, words), family=self._families, parse_math=False, usetex=False, **style
        )
        end = text.get_window_extent(self._canvas.get_renderer()).x1
        if end > WIDTH - _MARGIN:
            text.set_fontsize(float(text.get_fontsize()) * (WIDTH - _MARGIN - x) / (end - x))

    def line(self, x: tuple[float, float], y: tuple[float, float], **style: Any) -> None:
        from matplotlib.lines import Line2D

        self._axes.add_line(Line2D(x, y, **{"color": _FAINT, "linewidth": 1, **style}))

    def bar(self, left: float, right: float, top: float, bottom: float, color: str) -> None:
        from matplotlib.patches import Rectangle

        size = (right - left, bottom - top)
        self._axes.add_patch(
            Rectangle((left, top), *size, facecolor=color, edgecolor="white", linewidth=0.6)
        )

    def png(self, mark: str) -> bytes:
        stream = io.BytesIO()
        self._canvas.print_png(stream, metadata={"Software": "autobatch", "Comment": mark})
        return stream.getvalue()


def _head(canvas: _Canvas) -> None:
    left = 60.0
    canvas.text(left, 62, canvas.texts["title"], fontsize=18, weight="bold")
    canvas.text(left, 116, canvas.texts["facts"], color=_SOFT)
    canvas.text(left, HEIGHT - 52, canvas.texts["reason"], color=_SOFT, linespacing=1.5)


def _plot(canvas: _Canvas, profile: LengthProfile) -> None:
    bins, length = fine_bins(profile.histogram), profile.length
    if not bins:
        canvas.text(_LEFT, HEIGHT / 2, "no rows", color=_SOFT)
        return
    advised = profile.max_length.recommended if profile.max_length.curve else None
    axis = axis_of([bins[0][0], bins[-1][1] + 1, *([advised] if advised else [])])
    most = max(count for *_, count in bins)

    def across(share: float) -> float:
        return _LEFT + share * (_RIGHT - _LEFT)

    marks = {name: across(axis.place(n)) for name, n in length_marks(length).items()}
    # a digit of 10 points at 150 dots an inch is 13 pixels wide, most letters are narrower
    labels = labels_for(marks, letter=12.5, room=8, width=_RIGHT)
    rows = stagger(labels, gap=6)
    top = _HEAD + (2.0 + 0.8 * max(rows)) * _LABEL_PIXELS

    def down(count: float) -> float:
        return _BOTTOM - count / most * (_BOTTOM - top)

    for count in even_ticks(most, most=6):
        if count == round(count):
            canvas.line((_LEFT, _RIGHT), (down(count), down(count)), zorder=0)
            canvas.text(_LEFT - 14, down(count), f"{count:,.0f}", color=_SOFT, ha="right")
    canvas.text(_LEFT - 14, top - 36, "rows", color=_SOFT, ha="right")
    for low, high, count in bins:
        if count:
            left, right = (across(share) for share in axis.bar(low, high))
            is_cut = advised is not None and low > advised
            canvas.bar(left, right, min(down(count), _BOTTOM - 4), _BOTTOM, CUT if is_cut else BAR)
    canvas.line((_LEFT, _RIGHT), (_BOTTOM, _BOTTOM), color=_INK)
    for tick in token_ticks(axis, width=_RIGHT - _LEFT, letter=14):
        x = across(axis.place(tick))
        canvas.line((x, x), (_BOTTOM, _BOTTOM + 8), color=_INK)
        canvas.text(x, _BOTTOM + 32, f"{tick:,}", color=_SOFT, ha="center")
    middle = (_LEFT + _RIGHT) / 2
    canvas.text(middle, _BOTTOM + 76, "tokens a row, logarithmic", color=_SOFT, ha="center")

    for label, row in zip(labels, rows, strict=True):
        y = top - (0.6 + row * 0.8) * _LABEL_PIXELS
        canvas.line((label.at, label.at), (y - 12, _BOTTOM), color=_INK, linewidth=1)
        side, nudge = ("right", -6) if label.is_left else ("left", 6)
        canvas.text(label.at + nudge, y, label.name, ha=side, fontsize=10, bbox=_CLEAR)
    if advised:
        x = across(axis.place(advised))
        canvas.line((x, x), (_HEAD + 18, _BOTTOM), color=ADVICE, linewidth=2.2, linestyle="--")
        side = "right" if x > (_LEFT + _RIGHT) / 2 else "left"
        words = f"advised max_length {advised:,}  {cost_of(profile)}"
        canvas.text(x, _HEAD, words, color=ADVICE, weight="bold", ha=side, fontsize=12)
