"""``loadplan doctor``: whether this machine will carry the load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, numbers, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from loadplan.doctor import Finding

_COLOURS = {"ok": "green", "slow": "yellow", "fails": "red", "not tried": "dim"}


def add(commands: Any) -> None:
    command = common.add_command(
        commands,
        "doctor",
        summary="try what a load needs of this machine",
        text="Try what a load needs of this machine, and say what to change. With a "
        "checkpoint its\nneeds are compared with what there is, as 'loadplan inspect' "
        "tells them. Exit code 1:\nthe load cannot work.",
        example="loadplan doctor\nloadplan doctor /data/v41 --tp 8 --pin 16G",
    )
    command.add_argument(
        "checkpoint",
        type=Path,
        nargs="*",
        metavar="CKPT",
        help="a folder, or files of one folder",
    )
    common.add_machine(command)
    command.add_argument(
        "--pin",
        type=numbers.size("4K", "1024T"),
        default=1 << 30,
        metavar="SIZE",
        help="how much memory to register with CUDA as a trial (default: 1G)",
    )
    common.add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from loadplan import doctor
    from loadplan.checkpoint.placement import parse_placement
    from loadplan.inspection.loads import Hardware

    if arguments.checkpoint:
        need = doctor.need_of(
            arguments.checkpoint,
            machine=Hardware(tp=arguments.tp, nodes=arguments.nodes),
            engram_config=arguments.engram_config,
            draft=arguments.draft,
            pin=arguments.pin,
        )
    else:
        placement = parse_placement(arguments.engram_config, nodes=arguments.nodes)
        need = doctor.Need(
            layout=placement.host_layout,
            pin=arguments.pin,
            ranks=arguments.tp // arguments.nodes,
        )
    findings = doctor.examine(need)
    failed = [found for found in findings if found.verdict is doctor.Verdict.FAILS]
    if arguments.json:
        report = [
            dataclasses.asdict(found) | {"verdict": found.verdict.value}
            for found in findings
        ]
        print(json.dumps({"works": not failed, "findings": report}, indent=2))
    else:
        _show(terminal.console(), findings)
    if failed:
        print(
            "ERROR the load cannot work here: "
            f"{', '.join(found.about for found in failed)}",
            file=sys.stderr,
        )
        return 1
    return 0


def _show(console: Console, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for found in findings:
        verdict = found.verdict.value
        table.add_row(
            Text(verdict, style=_COLOURS[verdict]),
            f"{found.about}: {common.shown(found.result)}",
        )
        table.add_row("", f"tried: {found.tried}")
        table.add_row("", f"means: {found.means}")
        if found.change:
            table.add_row("", f"change: {found.change}")
    console.print(table)
