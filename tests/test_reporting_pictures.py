"""What a profile looks like: the terminal's bars, profile.png, profile.html."""

from __future__ import annotations

import itertools
import json
import re
import struct
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tiny import train_tokenizer, write_jsonl

from autobatch.cli import main
from autobatch.dataset.lengths.advice import advise
from autobatch.dataset.lengths.stats import length_histogram, length_stats
from autobatch.records import DataSource, LengthProfile, LongRow, ProfileWarning, RowPlace
from autobatch.reporting import LengthHistogram, Origin, as_text, profile_table
from autobatch.reporting.fonts import escaped, families_for
from autobatch.reporting.page import profile_page
from autobatch.reporting.png import HEIGHT, WIDTH, profile_png
from autobatch.reporting.scales import (
    Label,
    axis_of,
    even_ticks,
    fine_bins,
    labels_for,
    length_marks,
    stagger,
    token_ticks,
)
from autobatch.reporting.words import common_folder, data_name, percent, printable, shortened

HOSTILE = '/数据/<script>alert(1)<\\script> "a" & $b_c$\n\x1b[31m\udcff\u202e.parquet'
VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}
ORIGIN = Origin(
    command="autobatch profile 'x<y.parquet'", date="2026-12-01", versions={"autobatch": "0.1.0"}
)


def profile(lengths: Any, *, file: str = "/data/chat/train.parquet", **changes: Any):
    """Return the profile of these lengths, half of each row's tokens labels."""
    tokens = np.asarray(lengths, dtype=np.int64)
    labels = tokens // 2
    advice = advise(
        tokens,
        label_tokens=labels,
        kept_labels=lambda i, most: np.maximum(labels[i] - (tokens[i] - most), 0),
    )
    order = np.argsort(-tokens, kind="stable")[:20]
    values = {
        "data": DataSource(files=(file,), format="messages", keys={}, fingerprint="f1"),
        "model": None,
        "tokenizer": "/models/qwen3",
        "template_hash": "abc",
        "cache_dir": None,
        "complete": True,
        "num_rows": len(tokens),
        "num_samples": len(tokens),
        "skipped": {},
        "num_rows_without_labels": 0,
        "num_tokens": int(tokens.sum()),
        "num_label_tokens": int(labels.sum()),
        "length": length_stats(tokens),
        "histogram": length_histogram(tokens),
        "max_length": advice,
        "longest": tuple(
            LongRow(file=file, row=int(i), length_tokens=int(tokens[i])) for i in order
        ),
    }
    return LengthProfile(**{**values, **changes})


def heavy_tail() -> np.ndarray:
    return np.random.default_rng(0).lognormal(6, 1.3, 2000).astype(int) + 4


SHAPES = {
    "one row": [5],
    "an empty row": [0, 0, 9],
    "all equal": [1000] * 50,
    "an outlier": [50] * 999 + [200_000],
    "a heavy tail": heavy_tail(),
    "two modes": [100] * 500 + [4000] * 500,
    "within 5 %": list(range(950, 1050)),
    "tiny": [1, 2, 2, 3, 5, 8],
}


