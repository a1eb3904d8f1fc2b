"""The exported series in a repository of the released engine's layout.

Its tests run there as upstream would run them, with nothing of loadplan installed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadplan import export
from loadplan.engines import find_target

ROOT = Path(__file__).resolve().parents[2]
TARGET = find_target("sglang")
PRISTINE = ROOT / "build" / "engines" / TARGET.name / "pristine"

pytestmark = pytest.mark.proof


def git(repository: Path, *arguments: str | Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
    result = subprocess.run(
        ["git", *identity, *map(str, arguments)],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run(repository: Path, arguments: list[str]) -> subprocess.CompletedProcess:
    folders = [repository / "python", Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
    )


def run_tests(repository: Path, tests: list[str], outcomes: Path) -> dict[str, dict]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "outcomes"]
    command = ["-m", "pytest", *options, "--outcomes", str(outcomes), *tests]
    result = run(repository, command)
    assert outcomes.exists(), result.stdout + result.stderr
    return {
        test.split("::")[-1]: entry
        for test, entry in json.loads(outcomes.read_text()).items()
    }


def marked_tests(mark: str) -> set[str]:
    """The names of our own test functions that carry the mark."""
    return {
        node.name
        for commit in export.plan_export(TARGET)
        for path in commit.patch.trailers("Tests")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(f"pytest.mark.{mark}" in ast.unparse(d) for d in node.decorator_list)
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released engine in upstream's layout, with the series on top."""
    folder = tmp_path_factory.mktemp("upstream")
    repository = folder / "repository"
    # Links: git replaces files, it never writes into them.
    shutil.copytree(
        PRISTINE / TARGET.package,
        repository / TARGET.prefix / TARGET.package,
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (repository / ".gitignore").write_text("__pycache__/\n")
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "base")
    git(repository, "tag", "base")
    export.write_export(TARGET, folder / "mails")
    git(repository, "am", "--quiet", *sorted((folder / "mails").iterdir()))
    git(repository, "tag", "series")
    return repository


def test_git_am_makes_the_patched_engine(repository: Path) -> None:
    """Red when a mail loses a file, or upstream would not get what apply gives."""
    patched = PRISTINE.with_name("patched")
    core = f"{TARGET.core_folder}/"
    for path in (*TARGET.files, *TARGET.new_files()):
        text = (repository / TARGET.upstream(path)).read_text()
        ours = (patched / path).read_text()
        header = TARGET.licence_header
        licensed = ours if ours.startswith(header) else f"{header}\n\n{ours}"
        if path in TARGET.files:
            assert text == ours, path
        elif not path.startswith(core) or (repository / TARGET.upstream(path)).exists():
            assert text == licensed, path
    subjects = git(repository, "log", "--reverse", "--format=%s", "base..series")
    assert subjects.splitlines() == [
        commit.patch.trailers("Subject")[0].removeprefix("[PATCH] ")
        for commit in export.plan_export(TARGET)
    ]
    assert "Applies-To" not in git(repository, "log", "--format=%B", "base..series")
    assert "loadplan.fake" not in git(
        repository, "grep", "-hE", "^(from|import) ", "series", "--", "test"
    ).replace(f"{TARGET.helper_folder.replace('/', '.')}.fake", "")


def test_each_commits_tests_pass_on_it(repository: Path, tmp_path: Path) -> None:
    """Red when a commit lacks a module, a helper or a part of a later one."""
    commits = export.plan_export(TARGET)
    hashes = git(repository, "rev-list", "--reverse", "base..series").split()
    for commit, digest in zip(commits, hashes, strict=True):
        git(repository, "checkout", "--quiet", "--force", digest)
        tests = commit.patch.trailers("Tests")
        outcomes = run_tests(repository, tests, tmp_path / f"{commit.name}.json")
        assert outcomes
        failed = {t: e for t, e in outcomes.items() if e["outcome"] != "passed"}
        assert failed == {}, commit.name
        assert not any(entry["markers"] for entry in outcomes.values())


def test_without_the_series_features_fail_by_assertion_and_guards_pass(
    repository: Path, tmp_path: Path
) -> None:
    """The series' tests on the base; red when one passes without its patch."""
    git(repository, "checkout", "--quiet", "--force", "series")
    git(repository, "rm", "-r", "--quiet", "python/sglang/srt")
    git(repository, "checkout", "base", "--", "python/sglang/srt")
    tests = [
        test
        for commit in export.plan_export(TARGET)
        for test in commit.patch.trailers("Tests")
    ]
    outcomes = run_tests(repository, tests, tmp_path / "base.json")
    features, guards = marked_tests("feature"), marked_tests("guard")
    assert outcomes.keys() == features | guards
    for test, entry in outcomes.items():
        expected = "failed" if test in features else "passed"
        assert entry["outcome"] == expected, test
        assert set(entry["errors"]) <= {"AssertionError", "Failed"}, test


def test_upstreams_collection_takes_every_test_file(repository: Path) -> None:
    """Red when a helper lies among the tests, or one is not registered."""
    git(repository, "checkout", "--quiet", "--force", "series")
    # By its file: the package around it imports the whole engine.
    registry = repository / "python/sglang/test/ci/ci_register.py"
    spec = importlib.util.spec_from_file_location("ci_register", registry)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_register"] = module
    spec.loader.exec_module(module)
    files = sorted(map(str, (repository / "test/registered").rglob("*.py")))
    assert len(module.collect_tests(files)) == len(files) > 0
