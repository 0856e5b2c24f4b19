"""Tables, pictures, progress: readable in a terminal, in a pipe, in ASCII."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autobatch.config import load_config, resolve, save_config
from autobatch.errors import AutobatchError
from autobatch.records import (
    Candidate,
    DataSource,
    LengthProfile,
    LengthStats,
    Load,
    MaxLengthAdvice,
    MaxLengthOption,
    PaddingFraction,
    ProfileWarning,
    Toggles,
    Trial,
    TurnByTurn,
)
from autobatch.reporting import (
    MetricsTail,
    ProfileProgress,
    RunProgress,
    as_text,
    profile_table,
    read_metrics,
    read_tuned,
    run_table,
    show,
    trial_line,
    trials_table,
    tuned_summary,
)
from autobatch.reporting.pictures import log_bins
from autobatch.storage import (
    append_jsonl,
    from_plain,
    read_jsonl,
    read_record,
    to_plain,
    write_json,
)

GIB = 2**30


def profile(histogram=((20, 5), (64, 90), (700, 1))) -> LengthProfile:
    padding = PaddingFraction(to_max_length=0.914, to_longest=0.5, sorted=0.25, packed=0.0)
    option = MaxLengthOption(
        max_length=704,
        rows_cut=0,
        label_tokens_lost=0,
        rows_without_labels=0,
        padding_fraction=padding,
    )
    return LengthProfile(
        data=DataSource(files=("问答[a].parquet",), format="messages", keys={}, fingerprint="f"),
        model=None,
        tokenizer="tok",
        template_hash=None,
        cache_dir=None,
        complete=True,
        num_rows=98,
        num_samples=96,
        skipped={"template refuses the row": 2},
        num_rows_without_labels=1,
        num_tokens=6560,
        num_label_tokens=3000,
        length=LengthStats(mean=68.3, min=20, p50=64, p90=64, p95=64, p99=64, max=700),
        histogram=tuple(histogram),
        max_length=MaxLengthAdvice(recommended=704, reason="Nothing is cut.", curve=(option,)),
        warnings=(
            ProfileWarning(id="w", seen="seen part", cause="cause part", next_move="do part"),
        ),
    )


def trial(trial_id="t001", **changes) -> Trial:
    values = {
        "candidate": Candidate(toggles=Toggles(), max_token_len_per_gpu=131072),
        "load": Load(micro_batches=((700, 1000), (700, 1000))),
        "data_parallel_size": 2,
        "measured": True,
        "stand_in_for": None,
        "simulated_ranks": None,
        "outcome": "ok",
        "message": None,
        "memory_limit_bytes": 4 * GIB,
        "peak_allocated_bytes": GIB,
        "peak_reserved_bytes": GIB,
        "non_torch_bytes": 0,
        "phase_peaks": {"forward": GIB},
        "step_secs": (0.5, 0.5),
        "num_alloc_retries": 0,
        "seconds": 1.0,
    }
    return Trial(trial_id=trial_id, **{**values, **changes})


def row(step: int, **changes) -> dict:
    values = {
        "step": step,
        "epoch": 0,
        "loss": 10.0 / step,
        "step_secs": 2.0,
        "data_wait_secs": 0.5,
        "tokens_per_sec": 1000.0 * step,
        "peak_reserved_bytes": GIB,
        "num_alloc_retries": 0,
    }
    return {**values, **changes}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- profile ---------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs",
    [
        ((1, 3),),
        ((0, 1), (5, 2)),
        ((7, 1), (8, 1)),
        ((20, 5), (64, 90), (700, 1)),
        ((1, 1), (200_000, 1)),
    ],
)
def test_bins_hold_every_length_once(pairs):
    """Bins touch, hold all counts, reach from the first to the last length, are at most 16."""
    bins = log_bins(pairs)
    assert sum(count for _, count in pairs) == sum(count for *_, count in bins)
    assert all(left[1] + 1 == right[0] for left, right in itertools.pairwise(bins))
    assert bins[0][0] <= pairs[0][0] <= pairs[-1][0] <= bins[-1][1]
    assert len(bins) <= 17


def test_a_profile_fits_a_pipe():
    """No line of a profile is wider than 80 columns."""
    assert max(len(line) for line in as_text(profile_table(profile())).splitlines()) <= 80


def test_a_profile_says_what_was_found():
    """Percentiles, skipped rows by reason, the advice, all three parts of a warning are there."""
    text = as_text(profile_table(profile()))
    for part in ("p99 64", "2 template refuses", "max_length 704", "Nothing is cut.", "91.4"):
        assert part in text
    assert ["seen part", "cause part", "do part"] == [
        p for p in ("seen part", "cause part", "do part") if p in text
    ]


def test_a_profile_without_advice_says_so():
    """Media beside the text: what is not counted, no number, the turns that were compared."""
    turns = TurnByTurn(
        num_rows_compared=64,
        num_rows=3200,
        num_rows_differ=5,
        num_rows_refused=2,
        tokens_more=-20,
    )
    known = profile()
    advice = replace(known.max_length, recommended=None, reason="None is advised.")
    shown = replace(known, max_length=advice, media=("images",), turn_by_turn=turns)
    text = " ".join(as_text(profile_table(shown)).split())
    for part in (
        "not counted images",
        "5 rows differ from the whole rendering, 2 are refused; 64 of 3,200 compared",
        "> no max_length None is advised.",
    ):
        assert part in text
    assert shown == from_plain(LengthProfile, to_plain(shown), where="p.json")


def test_an_ascii_pipe_gets_ascii():
    """Bars become #; a name that ASCII lacks is escaped, never a crash."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(profile_table(profile()), stream)
    stream.seek(0)
    text = stream.read()
    assert "####" in text
    assert "\\u95ee" in text


