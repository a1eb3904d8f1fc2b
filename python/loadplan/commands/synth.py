"""``loadplan synth``: a checkpoint in the shape of DeepSeek-V4.1."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loadplan.commands import common, numbers
from loadplan.units import gib


def add(commands: Any) -> None:
    command = common.add_command(
        commands,
        "synth",
        summary="make a checkpoint in the shape of DeepSeek-V4.1",
        text="Make a checkpoint in the shape of DeepSeek-V4.1: its names, dtypes and "
        "files.\n\nEvery byte follows from --seed, so that a load can be checked "
        "without it.",
        example="loadplan synth /data/v41 --size 24G --mixed-engram",
    )
    command.add_argument("out", type=Path, help="a folder that is empty or absent")
    command.add_argument(
        "--size",
        type=numbers.size("8M", "4T"),
        default="64M",
        help="of all tensors, like 64M (the default)",
    )
    command.add_argument(
        "--engram-fraction",
        type=numbers.fraction(0.05, 0.9),
        metavar="F",
        default=0.4,
        help="share of it in the Engram tables, 0.05 to 0.9 (default: 0.4)",
    )
    command.add_argument(
        "--seed", type=numbers.whole(0, (1 << 64) - 1), default=0, help="default: 0"
    )
    command.add_argument(
        "--shards", type=numbers.whole(1, 100_000), help="how many files"
    )
    command.add_argument(
        "--mixed-engram",
        action="store_true",
        help="put the Engram tables into files that hold other tensors too",
    )
    command.add_argument("--no-index", action="store_true")
    command.add_argument("--no-draft", action="store_true")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.synth.layout import layout
    from loadplan.synth.options import SynthOptions
    from loadplan.synth.writer import synthesize

    options = SynthOptions(
        size=arguments.size,
        engram_fraction=arguments.engram_fraction,
        seed=arguments.seed,
        mixed_engram=arguments.mixed_engram,
        index=not arguments.no_index,
        draft=not arguments.no_draft,
        shards=arguments.shards,
    )
    shards = layout(options)
    total = sum(shard.nbytes for shard in shards)
    with (
        common.writing("OUT", arguments.out, "name another folder"),
        common.progress_bar() as progress,
    ):
        task = progress.add_task("Writing", total=total)
        synthesize(
            arguments.out,
            options,
            progress=lambda nbytes: progress.advance(task, nbytes),
        )
    print(f"{arguments.out}: {len(shards)} shards, {gib(total)}, seed {options.seed}")
    return 0
