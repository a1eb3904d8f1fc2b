"""Write a patch series as upstream would take it: one mail per patch, for ``git am``.

A mail holds the patch's hunks and what it needs that upstream does not have: glue, the
core modules that the glue is the first to need, tests with their helpers, a docs page.
All text comes from this package and is put together here, so it is the same each time.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from pathlib import Path, PurePosixPath

from loadplan.engines import prose
from loadplan.engines.series import Patch, read_series
from loadplan.engines.targets import Target, data_folder
from loadplan.errors import EngineError

_PACKAGE = Path(__file__).parents[1]
# The one package of ours that tests may use: its modules travel with them.
_STANDIN = "loadplan.standin"
_PROOF_MARKS = ("feature", "guard")


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Added production lines: in existing files, in glue, in core modules."""

    hunks: int
    glue: int
    core: int


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """One patch as upstream gets it; ``new`` maps upstream paths to their text."""

    name: str
    patch: Patch
    new: dict[str, str]
    lines: Lines


def plan_export(target: Target) -> list[Commit]:
    """The upstream series of ``target``; nothing is written.

    Raises:
        EngineError: a path is taken upstream, or a patch is larger than its limit.
    """
    brought: dict[str, str] = {}
    commits = []
    for patch in read_series(target.patches):
        glue = _glue(target, patch)
        core = _core(target, glue)
        parts = glue | core | _tests(target, patch) | _docs(target, patch)
        new = {path: text for path, text in parts.items() if path not in brought}
        lines = Lines(
            hunks=sum(
                line.startswith("+") and not line.startswith("+++ ")
                for line in patch.diff.splitlines()
            ),
            glue=_count(glue, new),
            core=_count(core, new),
        )
        brought |= new
        commits.append(Commit(patch.name.removesuffix(".patch"), patch, new, lines))
    _check_paths(target, brought)
    _check_limits(target, commits)
    return commits


