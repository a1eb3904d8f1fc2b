"""The engine tests can fail: on the pristine engine, and without any single hunk.

Each case runs the engine tests in a process of its own on a tree of its own: a fork of
a process that has imported what all have in common (tools/warm.py). ``killers.json``
names the test that failed last time without a hunk, which is run first; the verdict
never depends on it. ``make killers`` writes it anew.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from loadplan.engines.apply import revert
from loadplan.engines.series import (
    Hunk,
    apply_hunks,
    read_series,
    reverse_hunks,
)
from loadplan.engines.stages import changed_files, own_stages
from loadplan.engines.targets import Target, load_targets

ROOT = Path(__file__).resolve().parents[2]
TARGETS = load_targets()
TREES = ROOT / "build" / "engines"
KILLERS = json.loads(Path(__file__).with_name("killers.json").read_text())

pytestmark = pytest.mark.proof


def all_tests(target: Target) -> list[str]:
    series = read_series(target.patches)
    return [test for patch in series for test in patch.tests]


def run_tests(
    tree: Path, tests: list[str], *options: str, fresh: bool = False
) -> subprocess.CompletedProcess:
    folders = [tree, ROOT / "python", Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    return warm.run(command, cwd=ROOT, env=environment, fresh=fresh)


def outcomes(
    tree: Path, tests: list[str], written: Path, *, fresh: bool = False
) -> dict[str, dict]:
    """How each test ended on the tree, by its id; see outcomes.py."""
    plugin = ["-p", "outcomes", "--outcomes", str(written)]
    result = run_tests(tree, tests, *plugin, fresh=fresh)
    # Another code: nothing ran, for a file is missing or cannot be collected.
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return json.loads(written.read_text())


def changed_lines(hunk: Hunk) -> tuple[list[str], list[str], int]:
    """What a hunk takes, what it gives, and before how many lines that stood."""
    old, new, first = list(hunk.old), list(hunk.new), hunk.start - 1
    while old and new and old[0] == new[0]:
        old, new, first = old[1:], new[1:], first + 1
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return old, new, first


def without(text: str, hunk: Hunk) -> str:
    """``text``, the patched file, with the change of one hunk taken back.

    Later patches may have changed the lines around it, so that it is found by the lines
    that it changed, nearest to where it stood.
    """
    old, new, first = changed_lines(hunk)
    assert new, "a hunk that only removes lines: find it by its context"
    lines = text.splitlines(keepends=True)
    places = [i for i in range(len(lines)) if lines[i : i + len(new)] == new]
    place = min(places, key=lambda i: abs(i - first))
    lines[place : place + len(new)] = old
    return "".join(lines)


def hunks() -> list[tuple[str, str, str, int]]:
    return [
        (target.name, patch.name, path, index)
        for target in TARGETS.values()
        for patch in read_series(target.patches)
        for path, found in patch.hunks.items()
        for index, hunk in enumerate(found)
        # What glue only loses there is unused then; the engine's linter says so.
        if changed_lines(hunk)[1] or path not in changed_files(target, patch)
    ]


@pytest.mark.parametrize("engine", TARGETS)
def test_every_engine_test_belongs_to_a_patch(engine: str) -> None:
    """Red when a test file is in no patch's header."""
    target = TARGETS[engine]
    present = (ROOT / target.rules.tests_folder).rglob("test_*.py")
    files = {p.relative_to(ROOT).as_posix() for p in present}
    assert sorted(set(all_tests(target))) == sorted(files)


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file())
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in files
        if path.suffix != ".pyc"
    }


@pytest.mark.parametrize("engine", TARGETS)
def test_on_the_reverted_engine_features_fail_by_assertion_and_guards_pass(
    tmp_path: Path, engine: str
) -> None:
    """The reverted engine is the stock one, in every byte and in behaviour.

    Red when a feature test passes without the feature, or fails by accident.
    """
    target, tree = TARGETS[engine], tmp_path / "tree"
    shutil.copytree(TREES / engine / "patched", tree, copy_function=os.link)
    revert(target, tree)
    assert contents(tree) == contents(TREES / engine / "pristine")
    wrong = {}
    found = outcomes(tree, all_tests(target), tmp_path / "outcomes.json")
    for test, entry in found.items():
        kinds = {"feature", "guard"}.intersection(entry["markers"])
        failed_by_assertion = set(entry["errors"]) <= {"AssertionError", "Failed"}
        if kinds == {"guard"}:
            right = entry["outcome"] == "passed"
        else:
            right = (
                kinds == {"feature"}
                and entry["outcome"] == "failed"
                and failed_by_assertion
            )
        if not right:
            wrong[test] = entry
    assert wrong == {}


