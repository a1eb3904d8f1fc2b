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
from loadplan.engines.stages import added_files, changed_files, own_stages
from loadplan.engines.targets import Target, data_folder
from loadplan.errors import EngineError

_PACKAGE = Path(__file__).parents[1]
# The one package of ours that tests may use: its modules travel with them.
_STANDIN = "loadplan.standin"

# What a person reviews at one sitting; the first mail is the one that is judged by.
_MAIL_LINES = 900
_FIRST_MAIL_LINES = 600

_PROOF_MARKS = ("feature", "guard")


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Added lines of one mail: in existing files, glue, core, tests, docs."""

    hunks: int
    glue: int
    core: int
    tests: int
    docs: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


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
        EngineError: a path is taken upstream, or a mail is larger than its limit.
    """
    series = read_series(target.patches)
    brought: dict[str, str] = {}
    commits = []
    for patch, stage in zip(series, own_stages(target, series), strict=True):
        core, glue = {}, {}
        for path in added_files(target, patch):
            part = (
                core if path.startswith(target.upstream(target.core_folder)) else glue
            )
            part[path] = _with_header(target, stage[path])
        parts = {"core": core, "glue": glue}
        parts |= {"tests": _tests(target, patch), "docs": _docs(target, patch)}
        parts = {
            kind: {path: text for path, text in part.items() if path not in brought}
            for kind, part in parts.items()
        }
        new = {path: text for part in parts.values() for path, text in part.items()}
        brought |= new
        counts = {kind: _count(part) for kind, part in parts.items()}
        own = changed_files(target, patch)
        lines = Lines(hunks=_added(patch, own, inside=False), **counts)
        lines = dataclasses.replace(lines, glue=lines.glue + _added(patch, own))
        commits.append(Commit(patch.title, patch, new, lines))
    _check_paths(target, brought)
    _check_limits(target, commits)
    return commits


def _added(patch: Patch, own: list[str], *, inside: bool = True) -> int:
    """Lines that ``patch`` adds to files of its series, or to all others."""
    count, path = 0, ""
    for line in patch.diff.splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif line.startswith("+"):
            count += (path in own) == inside
    return count


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


def _count(part: dict[str, str]) -> int:
    return sum(len(text.splitlines()) for text in part.values())


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
    for number, commit in enumerate(commits):
        limit = _MAIL_LINES if number else _FIRST_MAIL_LINES
        if commit.lines.total > limit:
            raise EngineError(
                f"{commit.patch.name}: its mail adds {commit.lines.total} lines "
                f"({commit.lines}), expected at most {limit}; split the patch, or name "
                "tests that need not go upstream on lines 'Proofs:'"
            )
    heart = [c for c in commits if c.name in target.limits.heart]
    total = sum(commit.lines.hunks + commit.lines.glue for commit in heart)
    if total >= target.limits.heart_lines:
        raise EngineError(
            f"{', '.join(c.patch.name for c in heart)}: add {total} lines of hunks and "
            f"glue together, expected fewer than {target.limits.heart_lines}; move "
            "code into the core"
        )
