"""``loadplan drafter verify``: a variant checked."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common
from loadplan.commands.drafter.shared import (
    say,
    with_libraries,
)

if TYPE_CHECKING:
    pass


def add(steps: Any) -> None:
    command = common.add_command(
        steps,
        "verify",
        summary="check a variant and that its source is untouched",
        text="Check a variant, one line a check. The exit code is 1 when any fails.",
        example="loadplan drafter verify FAST --source MODEL",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="the variant")
    command.add_argument(
        "--source",
        type=Path,
        metavar="SRC",
        help="also compare it with what it was made from",
    )
    common.add_json(command)
    command.set_defaults(run=with_libraries(_run))


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import verify

    results = verify.verify(arguments.folder, arguments.source)
    held = sum(result.ok for result in results)
    lines = [
        f"{'ok  ' if r.ok else 'FAIL'} {r.name}: {common.shown(r.detail)}"
        for r in results
    ]
    lines.append(f"{held} of {len(results)}")
    about = {
        "held": held,
        "of": len(results),
        "checks": [dataclasses.asdict(result) for result in results],
    }
    say(arguments, about, "\n".join(lines))
    return 0 if held == len(results) else 1
