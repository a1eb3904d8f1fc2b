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

from loadplan.engines import find_target
from loadplan.patching import revert
from loadplan.series import Hunk, Patch, read_series

ROOT = Path(__file__).resolve().parents[2]
TARGET = find_target("sglang")
TREES = ROOT / "build" / "engines" / TARGET.name

pytestmark = pytest.mark.proof


def named_tests(patch: Patch) -> list[str]:
    """The test files that the patch's header names."""
    lines = patch.header.splitlines()
    return [line.split()[1] for line in lines if line.startswith("Tests: ")]


def all_tests() -> list[str]:
    return [
        test for patch in read_series(TARGET.patches) for test in named_tests(patch)
    ]


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


def hunks() -> list[tuple[str, str, int]]:
    return [
        (patch.name, path, index)
        for patch in read_series(TARGET.patches)
        for path, found in patch.hunks.items()
        for index in range(len(found))
    ]


def test_engine_tests_are_marked_and_every_patch_names_some() -> None:
    """Red when a test file is in no patch's header, or a patch names no test."""
    named = all_tests()
    assert all(named_tests(patch) for patch in read_series(TARGET.patches))
    present = (ROOT / "test" / "registered").rglob("test_*.py")
    assert sorted(named) == sorted(p.relative_to(ROOT).as_posix() for p in present)


def contents(tree: Path) -> dict[str, bytes]:
    files = (path for path in tree.rglob("*") if path.is_file())
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in files
        if path.suffix != ".pyc"
    }


def test_on_the_reverted_engine_features_fail_by_assertion_and_guards_pass(
    tmp_path: Path,
) -> None:
    """The reverted engine is the stock one, in every byte and in behaviour.

    Red when a feature test passes without the feature, or fails by accident.
    """
    tree = tmp_path / "tree"
    shutil.copytree(TREES / "patched", tree, copy_function=os.link)
    revert(TARGET, tree)
    assert contents(tree) == contents(TREES / "pristine")
    written = tmp_path / "outcomes.json"
    plugin = ["-p", "outcomes", "--outcomes", str(written)]
    result = run_tests(tree, all_tests(), *plugin)
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


@pytest.mark.parametrize(("name", "path", "index"), hunks())
def test_without_one_hunk_an_engine_test_fails(
    tmp_path: Path, name: str, path: str, index: int
) -> None:
    """Red when a hunk does nothing that a test sees."""
    tree = tmp_path / "tree"
    shutil.copytree(TREES / "patched", tree, copy_function=os.link)
    relative = path.removeprefix(TARGET.prefix)
    (patch,) = [p for p in read_series(TARGET.patches) if p.name == name]
    text = without((tree / relative).read_text(), patch.hunks[path][index])
    (tree / relative).unlink()
    (tree / relative).write_text(text)
    result = run_tests(tree, named_tests(patch), "-x")
    if result.returncode == 0:
        others = [test for test in all_tests() if test not in named_tests(patch)]
        result = run_tests(tree, others, "-x")
    # Failed tests, or an engine that cannot even be imported: nothing else counts.
    failed = result.returncode == 1 and " failed" in result.stdout
    broken = result.returncode == 2 and "Error" in result.stdout
    assert failed or broken, f"{name} {path} hunk {index}: {result.stdout[-2000:]}"
