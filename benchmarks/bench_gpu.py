"""The whole job on one GPU, part by part, through the commands that users call.

Parts, each under ten minutes: correctness, checkpointing, laws, toggles, tune, baseline, launch.
Rows are appended to OUT/rows.jsonl as they land; a row that is there already is not measured
again, so a part that was cut off is continued by calling it again.

    python benchmarks/bench_gpu.py correctness laws --out bench-out --model DIR --tokenizer DIR

`--model` is a directory with the config.json of Qwen2.5-0.5B (no weights are needed), `--tokenizer`
any tokenizer with at most its vocabulary. The data are ids of log-normal lengths:
exp(N(ln 330, 0.85)) clipped to [16, 2048], 6,000 rows, numpy seed 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent
VOCABULARY = 151_643
# rows of 512 packed tokens; the memory laws of one setting each
LAW_TOKENS = (4096, 16384, 65536)
LAWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Liger, no checkpointing": (1, ("model.use_liger=true", "model.loss_kernel=fused")),
    "no Liger, no checkpointing": (1, ("model.loss_kernel=logits",)),
    "Liger, checkpointing": (
        1,
        (
            "model.use_liger=true",
            "model.loss_kernel=fused",
            "model.gradient_checkpointing=full",
        ),
    ),
    "Liger, no checkpointing, one standing for 8": (
        8,
        ("model.use_liger=true", "model.loss_kernel=fused"),
    ),
}

PACKED = ("--remove-padding", "on", "data.max_token_len_per_gpu=32768")
PADDED = ("--remove-padding", "off", "data.micro_batch_size_per_gpu=16")
BEST = (*PACKED, "--liger", "on", "--gradient-checkpointing")
TOGGLES = {
    "packed": PACKED,
    "padded": PADDED,
    "every_2": (*BEST, "every_2"),
    "compiled": (*BEST, "none", "model.compile=true"),
    "LoRA": (*BEST, "none", "model.lora_rank=32"),
}


class Rows:
    """Result rows on disk, by what was measured."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._facts = _facts()
        self._known = set()
        if path.exists():
            self._known = {json.loads(line)["what"] for line in path.read_text().splitlines()}

    def has(self, what: str) -> bool:
        """Return whether a row was measured before."""
        return what in self._known

    def add(self, what: str, command: str, **values: Any) -> None:
        """Append a row and print it."""
        row = {"what": what, **values, "command": command, **self._facts}
        self._known.add(what)
        with self._path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        words = ", ".join(f"{k} {v}" for k, v in values.items() if not isinstance(v, (list, dict)))
        print(f"[{time.strftime('%H:%M:%S')}] {what}: {words}", flush=True)


def _facts() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from autobatch.hardware.environment import describe

    commit = (
        os.environ.get("AUTOBATCH_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"environment": describe(device="cuda"), "commit": commit, "date": today}


def autobatch(*arguments: str, log: Path, timeout: float | None = None) -> tuple[Any, int, str]:
    """Run a command with --json; return its record (None if there is none), code and command."""
    argv = [sys.executable, "-m", "autobatch", *arguments, "--json"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("a") as stream:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path},
        )
    command = " ".join(["autobatch", *arguments])
    return (json.loads(done.stdout) if done.stdout.strip() else None), done.returncode, command


def write_data(folder: Path) -> Path:
    """Write the rows as parquet of token ids."""
    path = folder / "lognormal.parquet"
    if not path.exists():
        rng = np.random.default_rng(0)
        lengths = np.clip(np.exp(rng.normal(np.log(330), 0.85, 6000)), 16, 2048).astype(int)
        ids = [rng.integers(0, VOCABULARY, n, dtype=np.int32) for n in lengths]
        pq.write_table(pa.table({"input_ids": ids}), path)
    return path


def correctness(options: argparse.Namespace, rows: Rows) -> None:
    """Kernels against float32."""
    if rows.has("correctness"):
        return
    found, code = _script(options, "gpu_correctness.py", "correctness.jsonl")
    rows.add(
        "correctness",
        "python benchmarks/gpu_correctness.py",
        comparisons=found,
        num_comparisons=len(found),
        num_far=sum(r["error"] > r["limit"] for r in found),
        exit_code=code,
    )


def checkpointing(options: argparse.Namespace, rows: Rows) -> None:
    """What each form keeps for the backward pass, in layers as wide as a 7B model's."""
    if rows.has("checkpointing"):
        return
    found = _script(options, "gpu_checkpointing.py", "checkpointing.jsonl")
    rows.add("checkpointing", "python benchmarks/gpu_checkpointing.py", forms=found[0])


def _script(options: argparse.Namespace, name: str, results: str) -> tuple[list[Any], int]:
    """Run a script of this folder; return the rows that it wrote and its exit code."""
    path = options.out / results
    path.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), str(path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines], done.returncode


