"""The rooms of the library: imports run one way, and no module is too long to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "python" / "loadplan"
PAGE = ROOT / "docs" / "architecture.md"
LAYERS = PACKAGE / "core" / "LAYERS.toml"
LONGEST = 350

# From the top to the bottom: a room imports from rows below its own. Rooms of one row
# know nothing of each other. The core goes into the engines: it has nothing below it.
ROWS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("doctor",),
    ("inspection", "load"),
    ("checkpoint", "engines", "standin", "synth"),
    ("__init__",),
    ("core", "errors", "suggest", "units"),
)
LEVELS = {room: level for level, row in enumerate(ROWS) for room in row}

Source = tuple[str, str]  # a module like "core.plan", and its text


def sources() -> list[Source]:
    return [
        (
            ".".join(file.relative_to(PACKAGE).with_suffix("").parts),
            file.read_text(encoding="utf-8"),
        )
        for file in sorted(PACKAGE.rglob("*.py"))
    ]


def imports(module: str, text: str) -> list[tuple[str, bool]]:
    """What ``module`` imports of loadplan, by name below it, and whether by dots.

    Imports in functions and for type checkers count like any other.
    """
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found += [(n, False) for n in names if n.partition(".")[0] == "loadplan"]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = ["loadplan", *module.split(".")][: -node.level]
                base = ".".join([*folder, base] if base else folder)
            if base.partition(".")[0] == "loadplan":
                for alias in node.names:
                    found.append((f"{base}.{alias.name}", bool(node.level)))
    return [(name.partition(".")[2] or "__init__", dots) for name, dots in found]


def room_of(module: str) -> str:
    first = module.partition(".")[0]
    # What the package itself offers is a name of its __init__.
    return first if first in LEVELS else "__init__"


def upward(found: Iterable[Source]) -> list[str]:
    """Each import that does not run downwards, in words."""
    faults = []
    for module, text in found:
        room = room_of(module)
        for name, _ in imports(module, text):
            other = room_of(name)
            if other != room and LEVELS[other] <= LEVELS[room]:
                faults.append(f"{module} imports {name}: {room} -> {other}")
    return faults


def relative(found: Iterable[Source]) -> list[str]:
    """Imports by dots outside the core, whose copies lie in other packages."""
    return [
        f"{module} imports {name} by dots"
        for module, text in found
        if room_of(module) != "core"
        for name, dots in imports(module, text)
        if dots
    ]


def out_of_layer(found: Iterable[Source], order: list[str]) -> list[str]:
    """Imports of core modules that are no layer, or not one below their own."""
    faults = []
    for module, text in found:
        room, _, layer = module.partition(".")
        if room != "core" or layer == "__init__":
            continue
        if layer not in order:
            faults.append(f"{module} is no layer")
            continue
        for name, _ in imports(module, text):
            other = name.split(".")[1]
            if other not in order or order.index(other) >= order.index(layer):
                faults.append(f"{module} imports {name}")
    return faults


def test_every_room_has_a_place() -> None:
    """Red when a new folder or module stands beside the rooms."""
    assert {module.partition(".")[0] for module, _ in sources()} == set(LEVELS)


def test_imports_run_one_way() -> None:
    """Red when a room imports from one above it, or from its neighbour."""
    assert upward(sources()) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.plan", "from loadplan.engines import targets"),
        ("core.plan", "from ..units import gib"),
        ("core.plan", "from .. import units"),
        ("core.plan", "def late():\n    import loadplan.cli"),
        ("core.plan", "from loadplan import __version__"),
        ("load.run", "from loadplan.inspection.loads import inspect"),
        ("engines.apply", "if TYPE_CHECKING:\n    from loadplan.load import run"),
        ("standin.gpu", "from loadplan import synth"),
        ("errors", "from loadplan.core import LoadPlanError"),
    ],
)
def test_import_that_runs_upwards_is_found(module: str, text: str) -> None:
    """Red when the check is blind to a way to write an import."""
    (fault,) = upward([(module, text)])
    assert fault.startswith(f"{module} imports ")


def test_imports_that_run_downwards_are_none_of_them() -> None:
    """Red when the check refuses what it is there to allow."""
    text = "from loadplan.core import plan\nfrom loadplan.load import run\nimport os"
    assert upward([("load.sglang", text), ("core.plan", "from .header import x")]) == []


def test_only_the_core_imports_by_dots() -> None:
    """Red when a module outside the core cannot be found by the text of its import."""
    assert relative(sources()) == []
    assert relative([("load.run", "from . import peaks")]) == [
        "load.run imports load.peaks by dots"
    ]
    assert relative([("core.plan", "from . import header")]) == []


MODULES = [pytest.param(module, text, id=module) for module, text in sources()]


@pytest.mark.parametrize(("module", "text"), MODULES)
def test_module_can_be_read_at_one_sitting(module: str, text: str) -> None:
    """Red when a module has more lines than it may: split it by noun."""
    assert len(text.splitlines()) <= LONGEST, module


def test_core_is_built_in_layers() -> None:
    """Red when a core module imports one that an upstream patch brings later."""
    # The lowest layer comes first.
    order = tomllib.loads(LAYERS.read_text(encoding="utf-8"))["order"]
    assert out_of_layer(sources(), order) == []


def test_layer_that_imports_a_later_one_is_found() -> None:
    """Red when the check of the layers sees nothing."""
    order = ["header", "plan", "stream"]
    found = [
        ("core.header", "import os"),
        ("core.plan", "from .stream import run_plan\nfrom .header import read"),
        ("core.stream", "from .plan import LoadPlan\nfrom . import spans"),
        ("core.spans", "from .plan import LoadPlan"),
        ("core.__init__", "from .stream import run_plan"),
    ]
    assert out_of_layer(found, order) == [
        "core.plan imports core.stream.run_plan",
        "core.stream imports core.spans",
        "core.spans is no layer",
    ]


def test_drawing_shows_the_imports_between_rooms() -> None:
    """Red when docs/architecture.md draws other arrows than the imports are."""
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    arrows = {
        (room_of(module), room_of(name))
        for module, text in sources()
        for name, _ in imports(module, text)
    }
    between = {(a, b) for a, b in arrows if a != b and {a, b} <= folders}
    drawn = re.findall(r"^  (\w+) --> (\w+)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(drawn) == sorted(between)


def test_rooms_and_files_that_the_page_names_are_there() -> None:
    """Red when a room has no row, or the page leads to a file that has moved."""
    text = PAGE.read_text("utf-8")
    for file in PACKAGE.glob("*/__init__.py"):
        assert f"| `{file.parent.name}/` |" in text
    for name in re.findall(r"`([\w./-]+\.(?:py|patch|toml|txt))`", text):
        places = [ROOT / name, PACKAGE / name, *(ROOT / "python").rglob(name)]
        assert any(place.is_file() for place in places), name
