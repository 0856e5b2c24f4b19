"""The command line: exit codes, one JSON document, one sentence for each fault."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from run_dirs import small_run

from autobatch.cli import main
from autobatch.cli.screen import plain_errors
from autobatch.config import load_config, resolve
from autobatch.storage import read_jsonl


def call(*arguments: str) -> Result:
    """Call the command line in this process."""
    return CliRunner().invoke(main, list(arguments))


def document(result: Result) -> Any:
    assert 0 == result.exit_code, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    data, model, _ = small_run(tmp_path_factory.mktemp("inputs"))
    return data, model


@pytest.fixture(scope="module")
def tuned(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out folder of profile and tune, chained as a user chains them."""
    data, model = inputs
    out = tmp_path_factory.mktemp("out")
    document(call("profile", str(data), "--model", str(model), "--out", str(out), "--json"))
    verdict = document(
        call(
            *("tune", "--out", str(out), "--device", "cpu", "--memory-limit", "12MiB", "--json"),
            *("--train-batch-size", "12", "--gradient-checkpointing", "none"),
            *("model.loss_kernel=logits", "engine.param_dtype=fp32", "model.init=random"),
            *("trainer.total_epochs=1", "optim.lr=1e-3"),
        )
    )
    (out / "verdict.json").write_text(json.dumps(verdict))
    return out