def test_brackets_in_a_name_are_printed_as_they_are():
    """User text is no markup."""
    assert "问答[a].parquet" in as_text(profile_table(profile()))


def test_a_rare_length_keeps_a_visible_bar():
    """One row among a million still draws something."""
    text = as_text(profile_table(profile(((10, 1_000_000), (1000, 1)))))
    assert "▏" in text


# ---- trials ----------------------------------------------------------------


def test_a_trial_row_says_measured_or_predicted():
    """Where a number comes from stands in its row."""
    trials = [trial(), trial("t002", measured=False)]
    lines = as_text(trials_table(trials, None, {})).splitlines()
    assert ["measured", "predicted"] == [line.split()[-1] for line in lines if " ok " in line]


def test_the_winner_is_marked():
    """The winner's row begins with >."""
    lines = as_text(trials_table([trial(), trial("t002")], "t002", {"t002": 1e6})).splitlines()
    marked = [line for line in lines if line.startswith("> ")]
    assert 1 == len(marked)
    assert ["t002", "1,000,000"] == [marked[0].split()[1], marked[0].split()[-2]]


def test_unknown_numbers_are_dashes():
    """A trial without a peak prints - and never nan."""
    dead = trial(outcome="error", peak_reserved_bytes=None, message="the [child] died")
    text = as_text(trials_table([dead], None, {"t001": float("nan")}))
    assert "nan" not in text.lower()
    assert ["-", "-", "-", "measured"] == next(
        line.split()[-4:] for line in text.splitlines() if line.split()[:1] == ["t001"]
    )
    assert "t001: the [child] died" in text


def test_wide_trials_fit_a_pipe():
    """No line of the trials is wider than 80 columns, nor is a number broken over two."""
    text = as_text(trials_table([trial()], "t001", {"t001": 1234567.0}))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert [">", "t001", "131,072", "tok", "1,700", "tok", "ok", "1.00", "GiB", "25.0%"] == next(
        line.split()[:10] for line in text.splitlines() if line.startswith(">")
    )


def test_the_load_of_padded_rows_is_rows_times_width():
    """Padding is part of the load."""
    padded = trial(
        candidate=Candidate(toggles=Toggles(use_remove_padding=False), micro_batch_size_per_gpu=2),
        load=Load(micro_batches=((3, 9), (3, 9)), padded_to=16),
    )
    text = as_text(trials_table([padded], None, {}))
    assert "2 x 16" in text
    assert "2 rows" in text


def test_a_failed_trial_is_one_line_with_its_message():
    """Talk about a trial is one line."""
    line = trial_line(trial(outcome="timeout", message="killed after 30 s"))
    assert line.endswith(": killed after 30 s")
    assert "\n" not in line


# ---- verdict, run ----------------------------------------------------------


def test_a_tuned_config_shows_its_settings_and_proof():
    """Size, limit, peak and reason of the verdict are printed; what is missing is a dash."""
    config = load_config(None, ["data.max_token_len_per_gpu=4096"])
    tuning = {
        "winner": to_plain(trial()),
        "memory_limit_bytes": 4 * GIB,
        "reason": "It is fastest.",
        "certificate": {"num_micro_batches": 12, "proven_by": "t001"},
    }
    text = as_text(tuned_summary(replace(resolve(config), tuning=tuning)))
    for part in ("4,096", "1.00 GiB of 4.00 GiB, measured", "It is fastest.", "t001"):
        assert part in text
    assert "None" not in text


def test_a_run_is_summed_up():
    """Steps, first and last loss, median speed, peak, seconds with the waiting for data."""
    text = as_text(run_table([row(1), row(2, loss=float("nan")), row(3, loss=2.5)]))
    for part in ("10.0000 first, 2.5000 last", "2,000", "1.00 GiB", "7.5 s"):
        assert part in text
    assert "nan" not in text.lower()


def test_a_run_without_rows_is_dashes():
    """An empty run is no error."""
    assert "- first, - last" in as_text(run_table([]))


