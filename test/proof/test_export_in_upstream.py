"""The exported series in a repository of the released engine's layout.

Its tests run there as upstream would run them, with nothing of loadplan installed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from loadplan.engines import export
from loadplan.engines.targets import Target, load_targets
from loadplan.engines.upstream_tests import upstream_path

ROOT = Path(__file__).resolve().parents[2]
TREES = ROOT / "build" / "engines"

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


@dataclasses.dataclass(frozen=True)
class Upstream:
    """The released engine in upstream's layout, with the series on top."""

    target: Target
    folder: Path


def run(upstream: Upstream, arguments: list[str]) -> subprocess.CompletedProcess:
    folders = [upstream.folder / upstream.target.prefix, Path(__file__).parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return warm.run(arguments, cwd=upstream.folder, env=environment)


def named_tests(target: Target, commits: list[export.Commit]) -> list[str]:
    return [
        upstream_path(target, test)
        for commit in commits
        for test in commit.patch.trailers("Tests")
    ]


def run_tests(upstream: Upstream, tests: list[str], outcomes: Path) -> dict[str, dict]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "outcomes"]
    command = ["-m", "pytest", *options, "--outcomes", str(outcomes), *tests]
    result = run(upstream, command)
    assert outcomes.exists(), result.stdout + result.stderr
    return {
        test.split("::")[-1]: entry
        for test, entry in json.loads(outcomes.read_text()).items()
    }


def marked_tests(target: Target, mark: str) -> set[str]:
    """The names of our own test functions that carry the mark."""
    return {
        node.name
        for commit in export.plan_export(target)
        for path in commit.patch.trailers("Tests")
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(f"pytest.mark.{mark}" in ast.unparse(d) for d in node.decorator_list)
    }


@pytest.fixture(scope="module", params=load_targets())
def upstream(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Upstream:
    target = load_targets()[request.param]
    folder = tmp_path_factory.mktemp("upstream")
    repository = folder / "repository"
    # Links, compiled modules too: git and Python replace files, they never write into
    # them. A file that the series changes is compiled anew, for its time is another.
    shutil.copytree(
        TREES / target.name / "pristine" / target.package,
        repository / target.prefix / target.package,
        copy_function=os.link,
    )
    (repository / ".gitignore").write_text("__pycache__/\n")
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "base")
    git(repository, "tag", "base")
    export.write_export(target, folder / "mails")
    git(repository, "am", "--quiet", *sorted((folder / "mails").glob("*.patch")))
    git(repository, "tag", "series")
    return Upstream(target, repository)


def test_git_am_makes_the_patched_engine(upstream: Upstream) -> None:
    """Red when a mail loses a file, or upstream would not get what apply gives."""
    target, repository = upstream.target, upstream.folder
    patched = TREES / target.name / "patched"
    core = f"{target.core_folder}/"
    for path in (*target.files, *target.new_files()):
        file = repository / target.upstream(path)
        ours = (patched / path).read_text()
        header = target.rules.licence_header
        licensed = ours if ours.startswith(header) else f"{header}\n\n{ours}"
        if path in target.files:
            assert file.read_text() == ours, path
        elif not path.startswith(core) or file.exists():
            assert file.read_text() == licensed, path
    subjects = git(repository, "log", "--reverse", "--format=%s", "base..series")
    assert subjects.splitlines() == [
        commit.patch.trailers("Subject")[0].removeprefix("[PATCH] ")
        for commit in export.plan_export(target)
    ]
    assert "Applies-To" not in git(repository, "log", "--format=%B", "base..series")
    signed = git(repository, "log", "--format=%(trailers)", "base..series")
    assert ("Signed-off-by" in signed) == target.rules.signed_off
    folder = target.rules.upstream_tests_folder
    imports = git(
        repository, "grep", "-hE", "^(from|import) ", "series", "--", folder
    ).replace(f"{target.rules.helper_package}.gpu", "")
    assert "loadplan.standin" not in imports


def test_each_commits_tests_pass_on_it(upstream: Upstream, tmp_path: Path) -> None:
    """Red when a commit lacks a module, a helper or a part of a later one."""
    target, repository = upstream.target, upstream.folder
    commits = export.plan_export(target)
    hashes = git(repository, "rev-list", "--reverse", "base..series").split()
    for commit, digest in zip(commits, hashes, strict=True):
        git(repository, "checkout", "--quiet", "--force", digest)
        tests = named_tests(target, [commit])
        outcomes = run_tests(upstream, tests, tmp_path / f"{commit.name}.json")
        assert outcomes
        failed = {t: e for t, e in outcomes.items() if e["outcome"] != "passed"}
        assert failed == {}, commit.name
        marks = {mark for entry in outcomes.values() for mark in entry["markers"]}
        assert not marks & {"feature", "guard"}


def test_without_the_series_features_fail_by_assertion_and_guards_pass(
    upstream: Upstream, tmp_path: Path
) -> None:
    """The series' tests on the base; red when one passes without its patch."""
    target, repository = upstream.target, upstream.folder
    git(repository, "checkout", "--quiet", "--force", "series")
    changed = git(repository, "diff", "--name-only", "base", "series").splitlines()
    touched = [target.upstream(path) for path in target.files]
    added = set(map(target.upstream, target.new_files())).intersection(changed)
    git(repository, "rm", "--quiet", *sorted(added))
    git(repository, "checkout", "base", "--", *touched)
    tests = named_tests(target, export.plan_export(target))
    outcomes = run_tests(upstream, tests, tmp_path / "base.json")
    features, guards = marked_tests(target, "feature"), marked_tests(target, "guard")
    functions = {test: test.partition("[")[0] for test in outcomes}
    assert set(functions.values()) == features | guards
    for test, entry in outcomes.items():
        expected = "failed" if functions[test] in features else "passed"
        assert entry["outcome"] == expected, test
        assert set(entry["errors"]) <= {"AssertionError", "Failed"}, test


def test_upstreams_collection_takes_every_test_file(upstream: Upstream) -> None:
    """Red when a helper lies among SGLang's tests, or one is not registered.

    The other engines collect by pytest's own rules.
    """
    repository = upstream.folder
    if upstream.target.name != "sglang":
        tests = named_tests(upstream.target, export.plan_export(upstream.target))
        assert all(Path(test).name.startswith("test_") for test in tests)
        return
    git(repository, "checkout", "--quiet", "--force", "series")
    # By its file: the package around it imports the whole engine.
    registry = repository / "python/sglang/test/ci/ci_register.py"
    spec = importlib.util.spec_from_file_location("ci_register", registry)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_register"] = module
    spec.loader.exec_module(module)
    files = sorted(map(str, (repository / "test/registered").rglob("*.py")))
    assert len(module.collect_tests(files)) == len(files) > 0
