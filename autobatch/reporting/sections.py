"""The parts of a profile's page."""

from __future__ import annotations

import dataclasses

from autobatch.records import LengthProfile, MaxLengthOption
from autobatch.reporting.charts import advised_option, distribution, trade_off
from autobatch.reporting.markup import Markup, facts, joined, shaded, table, tag
from autobatch.reporting.scales import fine_bins
from autobatch.reporting.words import (
    common_folder,
    counted,
    coverage,
    data_columns,
    data_name,
    percent,
)

# (field of PaddingFraction, its name, how batches are made)
STRATEGIES = (
    ("to_max_length", "Padded to max_length", "every row as long as the longest allowed"),
    ("to_longest", "Padded to the longest of its batch", "batches of 8 rows drawn at random"),
    ("sorted", "Sorted by length, then padded", "batches of 8 neighbours"),
    ("packed", "Packed, no padding", "rows laid end to end, padding removed"),
)


def head(profile: LengthProfile) -> Markup:
    """Return what was measured, its key figures, the advice."""
    word, sentence = coverage(profile)
    length, tokens = profile.length, max(1, profile.num_tokens)
    figures = (
        ("row" if profile.num_samples == 1 else "rows", f"{profile.num_samples:,.0f}"),
        ("tokens", _large(profile.num_tokens)),
        ("of them label tokens", percent(profile.num_label_tokens / tokens)),
        ("median row", f"{length.p50:,}"),
        ("p99", f"{length.p99:,}"),
        ("longest row", f"{length.max:,}"),
    )
    tokenizer = profile.tokenizer.rstrip("/").rpartition("/")[2]
    kept = "" if word == "complete" else f". {sentence}"
    return joined(
        [
            tag("p", "Token lengths", tag("span", word, class_=f"badge {word}"), class_="over"),
            tag("h1", data_name(profile.data)),
            tag("p", f"{data_columns(profile.data)} · tokenizer {tokenizer}{kept}", class_="sub"),
            tag("dl", joined(_figure(*pair) for pair in figures), class_="figures"),
            _advice(profile),
        ]
    )


