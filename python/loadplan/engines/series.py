"""A patch series: its headers, its hunks, and how they change a text.

Patches are applied here rather than by ``git apply``, which changes nothing and exits
0 when the target lies in an ignored folder of somebody's repository.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from loadplan.errors import EngineError

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


@dataclasses.dataclass(frozen=True, slots=True)
class Hunk:
    """A change at one place: ``old`` lines, which start at line ``start`` (from 1)."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """One concern: its mail header, its diff and, by upstream path, its hunks."""

    name: str
    header: str
    diff: str
    hunks: dict[str, tuple[Hunk, ...]]

    @property
    def title(self) -> str:
        return self.name.removesuffix(".patch")

    @property
    def tests(self) -> list[str]:
        """Its test files: those that go upstream with it, and the proofs that stay."""
        return [*self.trailers("Tests"), *self.trailers("Proofs")]

    @property
    def author(self) -> str:
        (author,) = self.trailers("From")
        return author

    def trailers(self, key: str) -> list[str]:
        """The values of the header's lines ``KEY: VALUE``, in their order."""
        lines = self.header.splitlines()
        start = f"{key}: "
        return [line.removeprefix(start) for line in lines if line.startswith(start)]


def read_series(folder: Path) -> list[Patch]:
    """The patches in ``folder``, in the order of its series file."""
    return [read_patch(folder / name) for name in series_names(folder)]


def series_names(folder: Path) -> list[str]:
    """The file names that the series file lists."""
    lines = (folder / "series").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and line[0] != "#"]


def read_patch(path: Path) -> Patch:
    """Parse a unified diff with a mail header, as ``git diff`` writes it."""
    header, mark, diff = path.read_text(encoding="utf-8").partition("\ndiff --git ")
    header = header.rstrip("\n") + "\n"
    diff = mark.lstrip("\n") + diff
    hunks: dict[str, list[Hunk]] = {}
    file = ""
    start, old, new = 0, [], []

    def close() -> None:
        if old or new:
            hunks[file].append(Hunk(start=start, old=tuple(old), new=tuple(new)))
            old.clear()
            new.clear()

    for line in diff.splitlines(keepends=True):
        match = _HUNK.match(line)
        if match:
            close()
            start = int(match[1])
        elif line.startswith("+++ b/"):
            close()
            file = line[len("+++ b/") :].strip()
            hunks[file] = []
        elif line.startswith(("diff --git ", "index ", "--- a/")):
            close()
        elif file and line[0] in " -+":
            if line[0] != "+":
                old.append(line[1:])
            if line[0] != "-":
                new.append(line[1:])
    close()
    return Patch(
        name=path.name,
        header=header,
        diff=diff,
        hunks={file: tuple(found) for file, found in hunks.items()},
    )


def apply_hunks(text: str, hunks: tuple[Hunk, ...], *, label: str) -> str:
    """Replace each hunk's old lines, found at exactly its line, by its new ones.

    Raises:
        EngineError: the lines there are others.
    """
    lines = text.splitlines(keepends=True)
    for hunk in reversed(hunks):
        first = hunk.start - 1
        if tuple(lines[first : first + len(hunk.old)]) != hunk.old:
            raise EngineError(
                f"{label}: line {hunk.start} is not what the patch expects; "
                "refresh the patch for this release"
            )
        lines[first : first + len(hunk.old)] = hunk.new
    return "".join(lines)


def reverse_hunks(hunks: tuple[Hunk, ...]) -> tuple[Hunk, ...]:
    """The hunks that take ``hunks`` back."""
    shift, reversed_hunks = 0, []
    for hunk in hunks:
        reversed_hunks.append(Hunk(hunk.start + shift, old=hunk.new, new=hunk.old))
        shift += len(hunk.new) - len(hunk.old)
    return tuple(reversed_hunks)
