"""The command line: parse, call one function of `api`, print one record."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Any

import click

import autobatch
from autobatch.cli.options import (
    KEY_OPTIONS,
    Entry,
    PassThrough,
    Seconds,
    data_options,
    machine_options,
    out_options,
    profile_options,
    split_settings,
    tune_options,
)


@click.group(cls=Entry, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(autobatch.__version__, prog_name="autobatch")
def main() -> None:
    """Measured batch settings for fine-tuning language models: profile, tune, launch."""


@main.command("profile")
@click.argument("data", nargs=-1, required=True)
@profile_options
@data_options
@click.option("--no-pictures", is_flag=True, help="Write no profile.png and no profile.html.")
@out_options
def profile_command(
    data: tuple[str, ...],
    model: str | None,
    tokenizer: str | None,
    text_only: bool,
    turn_by_turn: str,
    sample: int | None,
    format: str,
    no_pictures: bool,
    out: str,
    as_json: bool,
    **keys: str | None,
) -> None:
    """Measure token lengths of DATA: files, folders, globs, URLs, data sets of the Hub.

    Example: autobatch profile train.parquet --model ./Qwen2.5-0.5B

    Example: autobatch profile openai/gsm8k:main --model Qwen/Qwen3-0.6B
    """
    from autobatch.api import profile
    from autobatch.cli.screen import Rows, plain_errors, print_result, talk, whole_or_part
    from autobatch.reporting import profile_table

    rows = Rows()
    with (
        plain_errors(rows),
        whole_or_part(lambda part: print_result(part, profile_table(part), as_json=as_json), rows),
    ):
        result = profile(
            data,
            model=model,
            tokenizer=tokenizer,
            format=format,
            keys=_given(keys),
            text_only=text_only,
            turn_by_turn=turn_by_turn,
            sample=sample,
            out=out,
            progress=rows.update,
            pictures=not no_pictures,
            command=shlex.join(["autobatch", *sys.argv[1:]]),
            talk=talk,
        )
        rows.close()
        print_result(result, profile_table(result), as_json=as_json)


@main.command("tune")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", metavar="DIR", help="Model directory; default: the profile's.")
@click.option(
    "--profile",
    metavar="FILE|NAME",
    help="Profile, or the name of a shipped one (gsm8k, ...) to tune without data. Default: the "
    "one in --out.",
)
@machine_options
@tune_options
@out_options
def tune_command(settings: tuple[str, ...], as_json: bool, search: str, **arguments: Any) -> None:
    """Find the fastest batch settings that fit, by real steps, and write tuned.yaml.

    Example: autobatch tune --device cpu --memory-limit 6GiB
    """
    from autobatch.api import tune
    from autobatch.cli.screen import Rows, plain_errors, print_result, say_trial, talk
    from autobatch.cli.views import tune_record, tune_view

    rows = Rows()
    with plain_errors(rows):
        report = tune(
            **arguments,
            search_by=search,
            overrides=settings,
            talk=talk,
            on_trial=say_trial,
            progress=rows.update,
        )
        print_result(tune_record(report), tune_view(report), as_json=as_json)


@main.command("probe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", metavar="DIR", required=True, help="Model directory; needs no weights.")
@click.option("--length", type=int, required=True, help="Tokens of each row.")
@click.option("--tokens", type=int, help="Tokens of a packed micro-batch.")
@click.option("--micro-batch-size", type=int, help="Rows of a padded micro-batch.")
@click.option("--seconds", type=Seconds(), help="Most time for it; default: 900.")
@machine_options
@out_options
def probe_command(settings: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    """Step one candidate for real: does it fit, how fast is it?

    Example: autobatch probe --model ./Qwen2.5-0.5B --tokens 4096 --length 512 --device cpu
    """
    from autobatch.api import probe
    from autobatch.cli.screen import plain_errors, print_result, talk
    from autobatch.cli.views import probe_record, probe_view
    from autobatch.records import fits

    with plain_errors():
        trial = probe(**arguments, overrides=settings, talk=talk)
        print_result(probe_record(trial), probe_view(trial), as_json=as_json)
        if not fits(trial):
            raise SystemExit(3 if trial.outcome in ("oom", "ok") else 1)


@main.command("launch", cls=PassThrough)
@click.argument("words", nargs=-1, metavar="[tuned.yaml] [KEY=VALUE]... [-- TORCHRUN ARGS]")
@click.option("--dry-run", is_flag=True, help="Check everything, start nothing.")
@click.option(
    "--print-command", is_flag=True, help="Write its config, print the command; train nothing."
)
@click.option(
    "--on-stale",
    default="refuse",
    show_default=True,
    help="refuse or warn, when the config no longer describes what is here.",
)
@out_options
@click.pass_context
def launch_command(
    ctx: click.Context,
    words: tuple[str, ...],
    dry_run: bool,
    print_command: bool,
    on_stale: str,
    out: str,
    as_json: bool,
) -> None:
    """Train a tuned config, or continue its run.

    Example: autobatch launch autobatch-out/tuned.yaml optim.lr=2e-5
    """
    from autobatch.api import launch
    from autobatch.cli.screen import Rows, Steps, plain_errors, print_result, talk
    from autobatch.cli.views import launch_record, launch_view
    from autobatch.errors import ConfigError

    rows, steps = Rows(), Steps()
    with plain_errors(rows, steps):
        plain, settings = split_settings(words)
        if len(plain) > 1:
            raise ConfigError(f"{plain[1]!r} is a second config; give one, and key=value settings")
        report = launch(
            plain[0] if plain else None,
            overrides=settings,
            out=out,
            torchrun_args=ctx.meta.get("autobatch.passed", ()),
            dry_run=dry_run,
            print_command=print_command,
            on_stale=on_stale,
            talk=talk,
            on_row=steps.update,
            on_start=steps.start,
            progress=rows.update,
        )
        steps.close()
        if as_json or report.finished:
            print_result(launch_record(report), launch_view(report), as_json=as_json)
        else:
            talk("nothing was started; the command is:")
            click.echo(report.command)


@main.command("run", cls=PassThrough)
@click.argument("words", nargs=-1, required=True, metavar="DATA... [KEY=VALUE]...")
@click.option("--model", metavar="DIR", required=True, help="Model directory with weights.")
@click.option("--tokenizer", metavar="DIR", help="Tokenizer directory, if not the model's.")
@data_options
@machine_options
@tune_options
@out_options
@click.pass_context
def run_command(
    ctx: click.Context,
    words: tuple[str, ...],
    as_json: bool,
    search: str,
    **arguments: Any,
) -> None:
    """Profile DATA, tune, launch: the whole job.

    Example: autobatch run train.parquet --model ./SmolLM2-135M --device cpu
    """
    from autobatch.api import run
    from autobatch.cli.screen import Rows, Steps, callbacks, plain_errors, print_result
    from autobatch.cli.views import run_record, run_view
    from autobatch.errors import ConfigError

    rows, steps = Rows(), Steps()
    with plain_errors(rows, steps):
        data, settings = split_settings(words)
        if not data:
            raise ConfigError("no data file is given; name parquet or jsonl files first")
        keys = {name: arguments.pop(name) for name in KEY_OPTIONS}
        report = run(
            data,
            keys=_given(keys),
            overrides=settings,
            torchrun_args=ctx.meta.get("autobatch.passed", ()),
            search_by=search,
            progress=rows.update,
            **callbacks(rows, steps, quiet=as_json),
            **arguments,
        )
        steps.close()
        print_result(run_record(report), run_view(report), as_json=as_json)


@main.command("demo")
@click.option(
    "--out", default="demo-out", show_default=True, metavar="DIR", help="Where everything goes."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record alone, as JSON.")
def demo_command(out: str, as_json: bool) -> None:
    """Run the whole pipeline on a small example that it makes itself, on two CPU processes.

    Example: autobatch demo
    """
    from autobatch.api import demo
    from autobatch.cli.screen import Rows, Steps, callbacks, plain_errors, print_result, talk
    from autobatch.cli.views import run_record, run_view

    began = time.monotonic()
    rows, steps = Rows(), Steps()
    with plain_errors(rows, steps):
        report = demo(out=out, **callbacks(rows, steps, quiet=as_json))
        steps.close()
        print_result(run_record(report), run_view(report), as_json=as_json)
        talk(f"demo_secs={time.monotonic() - began:.1f}")


@main.command("gpus")
@click.option("--json", "as_json", is_flag=True, help="Print the record alone, as JSON.")
def gpus_command(as_json: bool) -> None:
    """List the cards known by name, then the GPUs that are here.

    Example: autobatch gpus
    """
    from autobatch.api import gpus
    from autobatch.cli.screen import plain_errors, print_result
    from autobatch.cli.views import gpus_record, gpus_view

    with plain_errors():
        report = gpus()
        print_result(gpus_record(report), gpus_view(report), as_json=as_json)


def _given(keys: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in keys.items() if value is not None}
