"""Write a patch series as upstream would take it: one mail per patch, for ``git am``.

A mail holds the patch's hunks and what it needs that upstream does not have: glue, the
core modules that the glue is the first to need, tests with their helpers, a docs page.
All text comes from this package and is put together here, so it is the same each time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from loadplan.engines import prose
from loadplan.engines.series import Patch, read_series
from loadplan.engines.stages import added_files, changed_files, own_stages
from loadplan.engines.targets import Target, data_folder
from loadplan.engines.upstream_tests import upstream_tests, with_header
from loadplan.errors import EngineError

_PACKAGE = Path(__file__).parents[1]
# What a person reviews at one sitting; the first mail is the one that is judged by.
_MAIL_LINES = 900
_FIRST_MAIL_LINES = 600


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
            part[path] = with_header(target, stage[path])
        parts = {"core": core, "glue": glue}
        parts |= {"tests": upstream_tests(target, patch), "docs": _docs(target, patch)}
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


def size_table(commits: Iterable[Commit]) -> str:
    """The added lines of each mail, a row each."""
    kinds = [field.name for field in dataclasses.fields(Lines)]
    rows = ["  " + " ".join(f"{word:>6}" for word in (*kinds, "all")) + "  mail"]
    for commit in commits:
        numbers = (*dataclasses.astuple(commit.lines), commit.lines.total)
        row = " ".join(f"{number:6}" for number in numbers)
        rows.append(f"  {row}  {commit.name}")
    return "\n".join(rows)


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
    if target.rules.signed_off:
        body += f"\n\nSigned-off-by: {commit.patch.author}"
    return (
        f"{header}\n"
        "MIME-Version: 1.0\n"
        "Content-Type: text/plain; charset=UTF-8\n"
        "Content-Transfer-Encoding: 8bit\n\n"
        f"{body}\n\n---\n\n{commit.patch.diff}"
        + "".join(_new_file(path, text) for path, text in sorted(commit.new.items()))
    )


def _docs(target: Target, patch: Patch) -> dict[str, str]:
    pages = {}
    for path in patch.trailers("Docs"):
        name = PurePosixPath(path).stem.replace("-", "_")
        source = data_folder() / path
        text = source.read_text(encoding="utf-8")
        if target.rules.docs_suffix == ".mdx":
            text = prose.to_mdx(text, label=path)
        pages[f"{target.rules.docs_folder}/{name}{target.rules.docs_suffix}"] = text
    return pages


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
        limit = target.rules.limits.hunks_of.get(commit.name, target.rules.limits.hunks)
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
    heart = [c for c in commits if c.name in target.rules.limits.heart]
    total = sum(commit.lines.hunks + commit.lines.glue for commit in heart)
    if total >= target.rules.limits.heart_lines:
        raise EngineError(
            f"{', '.join(c.patch.name for c in heart)}: add {total} lines of hunks and "
            f"glue together, expected fewer than {target.rules.limits.heart_lines}; "
            "move code into the core"
        )
