"""``loadplan load``: a load through the patched engine, every byte checked."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, terminal
from loadplan.engines import targets
from loadplan.engines.survey import FileState, file_states
from loadplan.errors import EngineError
from loadplan.units import gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from loadplan.core.plan import LoadPlan
    from loadplan.load.report import LoadReport

# TokenSpeed's reason for a table, see loadplan.load.tokenspeed.
_TAKEN_BY_MODEL = "Engram table"


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
    command.add_argument(
        "--compare",
        action="store_true",
        help="load with the engine's default loader too, and compare",
    )
    command.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="write into FILE what the engine prints (default: print it)",
    )
    common.add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.checkpoint import config, placement, strangers
    from loadplan.load.engine import check_checkpoint

    strangers.check_folder(arguments.checkpoint)
    config.read_config(arguments.checkpoint)
    check_checkpoint(arguments.checkpoint)
    target = targets.find_target(arguments.engine)
    if arguments.engine_dir is not None:
        root = targets.find_root(target, arguments.engine_dir).resolve()
        sys.path.insert(0, str(root))
    else:
        root = common.locate(arguments.engine, None)[1]
    if set(file_states(target, root).values()) != {FileState.PATCHED}:
        again = target.name
        if arguments.engine_dir is not None:
            again += f" --target {shlex.quote(str(arguments.engine_dir))}"
        raise EngineError(
            f"{root}: {target.name} is not patched, or not wholly; "
            f"'loadplan apply {again}' does that"
        )
    if target.name != "sglang":
        # SGLang's own check is the better one; the others' is of the keys alone.
        placement.parse_placement(arguments.engram_config, nodes=1)
    try:
        outcome = _load(arguments, target.name)
        return _show(arguments, outcome)
    finally:
        if arguments.log is not None and arguments.log.exists():
            sys.stdout.flush()
            print(f"What {target.name} printed: {arguments.log}", file=sys.stderr)


def _show(arguments: argparse.Namespace, outcome: _Outcome) -> int:
    """Print plan and report; the exit code."""
    report = outcome.report
    console = terminal.console(quiet=arguments.json, file=sys.stdout)
    console.print(f"InstantTensor: {outcome.reader}")
    console.print(f"Engram tables: {outcome.tables}", soft_wrap=True)
    console.print(_plan_table(outcome.plan))
    own = sum(entry.reason == _TAKEN_BY_MODEL for entry in outcome.plan.entries)
    if own:
        console.print(
            f"{own} of these are tables that the model reads row by row itself; the "
            "engine's log counts them as skipped.",
            soft_wrap=True,
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
    if report.default is not None and not report.default.same:
        print("ERROR the default loader's bytes differ", file=sys.stderr)
        return 1
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """A load that has ended, and what was known before it."""

    reader: str
    tables: str
    plan: LoadPlan
    report: LoadReport


def _load(arguments: argparse.Namespace, name: str) -> _Outcome:
    """Load; results come after it, since an engine's log goes on until then."""
    from loadplan.load import noise
    from loadplan.load.engine import open_engine
    from loadplan.load.run import run_load

    with common.progress_bar() as progress, contextlib.ExitStack() as stack:
        steps = _Bar(progress, f"opening {name}")
        if arguments.log is not None:
            _, err = stack.enter_context(noise.kept_in(arguments.log))
            progress.console.file = err
            stack.callback(setattr, progress.console, "file", None)
        else:
            stack.enter_context(terminal.engine_output())
        with open_engine(
            name, arguments.checkpoint, engram_config=arguments.engram_config
        ) as engine:
            steps.begin("planning", 0)
            reader = _reader()
            plan, tables = engine.plan(), engine.tables()
            report = run_load(
                engine,
                plan,
                arguments.checkpoint,
                reader=reader,
                compare=arguments.compare,
                steps=steps,
            )
    return _Outcome(reader, tables, plan, report)


class _Bar:
    """One bar that shows one phase after the other, each with its own rate."""

    def __init__(self, progress: Progress, phase: str) -> None:
        self._progress = progress
        self._done: collections.Counter[str] = collections.Counter()
        self._phase = phase
        self._task = progress.add_task(phase, total=None)

    def begin(self, phase: str, nbytes: int) -> None:
        self._phase = phase
        self._progress.reset(
            self._task,
            description=phase,
            total=nbytes or None,
            completed=self._done[phase],
        )

    def done(self, nbytes: int) -> None:
        self._done[self._phase] += nbytes
        self._progress.advance(self._task, nbytes)


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


def _print_report(console: Console, report: LoadReport) -> None:
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
        f"To the GPU: {gib(device)}; whole files would put {stock} there. "
        f"{report.loading_seconds:.2f} s, {report.seconds:.2f} s with checking."
    )
    if report.peaks.device is None:
        # The stub holds in host memory what would be on the GPU.
        console.print(
            "Without a GPU times and memory mean nothing: InstantTensor is a stub."
        )
    else:
        console.print(_peaks_table(report))
        if report.default is not None:
            times = report.default.seconds / report.default.loadplan_seconds
            console.print(
                f"Without checking: {report.default.loadplan_seconds:.2f} s, and "
                f"{report.default.seconds:.2f} s by the default loader, {times:.1f} "
                "times as long."
            )
    if report.default is not None and report.default.same:
        console.print("The default loader brought the same bytes.")
    verdict = "differs from" if report.wrong else "matches"
    console.print(f"sha256 {report.digest}")
    console.print(f"The digest {verdict} {report.reference}.")


def _peaks_table(report: LoadReport) -> Table:
    from rich.table import Table

    table = Table(title=f"Peak memory, beside {gib(report.table_bytes)} of tables")
    table.add_column("loader")
    columns = ("seconds", "host", "pinned", "page cache", "device")
    for column in columns:
        table.add_column(column, justify="right")
    rows = [("loadplan", report.loading_seconds, report.peaks)]
    if report.default is not None:
        rows.append(("default", report.default.seconds, report.default.peaks))
    for name, seconds, peaks in rows:
        memory = (peaks.host, peaks.pinned, peaks.page_cache, peaks.device)
        shown = ("-" if nbytes is None else gib(nbytes) for nbytes in memory)
        table.add_row(name, f"{seconds:.2f}", *shown)
    return table