class Page(HTMLParser):
    """A page's elements, checked to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert [] == self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(record: LengthProfile) -> Page:
    return Page(profile_page(record, origin=ORIGIN))


# ---- arithmetic ------------------------------------------------------------


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_fine_bins_hold_every_length_once(lengths: Any) -> None:
    """Bins touch, hold all counts, are few enough to be seen."""
    pairs = length_histogram(np.asarray(lengths))
    bins = fine_bins(pairs)
    assert len(lengths) == sum(count for *_, count in bins)
    assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(bins))
    assert bins[0][0] <= pairs[0][0] <= pairs[-1][0] <= bins[-1][1]
    assert len(bins) <= 64


def test_short_lengths_are_bins_of_their_own() -> None:
    """Bins of 1 and 2 lengths side by side would draw a comb that is not in the data."""
    assert [(1, 1, 1), (2, 2, 2), (3, 3, 0), (4, 4, 1)] == fine_bins(((1, 1), (2, 2), (4, 1)))


def test_places_grow_with_the_logarithm() -> None:
    """A factor is the same distance everywhere; nothing is drawn outside."""
    axis = axis_of([16, 4096])
    first, second, third = (axis.place(n) for n in (16, 256, 4096))
    assert second - first == pytest.approx(third - second)
    assert (0.0, 1.0) == (axis.place(0), axis.place(10**9))


def test_ticks_are_round_and_few() -> None:
    """Powers of two, halves between where there are few, even steps on a short axis."""
    wide = {"width": 800.0, "letter": 7.0}
    assert [128, 192, 256, 384, 512] == token_ticks(axis_of([120, 520]), **wide)
    assert [8, 64, 512, 4096, 32768] == token_ticks(axis_of([8, 32768]), width=400, letter=9)
    assert [950, 1000, 1050, 1100] == token_ticks(axis_of([1000]), width=800, letter=14)
    assert [0, 200, 400] == even_ticks(590, most=5)


def test_labels_touch_neither_each_other_nor_another_line() -> None:
    """A label lies above every line that it spans; one at the right end stands left."""
    labels = labels_for({"a": 10, "bb": 30, "ccc": 90, "dddd": 95}, letter=10, room=4, width=100)
    rows = stagger(labels, gap=2)
    assert [False, False, True, True] == [label.is_left for label in labels]
    for (one, row), (other, other_row) in itertools.permutations(zip(labels, rows, strict=True), 2):
        assert row != other_row or one.right <= other.left or other.right <= one.left
        assert row > other_row or not one.left < other.at < one.right
    apart = [Label(name="x", at=at, left=at, right=at + 5) for at in (0, 10, 20)]
    assert [0, 0, 0] == stagger(apart, gap=1)


def test_equal_marks_share_a_label() -> None:
    """p95, p99 and the longest row are often one length."""
    assert {"p50, p95, p99, max 1,000": 1000} == length_marks(length_stats(np.array([1000] * 3)))


# ---- words -----------------------------------------------------------------


def test_text_from_data_moves_no_cursor() -> None:
    """Line breaks, escape sequences, half characters, reversed writing are written as escapes."""
    assert r"a\n\x1b[31m\udcff\u202eb" == printable("a\n\x1b[31m\udcff\u202eb")
    assert "问答 👩‍💻" == printable("问答 👩‍💻")


@pytest.mark.parametrize(
    ("files", "folder", "name"),
    [
        (("/a/b/x.parquet",), "/a/b/", "b/x.parquet"),
        (("x.parquet",), "", "x.parquet"),
        (("/a/b1/x", "/a/b2/y"), "/a/", "a (2 files)"),
        (("/a/x", "/b/y"), "/", "(2 files)"),
        (("a/x", "b/y"), "", "(2 files)"),
    ],
)
def test_data_has_a_short_name(files: tuple[str, ...], folder: str, name: str) -> None:
    """The file in its folder, or the folder of several."""
    data = DataSource(files=files, format="text", keys={}, fingerprint="f")
    assert (folder, name) == (common_folder(files), data_name(data))


def test_long_names_keep_both_ends() -> None:
    """The middle is left out."""
    assert "aaa…bbbbb" == shortened("a" * 50 + "b" * 50, 9)


def test_what_is_not_nothing_is_not_shown_as_nothing() -> None:
    """One row among a million is cut, and is seen to be."""
    assert ["0.0%", "<0.1%", "0.1%"] == [percent(0), percent(1e-6), percent(0.0009)]


# ---- terminal --------------------------------------------------------------


@pytest.mark.parametrize("columns", [8, 14, 20, 33, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bars_fit_any_terminal(columns: int, encoding: str) -> None:
    """No line is cut or wrapped; the longest bar is drawn."""
    pairs = length_histogram(heavy_tail())
    marks = {"p50": 400, "max": pairs[-1][0]}
    text = as_text(LengthHistogram(pairs=pairs, marks=marks), columns=columns, encoding=encoding)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(("█" if encoding == "utf-8" else "#") in line for line in lines)
    assert len(lines) == sum(1 for line in lines if line.strip())


def test_ten_million_rows_fit_a_pipe() -> None:
    """Counts, shares and marks stand beside the bars."""
    pairs = ((100, 9_999_999), (70_000, 1))
    lines = as_text(LengthHistogram(pairs=pairs, marks={"p50": 100, "max": 70_000})).splitlines()
    assert max(map(len, lines)) <= 80
    assert ["9,999,999", "100.0%", "p50"] == lines[0].split()[-3:]
    assert ["1", "0.0%", "max"] == lines[-1].split()[-3:]


def test_a_single_length_is_one_bar() -> None:
    """Its bin is named by the length itself."""
    (line,) = as_text(LengthHistogram(pairs=((1000, 7),))).splitlines()
    assert ["1000", "7", "100.0%"] == [line.split()[0], *line.split()[-2:]]
    assert "no rows\n" == as_text(LengthHistogram(pairs=()))


def test_a_terminal_is_not_taken_over_by_a_file_name() -> None:
    """An escape sequence in a name is printed as text."""
    text = as_text(profile_table(profile([5, 9], file=HOSTILE)))
    assert "\x1b" not in text
    assert r"\x1b[31m" in text


# ---- PNG -------------------------------------------------------------------


def size_of(png: bytes) -> tuple[int, ...]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_every_shape_is_drawn(lengths: Any) -> None:
    """One size, no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (WIDTH, HEIGHT) == size_of(profile_png(profile(lengths)))


