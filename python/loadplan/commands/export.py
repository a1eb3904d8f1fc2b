"""``loadplan export``: the patches as mails for upstream."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loadplan.commands import common
from loadplan.engines import targets


def add(commands: Any) -> None:
    summary = "write the patches as mails that upstream's git am takes"
    command = common.add_command(
        commands,
        "export",
        summary=summary,
        text=f"{summary.capitalize()}.\n\nEach is one commit with its glue, core "
        "modules, tests and docs page.",
        example="loadplan export sglang --out build/upstream\n"
        "cd sglang && git am .../build/upstream/*.patch",
    )
    common.add_engine(command)
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder that is empty or absent",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.engines import export

    target = targets.find_target(arguments.engine)
    with common.writing("--out", arguments.out, "name another folder"):
        commits = export.write_export(target, arguments.out)
    print(f"Added lines, for {target.name} {target.version}:")
    print(export.size_table(commits))
    heart = [commit for commit in commits if commit.name in target.rules.limits.heart]
    total = sum(commit.lines.hunks + commit.lines.glue for commit in heart)
    print(
        f"{' and '.join(commit.name for commit in heart)}: {total} lines of hunks and "
        f"glue, below {target.rules.limits.heart_lines}"
    )
    print(f"{arguments.out}: {len(commits)} mails; 'git am {arguments.out}/*.patch'")
    return 0
