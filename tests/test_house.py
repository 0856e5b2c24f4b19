"""The house stands: imports point down the floors, torch stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "autobatch"


def within(folder: str, *files: str) -> tuple[str, ...]:
    """Return the dotted names of a folder's files inside a room."""
    return tuple(f"{folder}.{file}" for file in files)


# Floors from the ground up; on one floor single-file rooms stand in their order. A room with
# files lists them in the order in which they may import one another; None: any order.
FLOORS: tuple[dict[str, tuple[str, ...] | None], ...] = (
    {
        "errors": (),
        "units": (),
    },
    {  # still words; a room of several files is for the steps above it
        "records": ("lengths", "trials"),
    },
    {
        "storage": ("plain", "files", "places"),
    },
    {  # made of records, written through storage
        "config": ("schema", "spelling", "checks", "loading", "candidates"),
    },
    {
        "plan": ("microbatches", "settings", "epochs", "draws", "worst"),
        "hardware": ("named", "present", "limit", "environment"),
        "model": (),
        "laws": (),
        "oom": (),
        "jobs": ("locks", "processes", "endings", "job"),
    },
    {
        "dataset": (
            *within(
                "rows",
                "__init__",
                "splits",
                "remote",
                "hub_errors",
                "hub",
                "stored",
                "json_lines",
                "text_rows",
                "arrow_rows",
                "sources",
                "files",
                "formats",
                "reading",
                "media",
            ),
            *within(
                "tokens",
                "__init__",
                "samples",
                "patterns",
                "alphabet",
                "bpe",
                "templates",
                "tokenizer_files",
                "tokenizer",
                "spans",
                "turn_by_turn",
                "row_checks",
                "encoding",
                "turns",
                "rendering",
                "workers",
                "render_worker",
                "parallel",
                "truncation",
                "cache",
                "token_checks",
            ),
            *within(
                "lengths",
                "__init__",
                "stats",
                "advice",
                "sampling",
                "drawing",
                "shipped",
                "planning",
                "checks",
                "findings",
                "for_model",
                "facts",
                "interrupting",
                "profiling",
            ),
            "conversion",
        ),
        "engine": (
            *("account", "allocator", "products", "device", "attention", "loss", "activations"),
            *("sharding", "optimizer", "tensors", "liger", "adapters", "weights", "checks"),
            *("language_model", "build", "step", "state"),
        ),
        "reporting": (
            *("sources", "scales", "words", "tables", "cards", "profile_tables", "pictures"),
            *("progress", "fonts", "png", "markup", "charts", "sections", "page", "drawing"),
        ),
    },
    {
        "probing": ("overhead", "roofline", "simulate", "worker", "verify", "answers", "runner"),
        "training": ("loader", "metrics", "guards", "checkpoints", "loop", "__main__"),
        "dialects": ("base", "verl", "trl", "llamafactory", "axolotl"),
    },
    {
        "tuning": (
            *("space", "speed", "objective", "bisect", "result", "schedule", "stepping"),
            *("search", "certificate", "evidence", "verdict"),
        ),
        "preflight": ("rule", "data", "model", "batch", "run", "verl"),
        "launching": (),
        "demo": (),
    },
    {
        "api": (
            *(
                "inputs",
                "machine",
                "profile_command",
                "tune_settings",
                "tune_command",
                "probe_command",
                "certifying",
            ),
            *("continuing", "launch_command", "run_command", "demo_command", "gpus_command"),
        )
    },
    {"__init__": (), "cli": None, "__main__": ()},  # __init__ offers what api holds
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TORCH_FILES = ("engine", "training", "probing.simulate", "probing.worker", "probing.verify")
TORCH_FREE = (
    "probing.answers",
    "probing.runner",
    "tuning",
    "preflight",
    "launching",
    "demo",
    "api",
    "cli",
)
# packages that import torch themselves
TORCH_PACKAGES = {"torch", "peft", "liger_kernel", "flash_attn", "bitsandbytes"}

FILES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py"))
NAMES = [".".join(file.with_suffix("").parts) for file in FILES]


def is_in(name: str, places: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of the places or lies in one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the dotted names a file imports anywhere, except for type checkers.

    Our own files are named without `autobatch.` (`plan.epochs`, a package as `plan.__init__`).
    """
    file = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name != "autobatch")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "autobatch":
            if node.attr != "__version__":  # what `import autobatch` is used for counts
                found.add(f"autobatch.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: write {ast.unparse(node)} as an absolute import"
            for alias in node.names:
                if (node.module, alias.name) != ("autobatch", "__version__"):
                    found.add(f"{node.module}.{alias.name}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(resolve(target) for target in found)


def resolve(target: str) -> str:
    """Return the file of ours that an imported name lives in, or the foreign name unchanged."""
    parts = target.split(".")
    if parts[0] != "autobatch":
        return target
    parts = parts[1:]
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.with_suffix(".py").is_file():
            return ".".join(parts)
        if (path / "__init__.py").is_file():
            return ".".join([*parts, "__init__"])
        parts = parts[:-1]
    return "__init__"


def own_imports(name: str) -> set[str]:
    """Return the files of ours that a file imports."""
    return {target for target in imports_of(name) if target in NAMES}


def is_allowed(importer: str, imported: str) -> bool:
    """Return whether the table lets one file of ours import another."""
    room, _, file = importer.partition(".")
    other_room, _, other_file = imported.partition(".")
    floor, other_floor = FLOOR_OF[room], FLOOR_OF[other_room]
    if room == other_room:
        order = FLOORS[floor][room]
        if order is None or file == "__init__":
            return True
        return file in order and other_file in order[: order.index(file)]
    if floor != other_floor:
        return other_floor < floor
    standing = list(FLOORS[floor])
    is_single_file = not other_file or FLOORS[floor][other_room] is None
    return is_single_file and standing.index(other_room) < standing.index(room)


def reachable_from(name: str) -> set[str]:
    """Return every file of ours that runs when a file and all it imports are imported."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in reached:
            reached.add(current)
            package = f"{current.rpartition('.')[0]}.__init__"
            waiting += [*own_imports(current), *([package] if package in NAMES else [])]
    return reached


def imports_torch(name: str) -> bool:
    """Return whether a file names torch, or a package that brings it, in an import."""
    return any(
        target.split(".")[0] in TORCH_PACKAGES or target.startswith("safetensors.torch")
        for target in imports_of(name)
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_file_has_its_place_in_the_house(name):
    """A file belongs to a room of the table, and to the list of that room."""
    room, _, file = name.partition(".")
    assert room in FLOOR_OF
    order = FLOORS[FLOOR_OF[room]][room]
    assert order is None or file == "__init__" or file in (order or ("",))


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down_the_floors(name):
    """A file imports lower floors, single-file rooms before its own, files above it."""
    assert [] == sorted(t for t in own_imports(name) if not is_allowed(name, t))


@pytest.mark.parametrize("name", NAMES)
def test_torch_is_imported_only_where_gradients_are_made(name):
    """torch belongs to engine, training, and the children of probing."""
    assert is_in(name, TORCH_FILES) or not imports_torch(name)


@pytest.mark.parametrize("name", [name for name in NAMES if is_in(name, TORCH_FREE)])
def test_parents_reach_no_torch(name):
    """Nothing that a parent process imports, however far down, imports torch."""
    assert [] == sorted(file for file in reachable_from(name) if imports_torch(file))


@pytest.mark.parametrize("name", NAMES)
def test_files_stay_short(name):
    """A file past 300 lines holds two ideas."""
    file = PACKAGE.joinpath(*name.split(".")).with_suffix(".py")
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 300


def test_no_room_bears_the_name_of_a_public_function():
    """`import autobatch.launch` would shadow `autobatch.launch()`."""
    file = PACKAGE / "api" / "__init__.py"
    functions = {
        alias.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.islower()
    }
    assert {"launch", "probe", "profile", "run", "tune", "demo", "gpus"} == functions
    # api.demo chains the commands on what the room demo writes; it is called as api.demo
    assert set() == (functions & set(FLOOR_OF)) - {"demo"}


def test_the_command_line_brings_no_torch():
    """`autobatch --help` answers at once."""
    code = "import autobatch.cli, sys; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert ("False\n", "") == (answer.stdout, answer.stderr)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("plan.epochs", "errors", True),
        ("plan.epochs", "plan.microbatches", True),
        ("plan.microbatches", "plan.epochs", False),
        ("plan.epochs", "plan.__init__", False),
        ("plan.epochs", "model", False),
        ("laws", "model", True),
        ("model", "laws", False),
        ("model", "plan.epochs", False),
        ("errors", "plan.epochs", False),
        ("demo", "launching", True),
        ("demo", "tuning.search", False),
        ("cli.main", "api.inputs", True),
        ("api.inputs", "cli.main", False),
    ],
)
def test_the_table_is_read_as_written(importer, imported, allowed):
    """Lower floors, earlier single-file rooms, files above: nothing else."""
    assert allowed == is_allowed(importer, imported)
