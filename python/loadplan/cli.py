"""The ``loadplan`` command.

Exit codes: 0 done, 1 an error or bytes that differ, 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import engines, patching, processes
from .errors import EngineError
from .patching import FileState

# torch and rich are imported where they are needed: patching an engine needs neither,
# and takes less time than their import.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

_DEFAULT_ENGRAM = '{"placement": "cpu"}'
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_DESCRIPTION = """\
Send every tensor of a checkpoint straight to where it will live.

loadplan patches an installed engine so that --load-format instanttensor keeps
host-resident weights (DeepSeek-V4.1's Engram tables) off the GPU.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        # Ours and the engine's: their text is for the user, a traceback is a bug.
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ERROR interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _command(argparse.ArgumentParser, prog="loadplan", text=_DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, run, summary in (
        ("apply", _apply, "patch an engine, whole or not at all"),
        ("revert", _revert, "take the patches back, byte for byte"),
        ("status", _status, "say which files are pristine, patched or unknown"),
    ):
        command = _command(
            commands.add_parser,
            name,
            help=summary,
            text=f"{summary.capitalize()}.\n\nExample:\n"
            f"  loadplan {name} sglang\n"
            f"  loadplan {name} sglang --target build/engines/sglang/patched",
        )
        command.add_argument("engine", help=f"one of {sorted(engines.load_targets())}")
        command.add_argument(
            "--target",
            type=Path,
            metavar="DIR",
            help="an unpacked wheel, a site-packages folder or a source checkout "
            "(default: the engine of this Python's environment)",
        )
        if name == "status":
            command.add_argument("--json", action="store_true", help="for machines")
        command.set_defaults(run=run)

    command = _command(
        commands.add_parser,
        "export",
        help="write the patches as mails that upstream's git am takes",
        text="Write the patches as mails that upstream's git am takes.\n\nEach is one "
        "commit with its glue, core modules, tests and docs page.\n\n"
        "Example:\n  loadplan export sglang --out build/upstream\n"
        "  cd sglang && git am .../build/upstream/*.patch",
    )
    command.add_argument("engine", help=f"one of {sorted(engines.load_targets())}")
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder that is empty or absent",
    )
    command.set_defaults(run=_export)

    command = _command(
        commands.add_parser,
        "synth",
        help="make a checkpoint in the shape of DeepSeek-V4.1",
        text="Make a checkpoint in the shape of DeepSeek-V4.1: its names, dtypes and "
        "files.\n\nEvery byte follows from --seed, so that a load can be checked "
        "without it.\n\nExample:\n  loadplan synth /data/v41 --size 24G --mixed-engram",
    )
    command.add_argument("out", type=Path, help="a folder that is empty or absent")
    command.add_argument("--size", type=_size, default="64M", help="bytes, like 64M")
    command.add_argument("--engram-fraction", type=float, metavar="F", default=0.4)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--shards", type=int, help="how many files")
    command.add_argument(
        "--mixed-engram",
        action="store_true",
        help="put the Engram tables into files that hold other tensors too",
    )
    command.add_argument("--no-index", action="store_true")
    command.add_argument("--no-draft", action="store_true")
    command.set_defaults(run=_synth)

    command = _command(
        commands.add_parser,
        "load",
        help="load a checkpoint through the patched engine and check every byte",
        text="Load a checkpoint through the patched engine's own loader and check "
        "every byte.\n\nUses InstantTensor where there is a GPU, else a stub of it.\n\n"
        'Example:\n  loadplan load /data/v41 --engram-config \'{"placement": "cpu"}\'',
    )
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--engine", default="sglang", help="default: sglang")
    command.add_argument(
        "--engine-dir",
        type=Path,
        metavar="DIR",
        help="where the patched engine lies (default: the one this Python imports)",
    )
    command.add_argument(
        "--engram-config",
        default=_DEFAULT_ENGRAM,
        metavar="JSON",
        help=f"as for the server (default: {_DEFAULT_ENGRAM})",
    )
    command.add_argument("--json", action="store_true", help="for machines")
    command.set_defaults(run=_load)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .core import VERSION

        parser.exit(message=f"loadplan {VERSION}\n")


def _command(make, *args, text: str, **kwargs) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return make(*args, description=text, formatter_class=formatter, **kwargs)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected one like 24G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _locate(arguments: argparse.Namespace) -> tuple[engines.Target, Path]:
    target = engines.find_target(arguments.engine)
    if arguments.target is not None:
        root = engines.find_root(target, arguments.target)
    else:
        root = engines.environment_root(target)
        imported = engines.importable_root(target)
        if imported is not None and imported.resolve() != root.resolve():
            print(
                f"NOTE {target.name} is installed in {root}, but from here Python "
                f"would import {imported}",
                file=sys.stderr,
            )
    return target, root


def _apply(arguments: argparse.Namespace) -> int:
    target, root = _locate(arguments)
    engines.check_version(target, root)
    changed = _changed(patching.apply(target, root), "was patched already")
    print(f"{target.name} {target.version} in {root}: patched, {changed}")
    _mention_processes(target, root)
    print(f"Next: {target.serve}")
    print(f"'loadplan revert {target.name}' takes it back.")
    return 0


def _revert(arguments: argparse.Namespace) -> int:
    target, root = _locate(arguments)
    engines.check_version(target, root)
    changed = _changed(patching.revert(target, root), "was pristine already")
    print(f"{target.name} {target.version} in {root}: pristine, {changed}")
    _mention_processes(target, root)
    return 0


def _changed(edits: list[patching.Edit], otherwise: str) -> str:
    """How many files of the engine changed; receipts and RECORD go without saying."""
    count = sum(edit.path.endswith(".py") for edit in edits)
    return f"{count} files changed" if count else otherwise


def _mention_processes(target: engines.Target, root: Path) -> None:
    running = processes.engine_processes(target.package, root)
    if running:
        print(
            f"NOTE {target.name} is running (process {', '.join(map(str, running))}); "
            "it keeps the code that it has loaded until it is restarted"
        )


def _status(arguments: argparse.Namespace) -> int:
    target, root = _locate(arguments)
    status = patching.status(target, root)
    running = processes.engine_processes(target.package, root)
    if arguments.json:
        report = {"engine": target.name, "version": target.version, "root": str(root)}
        report |= {"state": status.state, "advice": status.advice}
        report["files"] = {path: s.name.lower() for path, s in status.files.items()}
        report |= {"leftovers": list(status.leftovers), "processes": running}
        print(json.dumps(report, indent=2))
    else:
        print(f"{target.name} {target.version} in {root}: {status.state}")
        for path, state in status.files.items():
            print(f"  {state.name.lower():9} {path}")
        for path in status.leftovers:
            print(f"  leftover  {path}")
        print(status.advice)
        _mention_processes(target, root)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from . import export

    target = engines.find_target(arguments.engine)
    commits = export.write_export(target, arguments.out)
    print(f"Added production lines, for {target.name} {target.version}:")
    print(f"  {'hunks':>5} {'glue':>5} {'core':>5}")
    for commit in commits:
        lines = commit.lines
        print(f"  {lines.hunks:5} {lines.glue:5} {lines.core:5}  {commit.name}")
    heart = [commit for commit in commits if commit.name in target.limits.heart]
    total = sum(commit.lines.hunks + commit.lines.glue for commit in heart)
    print(
        f"{' and '.join(commit.name for commit in heart)}: {total} lines of hunks and "
        f"glue, below {target.limits.heart_lines}"
    )
    print(f"{arguments.out}: {len(commits)} mails; 'git am {arguments.out}/*.patch'")
    return 0


def _synth(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from . import synth

    options = synth.SynthOptions(
        size=arguments.size,
        engram_fraction=arguments.engram_fraction,
        seed=arguments.seed,
        mixed_engram=arguments.mixed_engram,
        index=not arguments.no_index,
        draft=not arguments.no_draft,
        shards=arguments.shards,
    )
    shards = synth.layout(options)
    total = sum(shard.nbytes for shard in shards)
    with _progress(Console(stderr=True)) as progress:
        task = progress.add_task("Writing", total=total)
        synth.synthesize(
            arguments.out,
            options,
            progress=lambda nbytes: progress.advance(task, nbytes),
        )
    print(f"{arguments.out}: {len(shards)} shards, {_gib(total)}, seed {options.seed}")
    return 0


def _load(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from . import load

    load.check_checkpoint(arguments.checkpoint)
    target = engines.find_target(arguments.engine)
    if arguments.engine_dir is not None:
        root = engines.find_root(target, arguments.engine_dir).resolve()
        sys.path.insert(0, str(root))
    else:
        arguments.target = None
        root = _locate(arguments)[1]
    if set(patching.file_states(target, root).values()) != {FileState.PATCHED}:
        raise EngineError(
            f"{root}: {target.name} is not patched, or not wholly; "
            f"'loadplan apply {target.name}' does that"
        )
    errors = Console(stderr=True)
    with load.open_engine(
        target.name, arguments.checkpoint, engram_config=arguments.engram_config
    ) as engine:
        reader = _reader()
        plan = engine.plan()
        console = Console(quiet=arguments.json)
        console.print(f"InstantTensor: {reader}")
        console.print(f"Engram tables: {engine.tables()}")
        console.print(_plan_table(plan))
        with _progress(errors) as progress:
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
            route.name, str(total.files), str(total.tensors), _gib(total.nbytes)
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
            _gib(route.nbytes),
            f"{route.seconds:.2f}",
            rate,
        )
    console.print(table)
    stock = _gib(report.stock_device_bytes)
    device = report.routes["stream"].nbytes + report.routes["read"].nbytes
    console.print(
        f"On the GPU: {_gib(device)}; whole files would put {stock} there. "
        f"{report.seconds:.2f} s with checking."
    )
    verdict = "differs from" if report.wrong else "matches"
    console.print(f"sha256 {report.digest}")
    console.print(f"The digest {verdict} {report.reference}.")


def _progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _gib(nbytes: int) -> str:
    return (
        f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
    )