def laws(options: argparse.Namespace, rows: Rows) -> None:
    """Peak bytes against tokens, for the settings of the memory laws."""
    for name, (ranks, settings) in LAWS.items():
        for tokens in LAW_TOKENS:
            what = f"law: {name}, {tokens} tokens"
            if rows.has(what) or (name.startswith("no Liger") and tokens > 32768):
                continue
            record, code, command = autobatch(
                *("probe", "--model", str(options.model), "--tokens", str(tokens)),
                *("--length", "512", "--num-gpus", str(ranks), "--out", str(options.out / "p")),
                *("engine.strategy=fsdp2", *settings),
                log=options.out / "log.txt",
            )
            _probe_row(rows, what, command, code, record)


def _probe_row(rows: Rows, what: str, command: str, code: int, record: Any) -> None:
    record = record or {}
    steps = record.get("step_secs") or [0.0]
    rows.add(
        what,
        command,
        outcome=record.get("outcome", f"exit {code}"),
        allocated_gib=_gib(record.get("peak_allocated_bytes")),
        reserved_gib=_gib(record.get("peak_reserved_bytes")),
        non_torch_gib=_gib(record.get("non_torch_bytes")),
        last_step_secs=round(steps[-1], 4),
        tokens_per_sec=round(record.get("tokens_per_sec") or 0),
        alloc_retries=record.get("num_alloc_retries"),
        seconds=round(record.get("seconds") or 0, 1),
        phase_peaks=record.get("phase_peaks"),
        step_secs=record.get("step_secs"),
    )


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 2**30, 3)


def _profile(options: argparse.Namespace) -> Path:
    """Return the profile of the data, made once."""
    out = options.out / "data"
    if not (out / "profile.json").exists():
        data = write_data(options.out)
        autobatch(
            *("profile", str(data), "--model", str(options.model), "--out", str(out)),
            *("--tokenizer", str(options.tokenizer)),
            log=options.out / "log.txt",
        )
    return Path(out / "profile.json")


def toggles(options: argparse.Namespace, rows: Rows) -> None:
    """Every toggle set at one size, 32,768 tokens: what each does to memory and speed."""
    for name, arguments in TOGGLES.items():
        _tune(options, rows, f"toggles: {name}", options.out / "toggles", arguments)


def tune(options: argparse.Namespace, rows: Rows) -> None:
    """The search under the limit of each card of --gpu."""
    for gpu in options.gpu:
        arguments = (
            *("--gpu", gpu, "trainer.total_epochs=9"),
            f"trainer.total_training_steps={options.steps}",
        )
        _tune(options, rows, f"tune {gpu}", options.out / gpu, arguments)


