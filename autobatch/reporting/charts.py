"""Charts of a profile as inline SVG: places in percent, text in pixels, so that any width fits."""

from __future__ import annotations

from collections.abc import Sequence

from autobatch.records import LengthProfile, MaxLengthOption
from autobatch.reporting.markup import Markup, joined, tag
from autobatch.reporting.scales import (
    Bin,
    LogAxis,
    axis_of,
    even_ticks,
    fine_bins,
    labels_for,
    length_marks,
    stagger,
    token_ticks,
)
from autobatch.reporting.words import cost_of, counted, percent

_WIDE, _NARROW = 920.0, 330.0  # pixels that labels are placed for; CSS shows one of the two
_LETTER = 7.3  # pixels, no digit of 12 px is wider
_PLOT = 240.0  # height of the distribution
_PANEL = 130.0  # height of a chart of the trade-off
_ROW = 18.0  # height of a row of labels


def advised_option(profile: LengthProfile) -> MaxLengthOption | None:
    """Return the candidate that is recommended, None where no advice was given."""
    chosen = profile.max_length.recommended
    return next((o for o in profile.max_length.curve if o.max_length == chosen), None)


def distribution(profile: LengthProfile) -> Markup:
    """Return the histogram with p50, p95, p99, the longest row and the advised max_length."""
    bins, length = fine_bins(profile.histogram), profile.length
    if not bins:
        return tag("p", "There are no rows to draw.")
    option = advised_option(profile)
    advised = option.max_length if option else None
    axis = axis_of([bins[0][0], bins[-1][1] + 1, *([advised] if advised else [])])
    marks = length_marks(length)
    labels = [
        _labels(axis, marks, width=width, class_=class_)
        for width, class_ in ((_WIDE, "wide"), (_NARROW, "narrow"))
    ]
    num_rows = max(rows for _, rows in labels)
    top = _ROW * (num_rows + (1.6 if advised else 0.4))
    parts = [
        *_counts(max(count for *_, count in bins), top),
        *_bars(bins, axis, top, advised),
        *_token_axis(axis, top + _PLOT, width=_WIDE - 60),
    ]
    parts += [_upright(axis.place(n), top, top + _PLOT, "mark") for n in marks.values()]
    if advised:
        place = axis.place(advised)
        parts.append(_upright(place, 14, top + _PLOT, "advised"))
        anchor, nudge = ("end", -6) if place > 0.5 else ("start", 6)
        words = (
            *("advised ", tag("tspan", "max_length ", class_="wide"), f"{advised:,}"),
            tag("tspan", f", {cost_of(profile)}", class_="wide"),
        )
        parts.append(_text(place, 12, *words, class_="advised", anchor=anchor, dx=nudge))
    # last, so that no line runs through a label
    parts += [tag("g", drawn, transform=f"translate(0 {top:.0f})") for drawn, _ in labels]
    return _svg(
        top + _PLOT + 26,
        "Distribution of row lengths",
        f"Half of the rows have at most {length.p50:,} tokens, 95% at most {length.p95:,}, "
        f"99% at most {length.p99:,}; the longest has {length.max:,}.",
        parts,
    )


