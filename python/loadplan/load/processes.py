"""What /proc tells: engine processes that use a tree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_PROC = Path("/proc")


def engine_processes(package: str, root: Path) -> list[int]:
    """Process ids of the engine's processes that use ``root``: a best effort.

    Counted are processes whose command line names the engine as a program or a module
    and that have mapped a file below ``root``, or below this Python's environment: an
    editable engine maps nothing of its own, but torch. Never raises.
    """
    name = re.compile(rf"(.*/)?{re.escape(package)}(\..*|::.*)?")
    places = tuple(f" {place}/" for place in {root.resolve(), Path(sys.prefix)})
    # Not /usr, where every process has mapped something.
    places = tuple(place for place in places if place != " /usr/")
    skipped = _own_processes()
    found = []
    for folder in _PROC.glob("[0-9]*"):
        if int(folder.name) in skipped:
            continue
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace")
            words = arguments.replace(" ", "\0").split("\0")
            if not any(name.fullmatch(word) for word in words):
                continue
            maps = (folder / "maps").read_text(errors="replace")
        except OSError:
            continue  # it has ended, or is somebody else's
        if any(place in maps for place in places):
            found.append(int(folder.name))
    return sorted(found)


def _own_processes() -> set[int]:
    """This process and its ancestors, whose command lines may name the engine too."""
    found: set[int] = set()
    process = "self"
    while process not in ("0", ""):
        try:
            stat = (_PROC / process / "stat").read_text(errors="replace")
        except OSError:
            break
        found.add(int(stat.split(" ", 1)[0]))
        process = stat.rpartition(")")[2].split()[1]
    return found