# ---- sources ---------------------------------------------------------------


def test_what_was_written_is_read_back(tmp_path):
    """Each record returns as its writer had it."""
    write_json(tmp_path / "profile.json", profile())
    append_jsonl(tmp_path / "trials.jsonl", trial())
    append_jsonl(tmp_path / "metrics.jsonl", row(1))
    assert profile() == read_record(LengthProfile, tmp_path / "profile.json")
    (line,) = read_jsonl(tmp_path / "trials.jsonl")
    assert trial() == from_plain(Trial, line, where="trials.jsonl")
    assert (row(1),) == read_metrics(tmp_path)


def test_a_tuned_config_needs_its_evidence(tmp_path):
    """A plain config is no verdict."""
    save_config(load_config(None), tmp_path / "tuned.yaml")
    with pytest.raises(AutobatchError, match="autobatch tune"):
        read_tuned(tmp_path)


def test_a_damaged_line_is_one_sentence(tmp_path):
    """JSON that cannot be read is our error with the file's name."""
    (tmp_path / "metrics.jsonl").write_text("{broken\n")
    with pytest.raises(AutobatchError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)


# ---- progress --------------------------------------------------------------


def test_a_pipe_gets_a_line_every_ten_seconds_and_the_last():
    """No terminal: the first row, then one line in ten seconds, then the last row."""
    stream, now = io.StringIO(), [0.0]
    progress = RunProgress(20, stream, clock=lambda: now[0])
    for step in range(1, 16):
        progress.update(row(step))
        now[0] += 1.0
    progress.close()
    lines = stream.getvalue().splitlines()
    assert ["1/20", "11/20", "15/20"] == [line.split()[1] for line in lines]
    assert "loss 0.6667  15,000 tokens/s  1.00 GiB  12.5 s left" in lines[-1]


def test_a_row_without_numbers_is_shown_as_dashes():
    """NaN and null are unknown."""
    stream = io.StringIO()
    progress = RunProgress(None, stream)
    progress.update({"step": 1, "loss": float("nan"), "tokens_per_sec": None})
    progress.close()
    assert "step 1  loss -  - tokens/s  -  - left\n" == stream.getvalue()


def test_a_terminal_gets_a_bar():
    """On a terminal the line is drawn in place."""
    stream = Terminal()
    progress = RunProgress(2, stream)
    progress.update(row(1))
    progress.update(row(2))
    progress.close()
    assert "\x1b[" in stream.getvalue()
    assert "2/2" in stream.getvalue()


def test_profile_progress_shows_the_rate():
    """Rows done, of how many, how fast; the total may come late."""
    stream, now = io.StringIO(), [0.0]
    progress = ProfileProgress(None, stream, clock=lambda: now[0])
    now[0] = 2.0
    progress.update(1000, 4000)
    progress.close()
    assert "rows 1,000/4,000  500 rows/s  6.0 s left\n" == stream.getvalue()


def test_profile_progress_counts_from_the_first_row_on():
    """Loading the tokenizer is no part of the rate, and the last line comes once."""
    stream, now = io.StringIO(), [0.0]
    progress = ProfileProgress(None, stream, clock=lambda: now[0])
    for now[0], num_done in ((50.0, 0), (52.0, 1000), (70.0, 10_000)):
        progress.update(num_done, 10_000)
    progress.close()
    progress.close()
    assert stream.getvalue().splitlines() == [
        "rows 1,000/10,000  500 rows/s  18.0 s left",
        "rows 10,000/10,000  500 rows/s",
    ]


def test_profile_progress_without_a_total_tells_no_end():
    """Where nobody knows how many rows there are, no time is invented; no time gives no rate."""
    stream, now = io.StringIO(), [0.0]
    progress = ProfileProgress(None, stream, clock=lambda: now[0])
    progress.update(500)
    now[0] = 20.0
    progress.update(1000)
    progress.close()
    assert stream.getvalue().splitlines() == ["rows 500  - rows/s", "rows 1,000  50 rows/s"]


def test_a_tail_returns_whole_new_rows(tmp_path):
    """A line that is still being written waits; rows of earlier runs may be left out."""
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert [] == tail.read()
    append_jsonl(path, row(1))
    with path.open("a") as stream:
        stream.write('{"step": 2')
    assert [1] == [r["step"] for r in tail.read()]
    with path.open("a") as stream:
        stream.write(', "loss": 1.0}\n')
    assert [2] == [r["step"] for r in tail.read()]
    assert [] == MetricsTail(path, skip_present=True).read()


def test_a_tail_reads_a_shortened_file_anew(tmp_path):
    """A resume that drops rows after its checkpoint does not stop the progress."""
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    for step in (1, 2, 3):
        append_jsonl(path, row(step))
    tail.read()
    Path(path).write_text(json.dumps(row(1)) + "\n")
    assert [1] == [r["step"] for r in tail.read()]
