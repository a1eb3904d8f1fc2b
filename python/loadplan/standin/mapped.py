"""What this process has mapped of files, for tests of what a load touches."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def mapped_bytes(folder: str | Path) -> dict[str, int]:
    """The mapped files below ``folder`` by name, and how many bytes are in memory.

    Counted are the pages that this process has touched, not the page cache.
    """
    found: dict[str, int] = {}
    name = ""
    for line in (_PROC / "self/smaps").read_text(errors="replace").splitlines():
        field, *rest = line.split(maxsplit=5)
        if not field.endswith(":"):
            path = Path(rest[-1] if len(rest) == 5 else "")
            name = path.name if path.is_relative_to(folder) else ""
        elif field == "Rss:" and name:
            found[name] = found.get(name, 0) + int(rest[0]) * 1024
    return found
