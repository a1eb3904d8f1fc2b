"""``loadplan drafter variant``: the variant put together."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common
from loadplan.commands.drafter.shared import (
    add_head_name,
    say,
    with_libraries,
)
from loadplan.units import gib

if TYPE_CHECKING:
    pass


def add(steps: Any) -> None:
    command = common.add_command(
        steps,
        "variant",
        summary="a copy of the checkpoint with the new heads, its shards linked",
        text="Put together the variant OUT of SRC. Shards are hard links; the one with "
        "the head and all\nthat a later step may rewrite are files of their own. OUT "
        "appears when it is whole and verified.",
        example="loadplan drafter variant MODEL FAST --head head.st "
        "--draft-head draft.st",
    )
    command.add_argument("source", type=Path, metavar="SRC", help="the checkpoint")
    command.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    command.add_argument(
        "--head", type=Path, required=True, metavar="FILE", help="from 'quantize'"
    )
    command.add_argument(
        "--draft-head",
        type=Path,
        metavar="FILE",
        help="from 'quantize --ids'; it replaces what SRC has of a draft's own",
    )
    command.add_argument(
        "--copy",
        action="store_true",
        help="copy shards that lie on another file system than OUT",
    )
    add_head_name(command)
    common.add_json(command)
    command.set_defaults(run=with_libraries(_run))


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import variant

    plan = variant.make_plan(
        arguments.source,
        arguments.out,
        arguments.head,
        draft_head=arguments.draft_head,
        copy_links=arguments.copy,
        head_name=arguments.head_name,
    )
    with common.progress_bar() as progress:

        def start(step: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(step, total=total)
            return lambda nbytes: progress.advance(task, nbytes)

        results = variant.build(plan, arguments.out, start=start)
    about = {
        "linked": plan.links,
        "copied": plan.copies,
        "rewritten": plan.rewritten,
        "left_out": plan.left_out,
        "copied_bytes": plan.copied_bytes,
        "checks": [dataclasses.asdict(result) for result in results],
    }
    left_out = ", ".join(map(common.shown, plan.left_out)) or "nothing"
    say(
        arguments,
        about,
        f"{arguments.out}: {len(plan.links)} shards linked, {len(plan.rewritten)} "
        f"rewritten, {len(plan.copies)} files copied, {gib(plan.copied_bytes)} of its "
        f"own\nleft out: {left_out}\n{len(results)} of {len(results)} checks hold",
    )
    return 0
