"""Runs finish, are continued after a kill bit for bit, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from run_dirs import small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from autobatch import api, launching
from autobatch.api.inputs import once
from autobatch.config import load_config, resolve
from autobatch.errors import AutobatchError, ConfigError, RunError, StaleError
from autobatch.hardware.environment import child_environment
from autobatch.jobs import start_ranks
from autobatch.preflight.run import check_run
from autobatch.storage import read_jsonl
from autobatch.training import checkpoints

ROOT = Path(__file__).parent.parent


def launch(config: Path, *overrides: str, **arguments: Any) -> tuple[api.LaunchReport, list[str]]:
    """Launch in this process; return the report and what was said."""
    said: list[str] = []
    report = api.launch(config, overrides=overrides, talk=said.append, **arguments)
    return report, said


def start(config: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Launch as a user does, in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, "-m", "autobatch", "launch", str(config), *overrides]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_jsonl(run_dir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two ranks that saved every third step."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _, _, config = small_run(folder, trainer__nproc_per_node=2, trainer__save_freq=3)
    report, _ = launch(config)
    assert report.finished
    return folder


def test_a_run_writes_one_row_a_step_and_learns(undisturbed: Path) -> None:
    """48 rows in groups of 12 over 2 epochs are 8 steps."""
    rows = list(read_jsonl(undisturbed / "run" / "metrics.jsonl"))
    assert list(range(1, 9)) == [row["step"] for row in rows]
    assert [0] * 4 + [1] * 4 == [row["epoch"] for row in rows]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"lr", "num_tokens", "num_label_tokens", "num_micro_batches", "step_secs"} <= set(
        rows[0]
    )


def test_the_result_loads_in_transformers(undisturbed: Path) -> None:
    """Weights, config, tokenizer and template are in one directory."""
    model, info = AutoModelForCausalLM.from_pretrained(
        undisturbed / "run" / "hf", output_loading_info=True
    )
    assert not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(undisturbed / "run" / "hf")
    assert tokenizer.chat_template
    assert model.config.vocab_size >= len(tokenizer)


def _wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if losses(run_dir) and losses(run_dir)[-1][0] >= step:
            return
        if process.poll() is not None:
            assert process.stdout is not None
            pytest.fail(process.stdout.read().decode())
        time.sleep(0.01)
    pytest.fail("the run made no step")


def _processes_of(run_dir: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if str(run_dir).encode() in words and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def test_killed_runs_launched_again_give_the_same_losses(undisturbed: Path, tmp_path: Path) -> None:
    """Killed before a checkpoint, then after one; workers are gone within two seconds."""
    _, _, config = small_run(tmp_path, trainer__nproc_per_node=2, trainer__save_freq=3)
    run_dir = tmp_path / "run"
    for step in (2, 5):
        process = start(config)
        _wait_for_step(run_dir, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 2
        while _processes_of(run_dir) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [] == _processes_of(run_dir)
    report, _ = launch(config)
    assert report.start_step >= 3  # step 5 was made, so the checkpoint after step 3 is whole
    assert losses(undisturbed / "run") == losses(run_dir)


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    """The command goes on after the step that was saved; nothing saved, it starts anew."""
    _, _, config = small_run(tmp_path)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupt:
        launch(config, on_row=stop)
    words = f"nothing was saved yet, so autobatch launch {config} starts it anew"
    assert [words] == interrupt.value.__notes__
    assert [] == _processes_of(tmp_path / "run")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # of a job in the background
    _, _, config = small_run(tmp_path / "b", trainer__save_freq=1)
    process = start(
        *(config, "optim.lr=1e-4", "trainer.resume_mode=disable", "--on-stale", "warn"),
        *("--", "--max-restarts=0"),
    )
    signal.signal(signal.SIGINT, before)
    _wait_for_step(tmp_path / "b" / "run", 2, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[0].decode()
    assert 130 == process.returncode, said
    again = (
        f"autobatch launch {config} optim.lr=1e-4 trainer.resume_mode=auto --on-stale warn "
        "-- --max-restarts=0"
    )
    found, _ = checkpoints.newest(tmp_path / "b" / "run")
    step = checkpoints.read_mark(found).step
    assert said.endswith(f"autobatch: interrupted; {again} continues it after step {step}\n")
    report, _ = launch(config, "optim.lr=1e-4", "trainer.resume_mode=auto")
    assert (step, True) == (report.start_step, report.finished)


def test_once_says_nothing_twice() -> None:
    """`run` tells of the rows when it tunes, and not again when it launches."""
    said: list[str] = []
    tell = once(said.append)
    for words in ("1 row is cut", "limit", "1 row is cut"):
        tell(words)
    assert ["1 row is cut", "limit"] == said


def test_a_finished_run_is_not_made_again(undisturbed: Path) -> None:
    """Nothing is started, and that is said."""
    before = losses(undisturbed / "run")
    report, said = launch(undisturbed / "config.yaml")
    assert 8 == report.start_step
    assert any("nothing to do" in line for line in said)
    assert before == losses(undisturbed / "run")


def test_an_adapter_is_the_export_of_a_finished_run(undisturbed: Path, tmp_path: Path) -> None:
    """LoRA writes adapter_config.json; without any export the run is not finished."""
    run_dir = _copy(undisturbed, tmp_path)
    exported = run_dir / "hf" / "config.json"
    exported.rename(exported.with_name("adapter_config.json"))
    assert launching.is_finished(run_dir, num_steps=8)
    shutil.rmtree(run_dir / "hf")
    assert not launching.is_finished(run_dir, num_steps=8)


def test_a_running_run_is_left_where_it_is(undisturbed: Path, tmp_path: Path) -> None:
    """The lock is taken before anything is moved, also by another name of the directory."""
    run_dir = _copy(undisturbed, tmp_path)
    (tmp_path / "link").symlink_to(run_dir)
    before = losses(run_dir)
    with launching.locked(run_dir):
        for name in ("run", "link"):
            with pytest.raises(RunError, match="another launch is running in"):
                launch(
                    undisturbed / "config.yaml",
                    f"trainer.output_dir={tmp_path / name}",
                    "trainer.resume_mode=disable",
                )
    assert before == losses(run_dir)
    assert not (tmp_path / "run.1").exists()


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source / "run", target / "run")
    return target / "run"


def test_no_whole_checkpoint_is_an_error_not_a_new_run(undisturbed: Path, tmp_path: Path) -> None:
    """Old weights are never trained over in silence."""
    run_dir = _copy(undisturbed, tmp_path)
    for path in (run_dir / "checkpoints").glob("step_*"):
        (path / checkpoints.MARKER).unlink()
    with pytest.raises(RunError, match=r"no checkpoint .* is whole"):
        launch(undisturbed / "config.yaml", f"trainer.output_dir={run_dir}")


def test_a_checkpoint_of_other_data_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    """Another seed is another order of samples."""
    run_dir = _copy(undisturbed, tmp_path)
    with pytest.raises(RunError, match="other data, another seed"):
        launch(undisturbed / "config.yaml", f"trainer.output_dir={run_dir}", "data.seed=1")


def test_another_model_in_the_same_place_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    """The value before, the value now, the next move."""
    _, model, _ = small_run(tmp_path / "other", kind="llama")
    with pytest.raises(ConfigError, match=r"holds a run with model\.path="):
        launch(undisturbed / "config.yaml", f"model.path={model}")


def test_fewer_ranks_and_another_cut_continue_the_same_curve(
    undisturbed: Path, tmp_path: Path
) -> None:
    """A two-rank checkpoint goes on with one rank; the losses agree to rounding."""
    run_dir = _copy(undisturbed, tmp_path)
    shutil.rmtree(run_dir / "hf")
    for step in (6, 8):
        shutil.rmtree(checkpoints.directory_of(run_dir, step))
    report, said = launch(
        undisturbed / "config.yaml",
        f"trainer.output_dir={run_dir}",
        "trainer.nproc_per_node=1",
        "data.max_token_len_per_gpu=200",
    )
    assert 3 == report.start_step
    assert any("continuing after step 3" in line for line in said)
    expected = losses(undisturbed / "run")
    assert expected == [pytest.approx(row, rel=1e-4) for row in losses(run_dir)]


@dataclass(frozen=True, kw_only=True)
class AnotherRun:
    """A run of one step, launched over a finished one with trainer.resume_mode=disable."""

    folder: Path
    report: api.LaunchReport
    said: list[str]


@pytest.fixture(scope="module")
def another(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> AnotherRun:
    """Launched from a folder with a file that is called like a module of the training."""
    folder = tmp_path_factory.mktemp("another")
    _copy(undisturbed, folder)
    (folder / "safetensors.py").write_text("raise RuntimeError('imported from the user folder')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("AB_TEST_OUT", str(folder))
        report, said = launch(
            undisturbed / "config.yaml",
            "trainer.output_dir=${oc.env:AB_TEST_OUT}/run",
            "trainer.resume_mode=disable",
            "trainer.total_training_steps=1",
            "trainer.nproc_per_node=1",
        )
    return AnotherRun(folder=folder, report=report, said=said)


def test_resume_mode_disable_keeps_the_old_run_aside(another: AnotherRun) -> None:
    """Nothing is overwritten."""
    assert 1 == another.report.num_steps == len(losses(another.folder / "run"))
    assert 8 == len(losses(another.folder / "run.1"))
    assert any("moved to" in line for line in another.said)


def test_a_file_in_the_users_folder_is_no_module_of_the_training(another: AnotherRun) -> None:
    """Workers import what the launcher does, wherever the user stands."""
    assert another.report.finished
    assert "user folder" not in (another.folder / "run" / "train.log").read_text()


def test_the_config_of_a_run_keeps_interpolations(another: AnotherRun) -> None:
    """`${oc.env:X}` stays as written in the run directory."""
    run_dir = another.folder / "run"
    assert "${oc.env:AB_TEST_OUT}/run" in (run_dir / "config.yaml").read_text()
    assert json.loads((run_dir / "hf" / "config.json").read_text())["vocab_size"] == 640


def test_a_training_error_is_one_sentence(tmp_path: Path) -> None:
    """A diverged run stops before the weights change, with the step in the message."""
    _, _, config = small_run(tmp_path, optim__lr=1e30, optim__lr_scheduler="constant")
    with pytest.raises(RunError, match=r"training stopped at step \d+ before the weights changed"):
        launch(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.init=pretrained", "holds no weights"),
        ("data.train_files=[nowhere.parquet]", "nowhere.parquet"),
        ("data.max_token_len_per_gpu=10", "max_token_len_per_gpu=10 is below the longest row"),
        ("trainer.device=cuda", "trainer.nproc_per_node=1 is above the 0 GPUs visible here"),
        ("data.val_fraction=0.1", "data.val_fraction do not work in this version"),
        ("model.use_remove_padding=false", "do not go together"),
    ],
)
def test_preflight_refuses_before_anything_starts(
    tmp_path: Path, override: str, words: str
) -> None:
    """The value, the rule, the next move; no run directory is made."""
    _, _, config = small_run(tmp_path)
    with pytest.raises(AutobatchError, match=words):
        launch(config, override)
    assert not (tmp_path / "run").exists()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """The user fixed it, something else holds it (report E01)."""
    import socket

    _, _, config = small_run(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken"):
            launch(config, torchrun_args=["--master-port", str(port)])


def test_dry_run_starts_nothing_and_shows_the_command(tmp_path: Path) -> None:
    """torchrun, the module, the run directory."""
    _, _, config = small_run(tmp_path)
    report, said = launch(config, dry_run=True)
    assert not report.finished
    assert "torch.distributed.run --nproc-per-node=1 --standalone" in report.command
    assert any("48 trainable rows, 12 a step: 4 steps an epoch, 8 steps in all" in s for s in said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("num_gpus", "words"), [(1, "--num-gpus 1"), (0, "--num-gpus 1")])
def test_a_config_tuned_for_more_gpus_is_stale(num_gpus: int, words: str) -> None:
    """Exit 4, and the command that tunes for what is here."""
    untuned = resolve(load_config(None, ["model.path=m", "trainer.nproc_per_node=2"]))
    config = replace(
        untuned, tuning={"winner": {}}, trainer=replace(untuned.trainer, device="cuda")
    )
    with pytest.raises(StaleError, match=f"autobatch tune {words}") as caught:
        list(check_run(config, Path("run"), num_cores=8, num_gpus=num_gpus, torchrun_args=()))
    assert 4 == caught.value.exit_code


def test_children_import_this_package_and_keep_what_the_user_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PYTHONPATH is led, not replaced; a variable of the user is not given again."""
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    values = child_environment(2, device="cuda")
    assert f"{ROOT}{os.pathsep}/mine" == values["PYTHONPATH"]
    assert ("1", ":4096:8") == (values["PYTHONSAFEPATH"], values["CUBLAS_WORKSPACE_CONFIG"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert "CUBLAS_WORKSPACE_CONFIG" not in child_environment(2, device="cuda")


def test_ready_made_ids_outside_the_embedding_are_refused(tmp_path: Path) -> None:
    """A row of ids is checked too, not only what the tokenizer can give."""
    from tiny import write_parquet

    _, _, config = small_run(tmp_path)
    data = write_parquet(tmp_path / "ids.parquet", [{"input_ids": [1, 2, 700]}] * 4)
    with pytest.raises(ConfigError, match="token id 700, the model's embedding has 640 rows"):
        launch(config, f"data.train_files=[{data}]")


_ASK_FOR_THE_LARGEST = """
from autobatch.config import load_config, resolve
from autobatch.engine.device import claim
config = resolve(load_config(None, ["model.path=m", "trainer.device=cpu"]))
with claim(config, memory_limit_bytes=2**20) as device:
    print(device.max_over_ranks(7 + device.rank))
"""


def test_the_peak_told_is_that_of_the_worst_rank(tmp_path: Path) -> None:
    """Each rank learns the largest value of all."""
    argv = [sys.executable, "-c", _ASK_FOR_THE_LARGEST]
    environment = child_environment(2, device="cpu")
    with start_ranks(argv, num_ranks=2, job_dir=tmp_path, env=environment) as job:
        assert job.wait(60)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert ["8", "8"] == [log.splitlines()[-1] for log in logs]