def test_chinese_is_drawn_with_a_font_that_has_it() -> None:
    """No box stands for a character of a file or column name."""
    families, missing = families_for(["问答数据"])
    if missing:
        pytest.skip("no font with Chinese is installed")
    assert 2 == len(families)
    named = DataSource(
        files=("/数据/问答.parquet",),
        format="prompt_response",
        keys={"prompt_key": "问题"},
        fingerprint="f",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of each glyph that is missing
        profile_png(replace(profile([5, 9]), data=named))


def test_a_character_without_a_font_is_escaped() -> None:
    """U+10FFFF has a glyph in no font."""
    _, missing = families_for(["a\U0010ffff"])
    assert r"a\U0010ffff" == escaped("a\U0010ffff", missing)


def test_a_dollar_sign_begins_no_formula() -> None:
    """A name that is no TeX is drawn all the same, and nothing global is changed."""
    import matplotlib

    before = matplotlib.rcParams.copy()
    profile_png(profile([5, 9], file=r"/d/$\frac{$x^^_$.parquet"))
    assert before == matplotlib.rcParams.copy()
    assert "matplotlib.pyplot" not in sys.modules


# ---- page ------------------------------------------------------------------


@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_every_shape_has_a_well_formed_page(lengths: Any) -> None:
    """Every element is closed in its order; no number is nan or infinite."""
    text = profile_page(profile(lengths), origin=ORIGIN)
    Page(text)
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_a_page_loads_nothing() -> None:
    """No address stands in an attribute or in the style; the policy refuses what is not inside."""
    text = profile_page(profile(heavy_tail()), origin=ORIGIN)
    attributes = [
        (key, value or "") for _, attrs in Page(text).tags for key, value in attrs.items()
    ]
    assert [] == [value for _, value in attributes if "//" in value]
    assert {"#warnings"} >= {value for key, value in attributes if key in ("href", "src")}
    assert not re.search(r"url\(|@import|https?:", text)
    assert any(value.startswith("default-src 'none'") for _, value in attributes)


def test_a_page_holds_the_numbers_of_the_record() -> None:
    """Percentiles, the cost of each max_length, the longest rows, skipped rows with places."""
    record = profile(
        heavy_tail(),
        num_rows=2012,
        skipped={"template refuses the row": 12},
        skipped_rows={"template refuses the row": (RowPlace(file="/data/chat/b.parquet", row=41),)},
        warnings=(ProfileWarning(id="w", seen="a is 3", cause="b < c", next_move="set d=4"),),
    )
    text = page_of(record).text
    for number in (record.length.p50, record.length.p99, record.length.max, record.num_samples):
        assert f"{number:,}" in text
    for option in record.max_length.curve:
        row = (
            f"{option.max_length:,} {option.rows_cut:,}",
            f"{option.label_tokens_lost:,}",
            percent(option.padding_fraction.to_longest),
        )
        assert [] == [part for part in row if part not in text]
    for row in record.longest:
        assert f"{row.length_tokens:,}" in text
        assert f"{row.row:,} train.parquet" in text
    for part in ("12 of 2,012 rows", "b.parquet row 41", "and 11 more", record.max_length.reason):
        assert part in text
    for part in ("A is 3", "Likely cause B < c", "What to do Set d=4", "1 warning", "complete"):
        assert part in text
    for part in ("autobatch profile 'x<y.parquet'", "2026-12-01", "autobatch 0.1.0", "abc", "f1"):
        assert part in text


def test_a_page_can_be_heard() -> None:
    """Each chart is an image with a title and a description, and its numbers are tables."""
    tags = page_of(profile(heavy_tail())).tags
    charts = [attrs for tag, attrs in tags if tag == "svg" and "aria-label" in attrs]
    assert ["img"] * 4 == [attrs["role"] for attrs in charts]
    names = [tag for tag, _ in tags]
    assert 4 == names.count("table") == names.count("caption")
    assert ("html", {"lang": "en"}) == tags[0]


def test_text_from_data_is_never_markup() -> None:
    """Names, reasons and warnings are shown as they are, whatever they hold."""
    record = profile(
        [5, 9],
        file=HOSTILE,
        skipped={"<img src=x>": 1},
        skipped_rows={"<img src=x>": (RowPlace(file=HOSTILE, row=0),)},
        warnings=(ProfileWarning(id="w", seen="</h3><b>", cause='"', next_move="'"),),
    )
    text = profile_page(record, origin=replace(ORIGIN, command=HOSTILE))
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert (1, 0) == (names.count("script"), names.count("img"))
    assert printable(HOSTILE) in page.text
    text.encode("utf-8")  # no half character is left
    assert "\x1b" not in text


def test_a_part_of_the_data_is_called_a_part() -> None:
    """A partial profile says so at once; the number of rows is that of the rows read."""
    text = page_of(profile([5, 9], complete=False, num_rows=1234)).text
    assert "partial" in text
    assert "the numbers are of 1,234 rows only" in text


def test_facts_of_later_versions_are_shown() -> None:
    """A field that the page does not know becomes a line, in words."""

    @dataclass(frozen=True, kw_only=True)
    class Later(LengthProfile):
        found_later: dict[str, Any] | None = None

    record = Later(
        **vars(profile([5, 9])),
        found_later={"num_rows_differ": 3, "error": 0.015, "rows": [{"file": "<a>", "row": 7}]},
    )
    text = page_of(record).text
    for part in ("Found later", "num rows differ 3, error 0.015", "file <a>, row 7"):
        assert part in text


def test_a_profile_without_advice_has_a_page() -> None:
    """No max_length is advised for data that text lengths do not describe."""
    record = profile([5, 9])
    advice = replace(record.max_length, curve=(), reason="Images are not counted.")
    record = replace(record, max_length=advice)
    text = page_of(record).text
    assert "no advice" in text
    assert "Images are not counted." in text
    assert (WIDTH, HEIGHT) == size_of(profile_png(record))


# ---- command ---------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    rows = [{"question": "What is two?" * n, "answer": "Four. 四。" * n} for n in range(1, 9)]
    return write_jsonl(folder / "问答.jsonl", rows), str(train_tokenizer(folder / "tok"))


@pytest.fixture
def out(inputs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "out"


def call(inputs: tuple[str, str], out: Path, *more: str) -> Any:
    data, tokenizer = inputs
    words = ["profile", data, "--tokenizer", tokenizer, "--out", str(out), *more]
    result = CliRunner().invoke(main, words)
    assert 0 == result.exit_code, result.stderr
    return result


def test_profile_draws_a_picture_and_a_page(inputs: tuple[str, str], out: Path) -> None:
    """Both lie beside the record; a second run of the same record leaves them as they are."""
    record = json.loads(call(inputs, out, "--json").stdout)
    page = Page((out / "profile.html").read_text(encoding="utf-8")).text
    assert (WIDTH, HEIGHT) == size_of((out / "profile.png").read_bytes())
    assert f"advised max_length {record['max_length']['recommended']:,}" in page
    assert "问答.jsonl" in page
    drawn = [(out / name).stat().st_mtime_ns for name in ("profile.png", "profile.html")]
    call(inputs, out)
    assert drawn == [(out / n).stat().st_mtime_ns for n in ("profile.png", "profile.html")]


def test_no_picture_shows_an_earlier_record(inputs: tuple[str, str], out: Path) -> None:
    """--no-pictures draws none, and takes those of an earlier run away."""
    call(inputs, out)
    call(inputs, out, "--no-pictures", "--json")
    assert [".gitignore", "profile.json"] == sorted(path.name for path in out.iterdir())


def test_a_picture_that_cannot_be_drawn_is_a_warning(inputs: tuple[str, str], out: Path) -> None:
    """The profile is printed and written, the page is drawn, stderr says what is missing."""
    (out / "profile.png").mkdir(parents=True)
    result = call(inputs, out, "--json")
    assert json.loads(result.stdout) == json.loads((out / "profile.json").read_text())
    assert "profile.png could not be drawn" in result.stderr
    assert "Traceback" not in result.stderr
    assert (out / "profile.html").is_file()


def test_the_command_line_brings_no_matplotlib() -> None:
    """Fonts and canvas are loaded when something is drawn."""
    code = "import autobatch.cli, autobatch.api, sys; print('matplotlib' in sys.modules)"
    root = Path(__file__).parent.parent
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ("False\n", "") == (answer.stdout, answer.stderr)
