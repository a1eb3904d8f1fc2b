"""The engine tests can fail: on the pristine engine, and without any single hunk.

Each case runs the engine tests in a process of its own on a tree of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadplan.engines.apply import revert
from loadplan.engines.series import Hunk, read_series
from loadplan.engines.targets import Target, load_targets

ROOT = Path(__file__).resolve().parents[2]
TARGETS = load_targets()
TREES = ROOT / "build" / "engines"

pytestmark = pytest.mark.proof


def all_tests(target: Target) -> list[str]:
    series = read_series(target.patches)
    return [test for patch in series for test in patch.trailers("Tests")]


def run_tests(
    tree: Path, tests: list[str], *options: str
) -> subprocess.CompletedProcess:
    folders = [tree, ROOT / "python", Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [*options, *tests]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )


def without(text: str, hunk: Hunk) -> str:
    """``text``, the patched file, with the change of one hunk taken back.

    Later patches may have changed the lines around it, so that it is found by the lines
    that it changed, nearest to where it stood.
    """
    old, new, first = list(hunk.old), list(hunk.new), hunk.start - 1
    while old and new and old[0] == new[0]:
        old, new, first = old[1:], new[1:], first + 1
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
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
        for index in range(len(found))
    ]


@pytest.mark.parametrize("engine", TARGETS)
def test_every_engine_test_belongs_to_a_patch(engine: str) -> None:
    """Red when a test file is in no patch's header."""
    target = TARGETS[engine]
    present = (ROOT / target.tests_folder).rglob("test_*.py")
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
    written = tmp_path / "outcomes.json"
    plugin = ["-p", "outcomes", "--outcomes", str(written)]
    result = run_tests(tree, all_tests(target), *plugin)
    assert written.exists(), result.stdout + result.stderr
    wrong = {}
    for test, entry in json.loads(written.read_text()).items():
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


@pytest.mark.parametrize(("engine", "name", "path", "index"), hunks())
def test_without_one_hunk_an_engine_test_fails(
    tmp_path: Path, engine: str, name: str, path: str, index: int
) -> None:
    """Red when a hunk does nothing that a test sees."""
    target, tree = TARGETS[engine], tmp_path / "tree"
    shutil.copytree(TREES / engine / "patched", tree, copy_function=os.link)
    relative = path.removeprefix(target.prefix)
    (patch,) = [p for p in read_series(target.patches) if p.name == name]
    text = without((tree / relative).read_text(), patch.hunks[path][index])
    (tree / relative).unlink()
    (tree / relative).write_text(text)
    named = patch.trailers("Tests")
    result = run_tests(tree, named, "-x")
    if result.returncode == 0:
        others = [test for test in all_tests(target) if test not in named]
        result = run_tests(tree, others, "-x")
    # Failed tests, or an engine that cannot even be imported: nothing else counts.
    failed = result.returncode == 1 and " failed" in result.stdout
    broken = result.returncode in (1, 2) and "ERROR collecting" in result.stdout
    assert failed or broken, f"{name} {path} hunk {index}: {result.stdout[-2000:]}"