def find_hunk(engine: str, name: str, path: str, index: int) -> Hunk:
    (patch,) = [p for p in read_series(TARGETS[engine].patches) if p.name == name]
    return patch.hunks[path][index]


def killer_key(engine: str, path: str, hunk: Hunk) -> str:
    """Of what a hunk changes, so that it outlives a patch's name and split."""
    old, new, _ = changed_lines(hunk)
    digest = hashlib.sha256("".join([*old, "\0", *new]).encode()).hexdigest()
    return f"{engine} {path} {digest[:12]}"


def mutate(folder: Path, engine: str, name: str, path: str, index: int) -> Path:
    """A copy of the patched tree in ``folder`` without one hunk.

    Hard links, compiled files too: what is changed is replaced, never written into.
    """
    target, tree = TARGETS[engine], folder / "tree"
    shutil.copytree(TREES / engine / "patched", tree, copy_function=os.link)
    file = tree / path.removeprefix(target.prefix)
    series = read_series(target.patches)
    place = [patch.name for patch in series].index(name)
    if path in changed_files(target, series[place]):
        # Later patches change it again: this is the form that the patch gave it.
        text = own_stages(target, series)[place][path]
        hunk = reverse_hunks(series[place].hunks[path])[index]
        text = apply_hunks(text, (hunk,), label=name)
    else:
        text = without(file.read_text(), find_hunk(engine, name, path, index))
    file.unlink()
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    return tree


def failure(result: subprocess.CompletedProcess) -> str | None:
    """The test or file that failed, None if none did.

    Failed tests, or an engine that cannot even be imported: nothing else counts.
    """
    failed = result.returncode == 1 and " failed" in result.stdout
    broken = result.returncode in (1, 2) and "ERROR collecting" in result.stdout
    if not (failed or broken):
        return None
    line = re.compile(r"^(?:FAILED|ERROR|SUBFAILED.*?) (test/\S+)", re.MULTILINE)
    named = line.search(result.stdout)
    assert named, result.stdout
    return named[1]


@pytest.mark.parametrize(("engine", "name", "path", "index"), hunks())
def test_without_one_hunk_an_engine_test_fails(
    tmp_path: Path, engine: str, name: str, path: str, index: int
) -> None:
    """Red when a hunk does nothing that a test sees."""
    target = TARGETS[engine]
    tree = mutate(tmp_path, engine, name, path, index)
    (patch,) = [p for p in read_series(target.patches) if p.name == name]
    named = patch.tests
    others = [test for test in all_tests(target) if test not in named]
    if path in changed_files(target, patch):
        # The others need what later patches make of the file.
        named, others = patch.trailers("Tests"), []
    key = killer_key(engine, path, patch.hunks[path][index])
    killer = KILLERS.get(key)
    rounds = [[killer]] if killer else []
    for tests in filter(None, (*rounds, named, others)):
        result = run_tests(tree, tests, "-x")
        if found := failure(result):
            record_killer(key, found)
            return
    if has_unknown_names(tree / path.removeprefix(target.prefix)):
        return  # Only annotations use them, which nothing evaluates.
    pytest.fail(f"{name} {path} {index}: no test needs it\n{result.stdout[-2000:]}")


def has_unknown_names(file: Path) -> bool:
    """Whether a linter misses a name that the file uses."""
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache"]
    return subprocess.run([*ruff, "--select", "F821", "--quiet", file]).returncode == 1


def record_killer(key: str, test: str) -> None:
    """Add a line to the file that ``make killers`` asks for."""
    if file := os.environ.get("LOADPLAN_KILLERS"):
        with Path(file).open("a") as lines:
            lines.write(json.dumps({key: test}) + "\n")


@pytest.mark.parametrize("engine", TARGETS)
def test_fork_and_fresh_process_agree(tmp_path: Path, engine: str) -> None:
    """Red when forking from a process with modules loaded changes a verdict.

    Each day another hunk: all tests of the file that finds it, both ways.
    """
    killers = {
        hunk: KILLERS.get(killer_key(engine, hunk[2], find_hunk(*hunk)))
        for hunk in hunks()
        if hunk[0] == engine
    }
    known = [hunk for hunk, killer in killers.items() if killer]
    hunk = known[datetime.date.today().toordinal() % len(known)]
    tree, killer = mutate(tmp_path, *hunk), killers[hunk]
    tests = [killer.partition("::")[0]]
    forked = outcomes(tree, tests, tmp_path / "forked.json")
    fresh = outcomes(tree, tests, tmp_path / "fresh.json", fresh=True)
    assert forked == fresh, hunk