def _counts(most: int, top: float) -> list[Markup]:
    parts = []
    for count in even_ticks(most, most=6):
        if count == round(count):
            y = top + _PLOT * (1 - count / most)
            parts.append(tag("line", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
            parts.append(_text(0, y + 4, f"{count:,.0f}", anchor="end", dx=-8))
    return parts


def _bars(bins: Sequence[Bin], axis: LogAxis, top: float, advised: int | None) -> list[Markup]:
    total, most = sum(count for *_, count in bins), max(count for *_, count in bins)
    parts = []
    for low, high, count in bins:
        if count:
            left, right = axis.bar(low, high)
            height = max(2.0, _PLOT * count / most)
            says = f"{_span(low, high)} tokens: {counted(count, 'row')}, {percent(count / total)}"
            class_ = "bar cut" if advised and low > advised else "bar"
            parts.append(_block(left, right, top + _PLOT - height, height, class_))
            parts.append(_block(left, right, top, _PLOT, "hit", says))
    return parts


def _labels(
    axis: LogAxis, marks: dict[str, int], *, width: float, class_: str
) -> tuple[Markup, int]:
    """Return labels above the plot, none touching another at this width, and their rows."""
    places = {name: axis.place(tokens) * width for name, tokens in marks.items()}
    labels = labels_for(places, letter=_LETTER, room=6, width=width)
    rows = stagger(labels, gap=4)
    parts = []
    for label, row in zip(labels, rows, strict=True):
        y = -8 - row * _ROW
        parts.append(_upright(label.at / width, y - 8, 0, "mark"))
        anchor, nudge = ("end", -5) if label.is_left else ("start", 5)
        parts.append(_text(label.at / width, y, label.name, anchor=anchor, dx=nudge, class_="name"))
    return tag("g", *parts, class_=class_), max(rows) + 1


def trade_off(profile: LengthProfile) -> Markup:
    """Return what each max_length costs, in three charts over one axis of max_length."""
    curve = profile.max_length.curve
    rows, labels = max(1, profile.num_samples), max(1, profile.num_label_tokens)
    padding = [option.padding_fraction for option in curve]
    charts = (
        ("Rows cut", {"rows": [o.rows_cut / rows for o in curve]}),
        ("Label tokens lost", {"label tokens": [o.label_tokens_lost / labels for o in curve]}),
        (
            "Padding in computed tokens",
            {
                "to max_length": [p.to_max_length for p in padding],
                "to longest": [p.to_longest for p in padding],
                "sorted": [p.sorted for p in padding],
            },
        ),
    )
    drawn = [_panel(profile, name, lines) for name, lines in charts]
    return tag("div", joined(drawn), class_="panels")


def _panel(profile: LengthProfile, name: str, lines: dict[str, list[float]]) -> Markup:
    """Return one chart: lines of shares over max_length."""
    curve = profile.max_length.curve
    axis = axis_of([option.max_length for option in curve])
    most = max(0.01, *(max(shares) for shares in lines.values()))
    places = [axis.place(option.max_length) for option in curve]
    top = 8.0
    parts = []
    for share in even_ticks(most, most=5):
        y = top + _PANEL * (1 - share / most)
        parts.append(tag("line", x1=0, x2="100%", y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(_text(0, y + 4, f"{100 * share:g}%", anchor="end", dx=-6))
    parts += _token_axis(axis, top + _PANEL, width=_WIDE / 3 - 60)
    if advised := advised_option(profile):
        place = axis.place(advised.max_length)
        parts.append(_upright(place, 0, top + _PANEL, "advised"))
    for number, shares in enumerate(lines.values()):
        drawn = " ".join(
            f"{100 * x:.2f},{100 * (1 - share / most):.2f}"
            for x, share in zip(places, shares, strict=True)
        )
        line = tag("polyline", points=drawn, class_=f"line l{number}")
        box = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none", "width": "100%"}
        parts.append(tag("svg", line, **box, height=f"{_PANEL:.0f}", y=top, overflow="visible"))
        for x, share in zip(places, shares, strict=True):
            y = top + _PANEL * (1 - share / most)
            parts.append(
                tag("circle", cx=f"{100 * x:.2f}%", cy=f"{y:.1f}", r=3.5, class_=f"dot l{number}")
            )
    for i, option in enumerate(curve):  # stripes that meet half-way, each with its values
        left = 0.0 if i == 0 else (places[i - 1] + places[i]) / 2
        right = 1.0 if i == len(curve) - 1 else (places[i] + places[i + 1]) / 2
        values = ", ".join(f"{percent(shares[i])} {line}" for line, shares in lines.items())
        says = f"max_length {option.max_length:,}: {values}"
        parts.append(_block(left, right, top, _PANEL, "hit", says))
    keys = [tag("span", line, class_=f"key l{i}") for i, line in enumerate(lines)]
    legend = tag("p", joined(keys), class_="legend") if len(lines) > 1 else Markup()
    chart = _svg(top + _PANEL + 26, name, "The table below has the numbers.", parts)
    return tag("div", tag("h3", name), tag("div", chart, class_="plot"), legend)


# ---- pieces ----------------------------------------------------------------


def _svg(height: float, title: str, words: str, parts: Sequence[Markup]) -> Markup:
    return tag(
        "svg",
        *(tag("title", title), tag("desc", words), joined(parts)),
        role="img",
        aria_label=f"{title}. {words}",
        width="100%",
        height=f"{height:.0f}",
    )


def _token_axis(axis: LogAxis, y: float, *, width: float) -> list[Markup]:
    parts = [tag("line", x1=0, x2="100%", y1=y, y2=y, class_="base")]
    ticks = token_ticks(axis, width=width, letter=_LETTER)
    few = ticks[:: -(-len(ticks) // 5)]
    for tick in ticks:
        place, class_ = axis.place(tick), None if tick in few else "wide"
        drawn = (_upright(place, y, y + 5, "base"), _text(place, y + 20, f"{tick:,}"))
        parts.append(tag("g", *drawn, class_=class_))
    return parts


def _upright(place: float, y1: float, y2: float, class_: str) -> Markup:
    x = f"{100 * place:.2f}%"
    return tag("line", x1=x, x2=x, y1=f"{y1:.1f}", y2=f"{y2:.1f}", class_=class_)


def _block(
    left: float, right: float, y: float, height: float, class_: str, says: str | None = None
) -> Markup:
    x, width = f"{100 * left:.2f}%", f"{100 * (right - left):.2f}%"
    inside = [tag("title", says)] if says else []
    return tag(
        "rect", *inside, x=x, width=width, y=f"{y:.1f}", height=f"{height:.1f}", class_=class_
    )


def _text(
    place: float,
    y: float,
    *words: object,
    anchor: str = "middle",
    dx: int = 0,
    class_: str | None = None,
) -> Markup:
    x = f"{100 * place:.2f}%"
    return tag("text", *words, x=x, y=f"{y:.1f}", dx=dx, text_anchor=anchor, class_=class_)


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
