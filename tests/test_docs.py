"""What README tells people to type can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from autobatch.cli import main
from autobatch.config.schema import known_keys

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")


def typed(text: str) -> list[str]:
    """Return the commands of a page: lines of `sh` blocks, lines after `$ ` of console blocks."""
    found = []
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        shown = [line for line in lines if kind == "sh" or line.startswith("$ ")]
        found += [line.removeprefix("$ ").split(" #")[0].strip() for line in shown]
    return [line for line in found if line]


def words_of(line: str) -> tuple[str, list[str]]:
    """Return the command and its arguments, without what the shell takes for itself."""
    words = shlex.split(line.split(" > ")[0])
    if words[:2] == ["python", "launch.py"]:
        return "run", words[2:]
    assert "autobatch" == words[0], line
    return words[1], words[2:]


COMMANDS = [line for line in typed(README) if not line.startswith("make ")]


def test_readme_shows_every_command():
    """Each command of the program is shown, so that none is a secret."""
    shown = {words_of(line)[0] for line in COMMANDS} | {"demo"}  # demo by make
    assert set(main.commands) == shown


def test_the_program_has_the_promised_commands():
    """These six are a contract."""
    assert {"profile", "tune", "probe", "launch", "run", "demo"} <= set(main.commands)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_shown_command_can_be_parsed(line):
    """Every command, flag and argument of README is one that the program takes."""
    name, arguments = words_of(line)
    parent = click.Context(main, info_name="autobatch")
    context = main.commands[name].make_context(name, arguments, parent=parent)
    assert name == context.info_name


def test_shown_make_targets_exist():
    """`make demo` and `make test` are the first things a reader types."""
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    shown = {line.split()[1] for line in typed(README) if line.startswith("make ")}
    assert {"demo", "test"} == shown
    assert shown <= targets


def test_the_first_screen_shows_the_two_commands():
    """What it is, and how to see it run, within the first 20 lines."""
    first = "\n".join(README.splitlines()[:20])
    assert ["make demo", "make test"] == [c for c in ("make demo", "make test") if c in first]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """A relative link of a page names a file that is there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [] == [link for link in links if not ((ROOT / page).parent / link).exists()]


@pytest.mark.parametrize("key", sorted(set(re.findall(r"\b[a-z]+\.[a-z_]+(?==)", README))))
def test_a_shown_setting_is_a_setting(key):
    """Every key=value of README names a key of the config."""
    assert key in known_keys()


@pytest.mark.parametrize("name", ["profile", "tune", "probe", "launch", "run", "demo"])
def test_help_says_what_every_option_does(name):
    """No option is without a help text."""
    options = [p for p in main.commands[name].params if isinstance(p, click.Option)]
    assert [] == [option.name for option in options if not option.help]
