"""``loadplan apply``, ``revert`` and ``status``: an engine's files and patches."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from loadplan.commands import common
from loadplan.engines import apply, targets
from loadplan.engines.status import status_of
from loadplan.engines.survey import FileState
from loadplan.load import processes


def add(commands: Any) -> None:
    for name, run, summary in (
        ("apply", _apply, "patch an engine, whole or not at all"),
        ("revert", _revert, "take the patches back, byte for byte"),
        ("status", _status, "say which files are pristine, patched, absent or unknown"),
    ):
        command = common.add_command(
            commands,
            name,
            summary=summary,
            text=f"{summary.capitalize()}.",
            example=f"loadplan {name} sglang\n"
            f"loadplan {name} sglang --target build/engines/sglang/patched",
        )
        common.add_engine(command)
        common.add_target(command)
        if name == "status":
            common.add_json(command)
        command.set_defaults(run=run)


def _apply(arguments: argparse.Namespace) -> int:
    target, root = common.locate(arguments.engine, arguments.target)
    targets.check_version(target, root)
    changed = _changed(apply.apply(target, root), "was patched already")
    print(f"{target.name} {target.version} in {root}: patched, {changed}")
    _mention_processes(target, root)
    if target.note:
        print(f"NOTE {target.note}")
    if arguments.target is None:
        print(f"Next: {target.serve}")
    else:
        print(
            f"Next, by a Python that imports {target.name} from there: {target.serve}"
        )
    print(f"'loadplan revert {_again(arguments)}' takes it back.")
    return 0


def _revert(arguments: argparse.Namespace) -> int:
    target, root = common.locate(arguments.engine, arguments.target)
    targets.check_version(target, root)
    changed = _changed(apply.revert(target, root), "was pristine already")
    print(f"{target.name} {target.version} in {root}: pristine, {changed}")
    _mention_processes(target, root)
    return 0


def _again(arguments: argparse.Namespace) -> str:
    """The engine's words of a command that is for the same tree as this one."""
    if arguments.target is None:
        return arguments.engine
    return f"{arguments.engine} --target {shlex.quote(str(arguments.target))}"


def _changed(edits: list[apply.Edit], otherwise: str) -> str:
    """How many files of the engine changed; receipts and RECORD go without saying."""
    count = sum(edit.path.endswith(".py") for edit in edits)
    return f"{count} files changed" if count else otherwise


def _mention_processes(target: targets.Target, root: Path) -> None:
    running = processes.engine_processes(target.package, root)
    if running:
        print(
            f"NOTE {target.name} is running (process {', '.join(map(str, running))}); "
            "it keeps the code that it has loaded until it is restarted"
        )


def _status(arguments: argparse.Namespace) -> int:
    target, root = common.locate(arguments.engine, arguments.target)
    status = status_of(target, root, engine=_again(arguments))
    states = {
        path: "absent" if _is_absent(root, path, state) else state.name.lower()
        for path, state in status.files.items()
    }
    running = processes.engine_processes(target.package, root)
    if arguments.json:
        report = {"engine": target.name, "version": target.version, "root": str(root)}
        report |= {"state": status.state, "advice": status.advice}
        report["files"] = states
        report |= {"leftovers": list(status.leftovers), "processes": running}
        print(json.dumps(report, indent=2))
    else:
        print(f"{target.name} {target.version} in {root}: {status.state}")
        for path, state in states.items():
            print(f"  {state:9} {path}")
        for path in status.leftovers:
            print(f"  leftover  {path}")
        print(status.advice)
        _mention_processes(target, root)
    return 0


def _is_absent(root: Path, path: str, state: FileState) -> bool:
    """A file of loadplan's own that is not there, which is pristine for ``apply``."""
    return state is FileState.PRISTINE and not (root / path).exists()
