"""Options that several commands share."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from autobatch.storage import DEFAULT_OUT

Command = TypeVar("Command", bound=Callable[..., Any])

_LONGEST_SECS = 1e9
KEY_OPTIONS = ("prompt_key", "response_key", "messages_key", "text_key", "tools_key")


class Entry(click.Group):
    """The group of commands: it prints any text on any terminal, and ends as the shell expects."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; what the terminal cannot print is written as an escape."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an interrupt while it still imports is an interrupt too."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo("autobatch: interrupted", err=True)
            raise SystemExit(128 + signal.SIGINT) from error


class Seconds(click.ParamType):
    """A time limit that the clock can count."""

    name = "float"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of seconds; fail for nan, inf and what no clock holds."""
        secs = float(click.FLOAT.convert(value, param, ctx))
        if not abs(secs) <= _LONGEST_SECS:  # nan fails too
            self.fail(f"{value} is no time to wait; give a number of seconds.", param, ctx)
        return secs


class PassThrough(click.Command):
    """A command that keeps what follows `--` apart, for another program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words after the first `--` out before options are read."""
        if "--" in args:
            border = args.index("--")
            ctx.meta["autobatch.passed"] = tuple(args[border + 1 :])
            args = args[:border]
        return super().parse_args(ctx, args)


def _all(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def out_options(command: Command) -> Command:
    """--out and --json."""
    return _all(
        (
            click.option(
                "--out",
                default=DEFAULT_OUT,
                show_default=True,
                metavar="DIR",
                help="Where each command finds what the one before wrote.",
            ),
            click.option(
                "--json", "as_json", is_flag=True, help="Print the record alone, as JSON."
            ),
        ),
        command,
    )


def profile_options(command: Command) -> Command:
    """Whose tokens, and how much is looked at."""
    return _all(
        (
            click.option(
                "--model",
                metavar="DIR",
                help="Model directory or OWNER/NAME; its tokenizer is used.",
            ),
            click.option("--tokenizer", metavar="DIR", help="Tokenizer, if not the model's."),
            click.option(
                "--text-only",
                is_flag=True,
                help="Advise a max_length though rows hold images or the like.",
            ),
            click.option(
                "--turn-by-turn",
                default="sample",
                show_default=True,
                help="all, sample or off: conversations compared with rendering by message.",
            ),
            click.option(
                "--sample",
                type=int,
                metavar="N",
                help="Estimate from about N rows; the longest stay exact.",
            ),
        ),
        command,
    )


def data_options(command: Command) -> Command:
    """How rows become text."""
    return _all(
        (
            click.option(
                "--format",
                default="auto",
                show_default=True,
                help="messages, conversations, question_answer, instruction_output, "
                "prompt_response, text or input_ids; auto: by the columns.",
            ),
            click.option("--prompt-key", metavar="COLUMN", help="Dotted path of the prompt."),
            click.option("--response-key", metavar="COLUMN", help="Dotted path of the response."),
            click.option("--messages-key", metavar="COLUMN", help="Dotted path of the messages."),
            click.option("--text-key", metavar="COLUMN", help="Dotted path of plain text."),
            click.option("--tools-key", metavar="COLUMN", help="Dotted path of tool schemas."),
        ),
        command,
    )


def machine_options(command: Command) -> Command:
    """Where steps are made, and under which limit."""
    return _all(
        (
            click.option(
                "--device",
                help="cuda: the GPU here. cpu: real steps under an exact account of bytes. "
                "Default: cuda where there is one.",
            ),
            click.option(
                "--gpu",
                metavar="NAME",
                help="A card to stay within, e.g. a100-80g; see `autobatch gpus`. Default: the "
                "card here.",
            ),
            click.option(
                "--num-gpus",
                type=int,
                default=1,
                show_default=True,
                help="Data-parallel ranks; more than the GPUs here: one stands for all of them.",
            ),
            click.option(
                "--memory-limit",
                metavar="SIZE",
                help="Most bytes one rank may take, e.g. 6GiB; default: all that is available.",
            ),
            click.option(
                "--headroom", metavar="SIZE", help="Bytes of each rank to keep free, e.g. 1GiB."
            ),
        ),
        command,
    )


def tune_options(command: Command) -> Command:
    """The search and its batch."""
    three = "auto: both are tried."
    return _all(
        (
            click.option("--train-batch-size", type=int, help="Global rows per optimizer step."),
            click.option(
                "--max-length",
                type=int,
                help="Most tokens of a row; default: the longest row, so that nothing is cut.",
            ),
            click.option(
                "--remove-padding",
                default="auto",
                show_default=True,
                help=f"auto, on or off. {three}",
            ),
            click.option(
                "--liger",
                default="auto",
                show_default=True,
                help="auto, on or off: Liger's layers and fused loss. Needs CUDA.",
            ),
            click.option(
                "--gradient-checkpointing",
                default="auto",
                show_default=True,
                help="auto, none, selective, selective_matmul, every_2 or full. auto: tried.",
            ),
            click.option(
                "--search",
                default="bisect",
                show_default=True,
                help="bisect: double until memory ends, then halve to the exact limit.",
            ),
            click.option("--seconds", type=Seconds(), help="Time for the search; default: 600."),
        ),
        command,
    )


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return plain words and `key=value` settings; a path that exists or a URL is plain."""
    plain: list[str] = []
    settings: list[str] = []
    for word in words:
        (
            settings
            if "=" in word and "://" not in word.partition("=")[0] and not os.path.exists(word)
            else plain
        ).append(word)
    return plain, settings