def test_profile_prints_the_fixed_fields(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """The names that others rely on."""
    data, model = inputs
    record = document(
        call("profile", str(data), "--model", str(model), "--out", str(tmp_path), "--json")
    )
    assert {
        *("num_rows", "num_samples", "skipped", "num_rows_without_labels", "num_tokens"),
        *("num_label_tokens", "length", "histogram", "max_length", "warnings", "complete"),
    } <= set(record)
    assert {"mean", "min", "p50", "p90", "p95", "p99", "max"} == set(record["length"])
    assert {"recommended", "curve"} <= set(record["max_length"])
    assert record == json.loads((tmp_path / "profile.json").read_text())
    assert "*\n" == (tmp_path / ".gitignore").read_text()


def test_tune_prints_the_fixed_fields_and_writes_what_it_prints(tuned: Path) -> None:
    """The winner was stepped, fits, and proves the worst micro-batch of the run."""
    verdict = json.loads((tuned / "verdict.json").read_text())
    assert {
        *("stopped_by", "gpu", "data_parallel_size", "memory_limit_bytes", "winner", "reason"),
        *("binding", "trials", "certificate", "seconds"),
    } <= set(verdict)
    winner = verdict["winner"]
    assert winner["measured"]
    assert winner["fits"]
    assert winner["peak_reserved_bytes"] <= 12 * 2**20
    assert winner["trial_id"] == verdict["certificate"]["proven_by"]
    assert [t["trial_id"] for t in verdict["trials"]] == [
        row["trial_id"] for row in read_jsonl(tuned / "trials.jsonl")
    ]
    config = resolve(load_config(tuned / "tuned.yaml"))
    assert config.tuning is not None
    assert winner["trial_id"] == config.tuning["winner"]["trial_id"]
    assert {"padded", "packed"} == {s["name"].split("-")[0] for s in verdict["searched"]}


def test_launch_trains_the_tuned_config(tuned: Path, inputs: tuple[Path, Path]) -> None:
    """Every row once an epoch: label tokens are the profile's, within the proven memory."""
    record = document(call("launch", "--out", str(tuned), "--json"))
    assert record["finished"]
    rows = list(read_jsonl(tuned / "run" / "metrics.jsonl"))
    profile = json.loads((tuned / "profile.json").read_text())
    verdict = json.loads((tuned / "verdict.json").read_text())
    assert profile["num_label_tokens"] == sum(row["num_label_tokens"] for row in rows)
    assert profile["num_tokens"] == sum(row["num_tokens"] for row in rows)
    peak = max(row["peak_reserved_bytes"] for row in rows)
    assert peak <= verdict["winner"]["peak_reserved_bytes"]


def test_other_steps_keep_the_verdict_and_other_toggles_do_not(tuned: Path) -> None:
    """`trainer.*` is replayed under the proof; a changed toggle is exit 4."""
    config = str(tuned / "tuned.yaml")
    again = call("launch", config, "trainer.total_training_steps=2", "--dry-run", "--json")
    assert 0 == again.exit_code, again.stderr
    assert "none is larger than the proven one" in again.stderr
    changed = call("launch", config, "model.gradient_checkpointing=full", "--dry-run")
    assert 4 == changed.exit_code
    assert "toggles of the engine were changed" in changed.stderr
    warned = call(
        *("launch", config, "model.gradient_checkpointing=full", "--dry-run"),
        *("--on-stale", "warn"),
    )
    assert 0 == warned.exit_code
    assert "unproven" in warned.stderr


def test_a_larger_worst_micro_batch_is_stepped_before_the_run(tuned: Path, tmp_path: Path) -> None:
    """Other seeds meet other micro-batches; the proof is made anew, under the same limit.

    The size is given: what a search chooses goes by the clock, and may be met by every seed.
    """
    size = "data.max_token_len_per_gpu=200"
    verdict = document(
        call(
            *("tune", size, "--profile", str(tuned / "profile.json"), "--out", str(tmp_path)),
            *("--device", "cpu", "--memory-limit", "12MiB", "--train-batch-size", "12", "--json"),
            *("--liger", "off", "--gradient-checkpointing", "none", "model.loss_kernel=logits"),
            *("engine.param_dtype=fp32", "model.init=random", "trainer.total_epochs=1"),
        )
    )
    assert 200 == verdict["winner"]["candidate"]["max_token_len_per_gpu"]
    config = str(tmp_path / "tuned.yaml")
    for seed in range(1, 30):  # one that meets more tokens than the proven micro-batch
        changes = (f"data.seed={seed}", f"trainer.output_dir={tmp_path / 'run'}")
        dry = call("launch", config, *changes, "--dry-run")
        if "launch will step it first" in dry.stderr:
            break
    assert "launch will step it first" in dry.stderr
    result = call("launch", config, *changes, "trainer.total_training_steps=4")
    assert "stepping it under 12.0 MiB" in result.stderr
    if result.exit_code == 4:  # it does not fit: refused before anything is trained
        assert not (tmp_path / "run").exists()
        return
    assert 0 == result.exit_code, result.stderr
    saved = resolve(load_config(tmp_path / "run" / "config.yaml"))
    assert saved.tuning is not None
    assert "p001" == saved.tuning["winner"]["trial_id"] == saved.tuning["certificate"]["proven_by"]
    assert ["p001"] == [row["trial_id"] for row in read_jsonl(tmp_path / "run" / "trials.jsonl")]
    assert (tmp_path / "run" / "probes").is_dir()
    assert not (tmp_path / ".run.probes").exists()


def test_a_printed_command_trains(tuned: Path, tmp_path: Path) -> None:
    """One line for a shell, alone on stdout; words after `--` are passed on."""
    result = call(
        *("launch", str(tuned / "tuned.yaml"), f"trainer.output_dir={tmp_path / 'a run'}"),
        *("trainer.total_training_steps=1", "--print-command", "--", "--max-restarts=2"),
    )
    assert 0 == result.exit_code, result.stderr
    assert 1 == len(result.stdout.splitlines())
    assert "--max-restarts=2 -m autobatch.training" in result.stdout
    finished = subprocess.run(
        result.stdout, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 0 == finished.returncode, finished.stderr
    assert [1] == [row["step"] for row in read_jsonl(tmp_path / "a run" / "metrics.jsonl")]


@pytest.mark.parametrize("flag", ["--dry-run", "--print-command"])
def test_the_command_is_one_line_or_in_the_record(tuned: Path, tmp_path: Path, flag: str) -> None:
    """Never wrapped; with --json the record is alone."""
    arguments = ("launch", str(tuned / "tuned.yaml"), f"trainer.output_dir={tmp_path / 'run'}")
    record = document(call(*arguments, flag, "--json"))
    assert f"{record['command']}\n" == call(*arguments, flag).stdout


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """`nohup autobatch launch` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with plain_errors():
            assert signal.SIG_IGN == signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_probe_says_whether_it_fits(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    """0 with the record when it does, 3 when memory ends."""
    _, model = inputs
    common = ("probe", "--model", str(model), "--device", "cpu", "--out", str(tmp_path), "--json")
    packed = document(call(*common, "--tokens", "128", "--length", "64"))
    assert packed["fits"]
    assert [[64, 64], [64, 64]] == packed["load"]["micro_batches"]
    assert packed["tokens_per_sec"] > 0
    padded = call(*common, "--micro-batch-size", "8", "--length", "63", "--memory-limit", "4MiB")
    assert 3 == padded.exit_code
    record = json.loads(padded.stdout)
    assert "oom" == record["outcome"]
    assert 64 == record["load"]["padded_to"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("profile", "nowhere.parquet", "--model", "{model}"), "nowhere.parquet"),
        (("profile", "{data}"), "--model or --tokenizer"),
        (("profile", "{data}", "--model", "/nowhere"), "/nowhere"),
        (("profile", "{data}", "--model", "{model}", "--prompt-key", "questoin"), "question"),
        (("profile", "{data}", "--model", "{model}", "--turn-by-turn", "no"), "all, sample, off"),
        (("tune",), "--device cpu"),
        (("tune", "--device", "cuda"), "no GPU is visible here"),
        (("tune", "--device", "cpu", "--out", "{empty}"), "autobatch profile"),
        (("tune", "--device", "cpu", "optim.lrr=1"), "did you mean optim.lr"),
        (("tune", "--device", "cpu", "--remove-padding", "maybe"), "auto, on or off"),
        (("tune", "--device", "cpu", "--liger", "on"), "needs CUDA"),
        (("tune", "--device", "cpu", "--search", "law"), "use bisect"),
        (("tune", "--device", "cpu", "--memory-limit", "lots"), "6GiB"),
        (("tune", "--device", "cpu", "trainer.device=cpu"), "use --device cpu instead"),
        (("tune", "--device", "cpu", "--gpu", "b200-180g"), "name a smaller card"),
        (("tune", "--device", "cpu", "--gpu", "a100-80gb"), "a100-80g"),
        (("tune", "--device", "cpu", "--num-gpus", "0"), "--num-gpus 0 is below 1"),
        (("tune", "--device", "cpu", "--seconds", "-1"), "--seconds -1 is not positive"),
        (("tune", "--device", "cpu", "--train-batch-size", "0"), "is below 1"),
        (("tune", "--device", "cpu", "--max-length", "8"), "data.truncation"),
        (("launch", "nowhere.yaml"), "there is no config nowhere.yaml"),
        (("launch", "{data}"), "cannot be read"),
        (("launch", "a.yaml", "b.yaml"), "second config"),
        (("launch", "--on-stale", "perhaps"), "refuse or warn"),
        (("run", "optim.lr=1", "--model", "{model}"), "no data file"),
        (("run", "{data}", "--model", "{model}", "--device", "cpu"), "holds no weights"),
        (("probe", "--model", "{model}", "--length", "8", "--device", "cpu"), "--tokens T"),
        (
            *(("probe", "--model", "{model}", "--length", "1", "--tokens", "8"),),
            "--device cpu",
        ),
    ],
)
def test_a_fault_of_content_is_exit_1_and_one_sentence(
    inputs: tuple[Path, Path],
    tuned: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    """No traceback, nothing on stdout, the next move in the words."""
    names = {"data": str(inputs[0]), "model": str(inputs[1]), "empty": str(tmp_path)}
    filled = [a.format(**names) for a in arguments]
    if "--out" not in filled and filled[0] in ("tune", "run"):
        filled += ["--out", str(tuned)]
    elif filled[0] == "profile":
        filled += ["--out", str(tmp_path)]
    before = (tuned / "tuned.yaml").read_text()
    result = call(*filled)
    assert 1 == result.exit_code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert "" == result.stdout
    assert before == (tuned / "tuned.yaml").read_text()


@pytest.mark.parametrize("arguments", [("tune", "--nope"), ("probe",), ("nope",), ("profile",)])
def test_a_line_that_cannot_be_parsed_is_exit_2(arguments: tuple[str, ...]) -> None:
    """And only that."""
    assert 2 == call(*arguments).exit_code


def test_nothing_fits_is_exit_3_with_the_ways_out(tuned: Path) -> None:
    """What the model takes and what to do, before any step is made."""
    before = (tuned / "trials.jsonl").read_text()
    result = call(
        *("tune", "--out", str(tuned), "--device", "cpu", "--memory-limit", "1MiB"),
        *("--remove-padding", "on", "--gradient-checkpointing", "none"),
        "model.loss_kernel=logits",
    )
    assert 3 == result.exit_code, result.output
    assert "1.0 MiB" in result.stderr
    assert "weights, gradients and optimizer alone" in result.stderr
    assert before == (tuned / "trials.jsonl").read_text(), "no step was needed to see it"
    assert "Traceback" not in result.output


def test_two_searches_in_one_folder_are_refused(tuned: Path) -> None:
    """They would read each other's trials."""
    import fcntl

    with (tuned / ".tune.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = call("tune", "--out", str(tuned), "--device", "cpu")
    assert 1 == result.exit_code
    assert "another tune or probe is running" in result.stderr