def _tune(
    options: argparse.Namespace, rows: Rows, what: str, out: Path, arguments: tuple[str, ...]
) -> None:
    if not rows.has(what):
        record, code, command = autobatch(
            *("tune", "--profile", str(_profile(options)), "--out", str(out)),
            *("--seconds", str(options.seconds)),
            *("--train-batch-size", "256", "model.init=random", *arguments),
            log=options.out / "log.txt",
        )
        if record is None:
            rows.add(what, command, outcome=f"exit {code}")
            return
        winner = record["winner"]
        rows.add(
            what,
            command,
            outcome="ok",
            winner=f"{winner['candidate']}",
            tokens_per_sec=round(winner["tokens_per_sec"]),
            reserved_gib=_gib(winner["peak_reserved_bytes"]),
            limit_gib=_gib(record["memory_limit_bytes"]),
            binding=record["binding"],
            stopped_by=record["stopped_by"],
            num_trials=len(record["trials"]),
            seconds=round(record["seconds"]),
            reason=record["reason"],
            searched=record["searched"],
            trials=[
                {
                    "trial_id": t["trial_id"],
                    "toggles": _short(t["candidate"]["toggles"]),
                    "size": t["candidate"]["max_token_len_per_gpu"]
                    or t["candidate"]["micro_batch_size_per_gpu"],
                    "outcome": t["outcome"],
                    "reserved_gib": _gib(t["peak_reserved_bytes"]),
                    "allocated_gib": _gib(t["peak_allocated_bytes"]),
                    "non_torch_gib": _gib(t["non_torch_bytes"]),
                    "alloc_retries": t["num_alloc_retries"],
                    "tokens_per_sec": t["tokens_per_sec"] and round(t["tokens_per_sec"]),
                    "micro_batch_secs": t["micro_batch_secs"],
                    "optimizer_secs": t["optimizer_secs"],
                    "seconds": round(t["seconds"], 1),
                }
                for t in record["trials"]
            ],
        )
        for s in record["searched"]:
            speed = s["tokens_per_sec"] and round(s["tokens_per_sec"])
            print(f"    {s['name']}: largest {s['largest']} ({s['stopped_by']}), {speed} tok/s")


def _short(toggles: dict[str, Any]) -> str:
    form = "packed" if toggles["use_remove_padding"] else "padded"
    liger = "liger" if toggles["use_liger"] else "plain"
    return f"{form}-{liger}-{toggles['loss_kernel']}-{toggles['gradient_checkpointing']}"


def launch(options: argparse.Namespace, rows: Rows) -> None:
    """The tuned run of each card, end to end."""
    for gpu in options.gpu:
        what = f"launch {gpu}"
        if not rows.has(what):
            _launch(rows, options, what, options.out / gpu, ())


def baseline(options: argparse.Namespace, rows: Rows) -> None:
    """What a popular guide sets: 8 rows padded to 2,048, no Liger, all logits."""
    what = "launch padded 8 x 2048"
    if rows.has(what):
        return
    out = options.out / "guide"
    out.mkdir(exist_ok=True)
    profile = json.loads(_profile(options).read_text())
    config = {
        "data": {
            "train_files": profile["data"]["files"],
            "format": "input_ids",
            "max_length": 2048,
            "pad_to": "max_length",
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 8,
        },
        "model": {
            "path": str(options.model),
            "tokenizer_path": str(options.tokenizer),
            "init": "random",
            "use_remove_padding": False,
            "loss_kernel": "logits",
        },
        "trainer": {
            "device": "cuda",
            "output_dir": str(out / "run"),
            "total_training_steps": 4,
        },
    }
    (out / "guide.yaml").write_text(json.dumps(config))  # JSON is YAML
    _launch(rows, options, what, out, (str(out / "guide.yaml"),))


def _launch(
    rows: Rows, options: argparse.Namespace, what: str, out: Path, extra: tuple[str, ...]
) -> None:
    _, code, command = autobatch("launch", "--out", str(out), *extra, log=options.out / "log.txt")
    path = out / "run" / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steady = steps[2:] or steps
    secs = sum(s["step_secs"] + s["data_wait_secs"] for s in steady)
    rows.add(
        what,
        command,
        exit_code=code,
        num_steps=len(steps),
        tokens_per_sec=round(sum(s["num_tokens"] for s in steady) / secs) if steady else None,
        first_loss=steps[0]["loss"] if steps else None,
        last_loss=steps[-1]["loss"] if steps else None,
        reserved_gib=_gib(max((s["peak_reserved_bytes"] for s in steps), default=None)),
        alloc_retries=sum(s["num_alloc_retries"] for s in steps),
        mfu=steps[-1]["mfu"] if steps else None,
        step_secs=[round(s["step_secs"], 4) for s in steps],
    )


PARTS = {
    "correctness": correctness,
    "checkpointing": checkpointing,
    "laws": laws,
    "toggles": toggles,
    "tune": tune,
    "baseline": baseline,
    "launch": launch,
}


def main() -> None:
    """Run the parts that are named, in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--gpu", action="append", help="card to tune for; may be given again")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a launch")
    options = parser.parse_args()
    options.gpu = options.gpu or ["h200-141g"]
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.out / "rows.jsonl")
    for part in options.parts:
        PARTS[part](options, rows)


if __name__ == "__main__":
    main()
