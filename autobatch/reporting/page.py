"""A profile as one HTML page that needs no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autobatch.records import LengthProfile
from autobatch.reporting import sections
from autobatch.reporting.markup import Markup, facts, joined, tag
from autobatch.reporting.words import coverage, data_name, in_words
from autobatch.storage import to_plain

_SHOWN = {  # fields that a section of the page shows; any other becomes a line of facts
    *("data", "model", "tokenizer", "template_hash", "complete", "num_rows", "num_samples"),
    *("skipped", "num_rows_without_labels", "num_tokens", "num_label_tokens", "length"),
    *("histogram", "max_length", "warnings", "longest", "skipped_rows", "schema_version"),
}
_SHOWN_OF_ADVICE = {"recommended", "reason", "curve"}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a page came to be."""

    command: str | None
    date: str  # ISO, with the offset from UTC
    versions: Mapping[str, str | None]


def profile_page(profile: LengthProfile, *, origin: Origin, mark: str = "") -> str:
    """Return a profile as an HTML page: charts, the same as tables, warnings, facts.

    Everything is inside: nothing is loaded, and the page reads without its script. Text from
    data is escaped. `mark` is kept in the head.
    """
    here = Path(__file__)
    style = here.with_name("page.css").read_text(encoding="utf-8")
    script = here.with_name("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # should a name from the data ever slip through, it can neither run nor load anything
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = tag("title", f"{data_name(profile.data)}: token lengths")
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        _meta("Content-Security-Policy", policy, key="http-equiv"),
        _meta("viewport", "width=device-width, initial-scale=1"),
        _meta("autobatch", mark),
        title,
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        tag("main", joined(_parts(profile, origin))),
        f"<script>{script}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _parts(profile: LengthProfile, origin: Origin) -> list[Markup]:
    return [
        tag("header", sections.head(profile)),
        sections.lengths(profile),
        sections.costs(profile),
        sections.padding(profile),
        sections.warnings(profile),
        sections.longest(profile),
        sections.skipped(profile),
        _made(profile, origin),
    ]


def _made(profile: LengthProfile, origin: Origin) -> Markup:
    files = profile.data.files
    listed = [tag("div", tag("code", file)) for file in files[:50]]
    if len(files) > 50:
        listed.append(tag("div", f"and {len(files) - 50:,} more"))
    keys = ", ".join(f"{key} = {name}" for key, name in profile.data.keys.items())
    pairs: list[tuple[str, object]] = [
        ("Data", joined(listed)),
        ("Format", f"{profile.data.format}{f' ({keys})' if keys else ''}"),
        ("Rows", f"{profile.num_rows:,.0f} read, {profile.num_samples:,.0f} rendered"),
        ("Coverage", coverage(profile)[1]),
        ("Revision", profile.data.revision),
        ("Fingerprint", tag("code", profile.data.fingerprint)),
        ("Model", profile.model),
        ("Tokenizer", tag("code", profile.tokenizer)),
        ("Chat template", tag("code", profile.template_hash or "none")),
        *_unknown(to_plain(profile), _SHOWN),
        *_unknown(to_plain(profile.max_length), _SHOWN_OF_ADVICE),
        ("Command", tag("code", origin.command) if origin.command else None),
        ("Versions", ", ".join(f"{k} {v}" for k, v in origin.versions.items() if v)),
        ("Drawn", origin.date),
    ]
    lines = facts([pair for pair in pairs if pair[1] not in (None, "")])
    return tag("section", tag("h2", "How this was measured"), lines, id="made", class_="made")


def _unknown(record: Mapping[str, Any], shown: set[str]) -> list[tuple[str, object]]:
    """Return the facts of a record that this page has no section for, in words."""
    return [
        (name.replace("_", " ").capitalize(), in_words(value))
        for name, value in record.items()
        if name not in shown and value not in (None, "", [], {})
    ]


def _meta(name: str, content: str, *, key: str = "name") -> Markup:
    return Markup(tag("meta", **{key: name, "content": content}).removesuffix("</meta>"))
