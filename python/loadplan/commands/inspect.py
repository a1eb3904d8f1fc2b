"""``loadplan inspect``: where a checkpoint's bytes will go and whether they fit."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, numbers, terminal
from loadplan.units import gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from loadplan.checkpoint.estimates import Memory
    from loadplan.checkpoint.oddities import Oddity
    from loadplan.inspection.loads import Inspection, Load

_SHOWN_FILES = 3
_GOES = {
    "skip": "nowhere",
    "host": "stays in host memory",
    "read": "to the GPU, read apart",
    "stream": "to the GPU, whole files",
}


def add(commands: Any) -> None:
    command = common.add_command(
        commands,
        "inspect",
        summary="say where a checkpoint's bytes will go and whether they fit",
        text="Say where a checkpoint's bytes will go and whether they fit, from the "
        "headers of its\nfiles alone: no engine, no GPU, nothing is loaded.\n\n"
        "'stock' is the unpatched engine with --load-format instanttensor. Memory is "
        "an\nestimate: matrices count as split over the GPUs, the KV cache is not "
        "in it.",
        example="loadplan inspect /data/v41 --tp 8 --gpu-memory 96G --host-memory 512G"
        "\nloadplan inspect /data/v41 --draft dspark --plot plan.png",
    )
    command.add_argument(
        "checkpoint",
        type=Path,
        nargs="+",
        metavar="CKPT",
        help="a folder, or files of one folder",
    )
    common.add_machine(command)
    for place, holder in (("gpu", "one GPU"), ("host", "one host")):
        command.add_argument(
            f"--{place}-memory",
            type=numbers.size("1M", "1048576T"),
            metavar="SIZE",
            help=f"free memory of {holder}, like 96G",
        )
    common.add_json(command)
    command.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)"
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.inspection.loads import Hardware, inspect

    if arguments.plot is not None:
        from loadplan.inspection import plot

        plot.check(arguments.plot)
    with _no_collection():
        inspection = inspect(
            arguments.checkpoint,
            machine=Hardware(
                tp=arguments.tp,
                nodes=arguments.nodes,
                gpu_memory=arguments.gpu_memory,
                host_memory=arguments.host_memory,
            ),
            engram_config=arguments.engram_config,
            draft=arguments.draft,
        )
    if arguments.json:
        print(json.dumps(_json(inspection), indent=2))
    else:
        _show(terminal.console(), inspection)
    if arguments.plot is not None:
        with common.writing("--plot", arguments.plot, "name another file"):
            plot.draw(inspection, arguments.plot)
        print(f"{arguments.plot}: drawn", file=sys.stderr)
    if inspection.verdict("plan") is False:
        print(
            "ERROR it does not fit with loadplan either, see above; use more GPUs or "
            "hosts, or another --engram-config",
            file=sys.stderr,
        )
        return 1
    return 0


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # A checkpoint has 100,000 headers that all stay: looking for garbage among them,
    # again and again, takes as long as everything else.
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _json(inspection: Inspection) -> dict[str, Any]:
    report = dataclasses.asdict(inspection)
    for load, shown in zip(inspection.loads, report["loads"], strict=True):
        for key in ("stock_gpu", "plan_gpu", "stock_host", "plan_host"):
            memory = getattr(load, key)
            shown[key] |= {"total": memory.total, "fits": memory.fits}
    report["fits"] = {side: inspection.verdict(side) for side in ("stock", "plan")}
    return report


def _show(console: Console, inspection: Inspection) -> None:
    machine = inspection.machine
    index = "with an index" if inspection.indexed else "without an index"
    console.print(
        f"{inspection.checkpoint}: {inspection.files} files, {inspection.tensors} "
        f"tensors, {gib(inspection.nbytes)}, {index}",
        soft_wrap=True,
    )
    console.print(f"Engram tables: {inspection.placement}")
    for load in inspection.loads:
        console.print(
            f"\nThe {load.what}: stock streams {gib(load.stock_bytes)} to each GPU, "
            f"loadplan {gib(load.device_bytes)}"
        )
        console.print(_routes(load))
    if inspection.draft is not None:
        from loadplan.inspection.loads import DRAFTS

        console.print(
            f"The draft is told by the checkpoint's naming ({DRAFTS[inspection.draft]})"
            "; when it loads, the engine's own filter decides."
        )
    gpus = "1 GPU" if machine.tp == 1 else f"{machine.tp} GPUs"
    hosts = "1 host" if machine.nodes == 1 else f"{machine.nodes} hosts"
    console.print(f"\nMemory at the load's peak, {gpus} in {hosts}")
    console.print(_memory(inspection))
    for text in _problems(inspection):
        console.print(text)
    console.print("\nThe largest tensors")
    console.print(_largest(inspection))
    if not inspection.oddities:
        console.print("\nNothing odd found.")
        return
    console.print("\nOdd things, and what is done about them")
    for oddity in inspection.oddities:
        _show_oddity(console, oddity)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        justify = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _routes(load: Load) -> Table:
    numbers = ("files", "tensors", "size")
    table = _table("route", *numbers, "goes", right=numbers)
    for route, total in load.routes.items():
        table.add_row(
            route.upper(),
            str(total.files),
            str(total.tensors),
            gib(total.nbytes),
            _GOES[route],
        )
    return table


def _memory(inspection: Inspection) -> Table:
    sides = ("stock", "loadplan")
    table = _table("", *sides, right=sides)
    for load in inspection.loads:
        for place in ("GPU", "host"):
            stock = getattr(load, f"stock_{place.lower()}")
            plan = getattr(load, f"plan_{place.lower()}")
            where = f"each {place}"
            if load.what != "model":
                where += f", {load.what} after the model"
            table.add_row(where, style="bold")
            for part in stock.parts:
                sizes = (gib(memory.parts[part]) for memory in (stock, plan))
                table.add_row(f"  {part}", *sizes)
            totals = (gib(memory.total) for memory in (stock, plan))
            table.add_row("  together", *totals, end_section=stock.limit is None)
            if stock.limit is not None:
                verdicts = (_verdict(memory) for memory in (stock, plan))
                table.add_row(f"  of {gib(stock.limit)}", *verdicts, end_section=True)
    return table


def _verdict(memory: Memory) -> Text:
    from rich.text import Text

    if memory.fits:
        return Text("fits", style="green")
    return Text("does not fit", style="red")


def _problems(inspection: Inspection) -> Iterator[str]:
    for side, name in (("stock", "stock"), ("plan", "loadplan")):
        for load in inspection.loads:
            for place in ("GPU", "host"):
                memory = getattr(load, f"{side}_{place.lower()}")
                if memory.problem:
                    yield (
                        f"{name}, {load.what}, does not fit on a {place}: "
                        f"{common.shown(memory.breaks)}: {memory.problem}"
                    )


def _largest(inspection: Inspection) -> Table:
    table = _table("tensor", "size", "route", "dtype and shape", right=("size",))
    for large in inspection.largest:
        shape = " x ".join(map(str, large.shape))
        table.add_row(
            common.shown(large.name),
            gib(large.nbytes),
            large.route.upper(),
            f"{large.dtype} {shape}",
        )
    return table


def _show_oddity(console: Console, oddity: Oddity) -> None:
    files = list(oddity.files[:_SHOWN_FILES])
    if len(oddity.files) > _SHOWN_FILES:
        files.append(f"{len(oddity.files) - _SHOWN_FILES} more")
    found = oddity.what
    if oddity.tensors:
        s = "" if oddity.tensors == 1 else "s"
        found += f": {oddity.tensors} tensor{s}, {gib(oddity.nbytes)}"
    console.print(f"- {common.shown(found)}")
    console.print(f"  in {common.shown(', '.join(files))}")
    console.print(f"  -> {oddity.done}")
