"""A patch's tests as upstream gets them: without our marks, helpers apart."""

from __future__ import annotations

import ast
from pathlib import Path

from loadplan.engines.series import Patch
from loadplan.engines.targets import Target, data_folder
from loadplan.errors import EngineError

_PACKAGE = Path(__file__).parents[1]

# The one package of ours that tests may use: its modules travel with them.
_STANDIN = "loadplan.standin"

_PROOF_MARKS = ("feature", "guard")


def upstream_tests(target: Target, patch: Patch) -> dict[str, str]:
    """The test files of ``patch`` and the helper modules that they import.

    Helpers go into the engine's package of test helpers: its collection of tests takes
    every file beside them for a test.
    """
    files = {path: data_folder() / path for path in patch.trailers("Tests")}
    helpers: dict[str, Path] = {}
    waiting = list(files.values())
    while waiting:
        file = waiting.pop()
        for name, source in _helpers(file).items():
            if name not in helpers:
                helpers[name] = source
                waiting.append(source)
    moved = {
        name: f"{target.rules.helper_package}.{name.rpartition('.')[2]}"
        for name in helpers
        if not name.startswith(".")
    }
    texts = {
        upstream_path(target, path): _upstream_test(target, file, moved)
        for path, file in files.items()
    }
    folder = target.rules.helper_folder
    for source in helpers.values():
        texts[f"{folder}/{source.name}"] = _upstream_test(target, source, moved)
    if helpers:
        package = '"""Fakes for tests of model loading."""\n'
        texts[f"{folder}/__init__.py"] = with_header(target, package)
    return texts


def upstream_path(target: Target, test: str) -> str:
    """Where upstream would hold a test file of ours."""
    name = test.removeprefix(f"{target.rules.tests_folder}/")
    return f"{target.rules.upstream_tests_folder}/{name}"


def _helpers(file: Path) -> dict[str, Path]:
    """By the name it is imported by, each module of ours that ``file`` imports."""
    found = {}
    for module, names in _imports(file.read_text(encoding="utf-8")):
        candidates = [module]
        if module == _STANDIN:
            candidates = [f"{module}.{name}" for name in names]
        for name in candidates:
            if name.startswith(f"{_STANDIN}."):
                source = _PACKAGE / "standin" / f"{name.rpartition('.')[2]}.py"
            else:
                source = file.parent / f"{name}.py"
            if source.is_file():
                found[name] = source
            elif name.startswith("loadplan"):
                raise EngineError(
                    f"{file}: imports {name!r}, which the engine's own repository does "
                    "not have; tests import single modules of loadplan"
                )
    return found


def _imports(text: str) -> list[tuple[str, list[str]]]:
    """Each import of a module: its name, with dots in front, and the names taken."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append((module, [alias.name for alias in node.names]))
    return found


def with_header(target: Target, text: str) -> str:
    if text.startswith(target.rules.licence_header):
        return text
    return f"{target.rules.licence_header}\n\n{text}"


def _upstream_test(target: Target, file: Path, moved: dict[str, str]) -> str:
    """A test or helper without the marks of our proof, its helpers found upstream."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for first, last in reversed(_proof_marks("".join(lines))):
        del lines[first - 1 : last]
    if "pytest" not in _names("".join(lines)):
        lines = [line for line in lines if line != "import pytest\n"]
    for old, new in moved.items():
        lines = _move_import(lines, old, new, engine=target.package)
    return with_header(target, "".join(lines))


def _proof_marks(text: str) -> list[tuple[int, int]]:
    """First and last line of each decorator that only our proof reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", ()):
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = ast.unparse(call)
            if name in [f"pytest.mark.{mark}" for mark in _PROOF_MARKS]:
                found.append((decorator.lineno, decorator.end_lineno))
    return sorted(found)


def _names(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def _move_import(lines: list[str], old: str, new: str, *, engine: str) -> list[str]:
    """Let ``from OLD import`` say NEW, at its sorted place among imports like it."""
    tree = ast.parse("".join(lines))
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    for node in nodes:
        if node.module != old:
            continue
        block = lines[node.lineno - 1 : node.end_lineno]
        block[0] = block[0].replace(f"from {old} import", f"from {new} import", 1)
        peers = _peers(tree, engine=engine, own=_top(new) == engine)
        if not peers:
            return [*lines[: node.lineno - 1], *block, *lines[node.end_lineno :]]
        later = [p for p in peers if isinstance(p, ast.ImportFrom) and p.module > new]
        place = later[0].lineno - 1 if later else peers[-1].end_lineno
        rest = list(lines)
        rest[place:place] = block
        start = node.lineno - 1 + (len(block) if place < node.lineno else 0)
        end = start + len(block)
        # A block of imports that is empty now takes its blank line along.
        alone = rest[start - 1] == "\n" and rest[end] == "\n"
        del rest[start : end + alone]
        return rest
    return lines


def _top(module: str) -> str:
    return module.partition(".")[0]


def _peers(
    tree: ast.Module, *, engine: str, own: bool
) -> list[ast.Import | ast.ImportFrom]:
    """The engine's own imports, or else the block of imports before them."""
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    tops = [
        _top(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name)
        for n in imports
    ]
    if own:
        return [n for n, top in zip(imports, tops, strict=True) if top == engine]
    # Our own modules stand beside the engine's.
    firsts = [tops.index(top) for top in (engine, "loadplan") if top in tops]
    end = min(firsts, default=len(imports))
    block = [imports[end - 1]]
    for node in reversed(imports[: end - 1]):
        if node.end_lineno + 1 != block[0].lineno:
            break
        block.insert(0, node)
    return block
