"""``loadplan load``: a load through the patched engine, every byte checked."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import engines, patching
from ..errors import EngineError
from ..patching import FileState
from ..units import gib
from . import common

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def add(commands: Any) -> None:
    command = common.add_command(
        commands,
        "load",
        summary="load a checkpoint through the patched engine and check every byte",
        text="Load a checkpoint through the patched engine's own loader and check "
        "every byte.\n\nUses InstantTensor where there is a GPU, else a stub of it.",
        example='loadplan load /data/v41 --engram-config \'{"placement": "cpu"}\'',
    )
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--engine", default="sglang", help="default: sglang")
    command.add_argument(
        "--engine-dir",
        type=Path,
        metavar="DIR",
        help="where the patched engine lies (default: the one this Python imports)",
    )
    common.add_engram_config(command)
    common.add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from .. import load

    load.check_checkpoint(arguments.checkpoint)
    target = engines.find_target(arguments.engine)
    if arguments.engine_dir is not None:
        root = engines.find_root(target, arguments.engine_dir).resolve()
        sys.path.insert(0, str(root))
    else:
        root = common.locate(arguments.engine, None)[1]
    if set(patching.file_states(target, root).values()) != {FileState.PATCHED}:
        raise EngineError(
            f"{root}: {target.name} is not patched, or not wholly; "
            f"'loadplan apply {target.name}' does that"
        )
    with load.open_engine(
        target.name, arguments.checkpoint, engram_config=arguments.engram_config
    ) as engine:
        reader = _reader()
        plan = engine.plan()
        console = Console(quiet=arguments.json)
        console.print(f"InstantTensor: {reader}")
        console.print(f"Engram tables: {engine.tables()}")
        console.print(_plan_table(plan))
        with common.progress_bar() as progress:
            wanted = sum(e.tensor.nbytes for e in load.wanted_entries(plan))
            task = progress.add_task("Loading", total=wanted)
            report = load.run_load(
                engine,
                plan,
                arguments.checkpoint,
                reader=reader,
                arrived=lambda nbytes: progress.advance(task, nbytes),
            )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print_report(console, report)
    if report.wrong:
        print(
            f"ERROR {len(report.wrong)} tensor(s) or file(s) differ from "
            f"{report.reference}: {', '.join(report.wrong[:10])}",
            file=sys.stderr,
        )
        return 1
    return 0


def _reader() -> str:
    import torch

    if not torch.cuda.is_available():
        return "a stub, there is no GPU here"
    version = metadata.version("instanttensor")
    return f"{version} on {torch.cuda.get_device_name()}"


def _plan_table(plan) -> Table:
    from rich.table import Table

    table = Table(title="The plan, from the headers alone")
    for column in ("route", "files", "tensors", "size"):
        table.add_column(column, justify="left" if column == "route" else "right")
    for route, total in plan.totals().items():
        table.add_row(
            route.name, str(total.files), str(total.tensors), gib(total.nbytes)
        )
    return table


def _print_report(console: Console, report) -> None:
    from rich.table import Table

    table = Table(title="What arrived")
    for column in ("route", "files", "tensors", "size", "seconds", "GB/s"):
        table.add_column(column, justify="left" if column == "route" else "right")
    for name, route in report.routes.items():
        if name == "skip":
            continue
        rate = f"{route.nbytes / route.seconds / 1e9:.2f}" if route.seconds else "-"
        table.add_row(
            name.upper(),
            str(route.files),
            str(route.tensors),
            gib(route.nbytes),
            f"{route.seconds:.2f}",
            rate,
        )
    console.print(table)
    stock = gib(report.stock_device_bytes)
    device = report.routes["stream"].nbytes + report.routes["read"].nbytes
    console.print(
        f"On the GPU: {gib(device)}; whole files would put {stock} there. "
        f"{report.seconds:.2f} s with checking."
    )
    verdict = "differs from" if report.wrong else "matches"
    console.print(f"sha256 {report.digest}")
    console.print(f"The digest {verdict} {report.reference}.")