def _figure(name: str, number: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", number))


def _advice(profile: LengthProfile) -> Markup:
    option = advised_option(profile)
    number = f"{option.max_length:,}" if option else "no advice"
    warned = len(profile.warnings)
    link = tag("a", counted(warned, "warning"), href="#warnings")
    return tag(
        "div",
        tag("p", tag("small", "advised max_length"), number, class_="number"),
        tag("div", tag("p", profile.max_length.reason), tag("p", link) if warned else ""),
        class_="advice",
    )


def lengths(profile: LengthProfile) -> Markup:
    """Return the distribution as a chart and as tables."""
    marks = {f.name: getattr(profile.length, f.name) for f in dataclasses.fields(profile.length)}
    total = max(1, sum(count for _, count in profile.histogram))
    bins = [
        (f"{low:,} to {high:,}", f"{count:,.0f}", percent(count / total))
        for low, high, count in fine_bins(profile.histogram)
    ]
    numbers = [(k, f"{v:,.1f}" if isinstance(v, float) else f"{v:,}") for k, v in marks.items()]
    return _section(
        "lengths",
        "How long the rows are",
        "Rows by their number of tokens, on a logarithmic axis: each bar is the same factor wide."
        + (" Bars in the second colour hold rows that would be cut." if _cuts(profile) else ""),
        tag("div", distribution(profile), class_="plot"),
        tag(
            "details",
            tag("summary", "The same as tables"),
            table("Percentiles of row length", ("", "tokens"), numbers, words=(0,)),
            table("Rows by length", ("tokens", "rows", "share"), bins, words=(0,)),
        ),
    )


def _cuts(profile: LengthProfile) -> bool:
    option = advised_option(profile)
    return option is not None and option.rows_cut > 0


def costs(profile: LengthProfile) -> Markup:
    """Return what each max_length costs, as charts and as a table."""
    curve = profile.max_length.curve
    if not curve:
        return _section("costs", "What each max_length costs", profile.max_length.reason)
    heads = ("max_length", "rows cut", "label tokens lost", "rows without labels")
    chosen = advised_option(profile)
    return _section(
        "costs",
        "What each max_length costs",
        "A short max_length cuts rows and removes what they teach; a long one makes padded "
        "batches wide. Padding is its share of all computed tokens.",
        trade_off(profile),
        table(
            "Cost of each max_length",
            (*heads, "padding to max_length", "padding to longest", "sorted", "packed"),
            [_cost_row(profile, option) for option in curve],
            chosen=curve.index(chosen) if chosen else None,
        ),
    )


def _cost_row(profile: LengthProfile, option: MaxLengthOption) -> list[object]:
    rows, labels = max(1, profile.num_samples), max(1, profile.num_label_tokens)
    padding = option.padding_fraction
    shares = (padding.to_max_length, padding.to_longest, padding.sorted, padding.packed)
    return [
        f"{option.max_length:,}",
        _with_share(option.rows_cut, option.rows_cut / rows),
        _with_share(option.label_tokens_lost, option.label_tokens_lost / labels),
        f"{option.rows_without_labels:,.0f}",
        *(shaded(percent(share), share) for share in shares),
    ]


def _with_share(number: int, share: float) -> Markup:
    if not number:
        return tag("span", "0")
    return joined([f"{number:,.0f}", tag("span", f"({percent(share)})", class_="aside")])


def padding(profile: LengthProfile) -> Markup:
    """Return the padding of each strategy at the advised max_length, as bars with words."""
    option = advised_option(profile)
    if option is None:
        return Markup()
    bars = []
    for field, name, how in STRATEGIES:
        share = getattr(option.padding_fraction, field)
        times = f", {1 / (1 - share):.1f}× the work" if 0.05 <= share < 1 else ""
        words = tag("p", tag("b", name), tag("span", how), class_="name")
        value = tag("p", tag("b", f"{percent(share)} padding"), times, class_="value")
        whole = tag("div", tag("i", style=f"width:{100 * share:.1f}%"), class_="whole")
        bars.append(tag("div", words, whole, value, class_="strategy"))
    return _section(
        "padding",
        f"Padding at max_length {option.max_length:,}",
        "A whole bar is all that the GPU computes; the hatched end of it is padding.",
        tag("div", joined(bars), class_="bars"),
    )


def warnings(profile: LengthProfile) -> Markup:
    """Return the warnings in their three parts, in the profile's order."""
    if not profile.warnings:
        return _section("warnings", "Warnings", "Nothing looked wrong.")
    cards = [
        tag(
            "article",
            tag("h3", _begun(warning.seen)),
            facts(
                [
                    ("Likely cause", _begun(warning.cause)),
                    ("What to do", _begun(warning.next_move)),
                ]
            ),
            class_="warning",
        )
        for warning in profile.warnings
    ]
    return _section("warnings", "Warnings", None, *cards)


def longest(profile: LengthProfile) -> Markup:
    """Return the longest rows with their files and row numbers."""
    if not profile.longest:
        return Markup()
    folder = common_folder(profile.data.files)
    rows = [
        (
            f"{row.length_tokens:,}",
            f"{row.length_tokens / max(1, profile.length.p50):,.1f}×",
            f"{row.row:,}",
            tag("code", row.file.removeprefix(folder)),
        )
        for row in profile.longest
    ]
    return _section(
        "longest",
        "The longest rows",
        "The longest row decides how much memory a run needs. Rows count from 0 in their file"
        + (f", files lie in {folder}." if folder else "."),
        table("The longest rows", ("tokens", "of the median", "row", "file"), rows, words=(3,)),
    )


def skipped(profile: LengthProfile) -> Markup:
    """Return the rows left out, by reason, with the places of the first few."""
    folder = common_folder(profile.data.files)
    rows = []
    for reason, count in profile.skipped.items():
        places = [
            tag("div", tag("code", place.file.removeprefix(folder)), f" row {place.row:,}")
            for place in profile.skipped_rows.get(reason, ())
        ]
        more = count - len(places)
        if more > 0 and places:
            places.append(tag("div", f"and {more:,} more", class_="aside"))
        rows.append(
            (reason, f"{count:,}", percent(count / max(1, profile.num_rows)), *[joined(places)])
        )
    unlabelled = "every rendered row has label tokens"
    if profile.num_rows_without_labels:
        unlabelled = f"rendered rows without a label token: {profile.num_rows_without_labels:,.0f}"
    if not rows:
        return _section("skipped", "Skipped rows", f"No row was skipped; {unlabelled}.")
    return _section(
        "skipped",
        "Skipped rows",
        f"{sum(profile.skipped.values()):,} of {profile.num_rows:,} rows could not be used; "
        f"{unlabelled}.",
        table("Skipped rows by reason", ("reason", "rows", "share", "where"), rows, words=(0, 3)),
    )


def _section(name: str, title: str, lead: object, *parts: object) -> Markup:
    words = tag("p", lead, class_="lead") if lead else ""
    return tag("section", tag("h2", title), words, joined(parts), id=name)


def _begun(sentence: str) -> str:
    """Return a sentence with a capital, unless it begins with a name as it is written in code."""
    first = sentence.split(" ")[0]
    return sentence[:1].upper() + sentence[1:] if first.rstrip(",:;").isalpha() else sentence


def _large(number: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{letter}"
    return f"{number:,.0f}"
