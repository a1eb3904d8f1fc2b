"""Kill apply and revert and let the next run repair the tree.

    PYTHONPATH=python python test/loadplan/kill_loop.py 1000

First at every single call that changes a file, then as often as asked by SIGKILL after
a random part of the time that a whole run takes. The next run, apply or revert, goes to
its end; the tree must then be the patched or the pristine one to the last byte.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine_tree import TARGET, Snapshot, make_tree, snapshot

from loadplan.engines import apply

_KILLED = 9
_CALLS = ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "chmod")
_FSYNC = os.fsync


def main(kills: int, seed: int = 0) -> None:
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root = make_tree(Path(folder, "site-packages"))
        expected = {"revert": snapshot(root)}
        started = time.monotonic()
        apply.apply(TARGET, root)
        duration = time.monotonic() - started
        expected["apply"] = snapshot(root)
        # No test can tell whether a repair was synced; only what is killed must be.
        os.fsync = lambda descriptor: None
        midway = steps = 0
        for verb in ("revert", "apply"):
            for step in itertools.count():
                code = in_child(verb, root, before=lambda n=step: exit_at_call(n))
                if code == 0:
                    break
                repair(root, ("apply", "revert")[step % 2], expected)
                run({"revert": "apply", "apply": "revert"}[verb], root)
                steps += 1
            repair(root, verb, expected)
        repair(root, "apply", expected)
        for number in range(kills):
            verb = ("revert", "apply")[number % 2]
            in_child(verb, root, kill_after=generator.uniform(0, duration))
            midway += snapshot(root) not in expected.values()
            repair(root, generator.choice(("apply", "revert")), expected)
            # The next round starts from where this one wanted to go.
            run(verb, root)
    print(
        f"{steps} exits, one at each step, and {kills} kills, of which {midway} left "
        "a half-done tree: all repaired"
    )


def run(verb: str, root: Path) -> None:
    getattr(apply, verb)(TARGET, root)


def repair(root: Path, verb: str, expected: dict[str, Snapshot]) -> None:
    run(verb, root)
    if snapshot(root) != expected[verb]:
        sys.exit(f"{verb} did not repair {root}")


def in_child(
    verb: str,
    root: Path,
    *,
    before: Callable[[], None] = lambda: None,
    kill_after: float | None = None,
) -> int:
    """Run in a forked child, killed after so many seconds; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            if kill_after is not None:
                os.fsync = _FSYNC
            before()
            run(verb, root)
            os._exit(0)
        finally:
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def exit_at_call(number: int) -> None:
    """Let this process end instead of making its ``number``-th call that writes."""
    calls = itertools.count()

    def watched(function: Callable) -> Callable:
        def call(*arguments, **options):
            if next(calls) == number:
                os._exit(_KILLED)
            return function(*arguments, **options)

        return call

    for name in _CALLS:
        setattr(os, name, watched(getattr(os, name)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
