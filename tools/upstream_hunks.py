"""Print the part of a patch that changes files of the engine itself, for ``patch``.

    PYTHONPATH=python python tools/upstream_hunks.py ENGINE PATCH

Glue that an earlier patch of the series added lies below python/ in its last form.
"""

from __future__ import annotations

import sys

from loadplan.engines.series import read_patch
from loadplan.engines.stages import changed_files
from loadplan.engines.targets import find_target


def main(engine: str, name: str) -> None:
    target = find_target(engine)
    patch = read_patch(target.patches / name)
    own = changed_files(target, patch)
    for part in patch.diff.split("diff --git ")[1:]:
        if not any(part.startswith(f"a/{path} ") for path in own):
            sys.stdout.write(f"diff --git {part}")


if __name__ == "__main__":
    main(*sys.argv[1:])