def write_export(target: Target, out: Path) -> list[Commit]:
    """Write the mails to ``out``, a folder that is empty or absent.

    What the series asks for beyond its patches stands in a cover letter, where the
    engine has one.

    Raises:
        EngineError: the folder holds something, or the series is not fit.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EngineError(f"{out}: expected an empty folder or none; name another one")
    commits = plan_export(target)
    out.mkdir(parents=True, exist_ok=True)
    for number, commit in enumerate(commits, start=1):
        text = mail(target, commit, number=number, total=len(commits))
        path = out / f"{number:04}-{commit.name}.patch"
        path.write_text(text, encoding="utf-8", newline="\n")
    letter = target.patches / "cover-letter.txt"
    if letter.is_file():
        (out / "0000-cover-letter.txt").write_bytes(letter.read_bytes())
    return commits


def mail(target: Target, commit: Commit, *, number: int, total: int) -> str:
    """The commit in the form that ``git format-patch`` writes and ``git am`` reads."""
    header, _, body = commit.patch.header.partition("\n\n")
    # The trailers behind it are this project's bookkeeping.
    body = body.partition("\nApplies-To: ")[0].strip()
    header = header.replace("[PATCH]", f"[PATCH {number}/{total}]")
    if target.signed_off:
        body += f"\n\nSigned-off-by: {commit.patch.author}"
    return (
        f"{header}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n\n"
        f"{body}\n\n---\n\n{commit.patch.diff}"
        + "".join(_new_file(path, text) for path, text in sorted(commit.new.items()))
    )


def _glue(target: Target, patch: Patch) -> dict[str, str]:
    core = target.upstream(target.core_folder) + "/"
    paths = [path for path in patch.trailers("Adds") if path != core]
    source = data_folder() / "python"
    return {
        path: _licensed(target, source / path.removeprefix(target.prefix))
        for path in paths
    }


def _core(target: Target, glue: dict[str, str]) -> dict[str, str]:
    """The core modules that ``glue`` imports, with all that they import themselves."""
    package = target.core_folder.replace("/", ".")
    wanted = []
    for text in glue.values():
        for module, names in _imports(text):
            if f"{module}.".startswith(f"{package}."):
                wanted += ["__init__", *module.removeprefix(package)[1:].split(".")]
                wanted += names
    found: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        file = _PACKAGE / "core" / f"{name}.py"
        path = target.upstream(f"{target.core_folder}/{name}.py")
        if path in found or not name or not file.is_file():
            continue
        found[path] = _licensed(target, file)
        for module, names in _imports(file.read_text(encoding="utf-8")):
            if module.startswith("."):
                wanted += [module[1:], *names]
    return found


def _tests(target: Target, patch: Patch) -> dict[str, str]:
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
        name: f"{target.helper_package}.{name.rpartition('.')[2]}"
        for name in helpers
        if not name.startswith(".")
    }
    texts = {
        upstream_path(target, path): _upstream_test(target, file, moved)
        for path, file in files.items()
    }
    folder = target.helper_folder
    for source in helpers.values():
        texts[f"{folder}/{source.name}"] = _upstream_test(target, source, moved)
    if helpers:
        package = '"""Fakes for tests of model loading."""\n'
        texts[f"{folder}/__init__.py"] = _with_header(target, package)
    return texts


def upstream_path(target: Target, test: str) -> str:
    """Where upstream would hold a test file of ours."""
    name = test.removeprefix(f"{target.tests_folder}/")
    return f"{target.upstream_tests_folder}/{name}"


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


def _docs(target: Target, patch: Patch) -> dict[str, str]:
    pages = {}
    for path in patch.trailers("Docs"):
        name = PurePosixPath(path).stem.replace("-", "_")
        source = data_folder() / path
        text = source.read_text(encoding="utf-8")
        if target.docs_suffix == ".mdx":
            text = prose.to_mdx(text, label=path)
        pages[f"{target.docs_folder}/{name}{target.docs_suffix}"] = text
    return pages


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


def _licensed(target: Target, file: Path) -> str:
    return _with_header(target, file.read_text(encoding="utf-8"))


def _with_header(target: Target, text: str) -> str:
    if text.startswith(target.licence_header):
        return text
    return f"{target.licence_header}\n\n{text}"


def _upstream_test(target: Target, file: Path, moved: dict[str, str]) -> str:
    """A test or helper without the marks of our proof, its helpers found upstream."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for first, last in reversed(_proof_marks("".join(lines))):
        del lines[first - 1 : last]
    if "pytest" not in _names("".join(lines)):
        lines = [line for line in lines if line != "import pytest\n"]
    for old, new in moved.items():
        lines = _move_import(lines, old, new, engine=target.package)
    return _with_header(target, "".join(lines))


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


def _new_file(path: str, text: str) -> str:
    content = text.encode()
    # git's name of a blob.
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    lines = text.splitlines(keepends=True)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
        f"index {'0' * 40}..{blob}\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}" for line in lines)
    )


def _count(part: dict[str, str], new: dict[str, str]) -> int:
    return sum(len(text.splitlines()) for path, text in part.items() if path in new)


def _check_paths(target: Target, new: dict[str, str]) -> None:
    """Refuse a new file where upstream has one, in any of the copies that were seen."""
    file = target.patches / "upstream-paths.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    taken = {line.strip() for line in lines if not line.startswith("#")}
    for path in sorted(new):
        if path in taken:
            raise EngineError(
                f"{path}: upstream has a file of this name ({file.name}), expected a "
                "name of our own; rename ours"
            )


def _check_limits(target: Target, commits: list[Commit]) -> None:
    for commit in commits:
        limit = target.limits.hunks_of.get(commit.name, target.limits.hunks)
        if commit.lines.hunks >= limit:
            raise EngineError(
                f"{commit.patch.name}: adds {commit.lines.hunks} lines to existing "
                f"files, expected fewer than {limit}; move code into the glue"
            )
    heart = [c for c in commits if c.name in target.limits.heart]
    total = sum(commit.lines.hunks + commit.lines.glue for commit in heart)
    if total >= target.limits.heart_lines:
        raise EngineError(
            f"{', '.join(c.patch.name for c in heart)}: add {total} lines of hunks and "
            f"glue together, expected fewer than {target.limits.heart_lines}; move "
            "code into the core"
        )
