"""The tools that keep the series: what they refuse, and a new release of an engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from engine_tree import LOADER, TARGET, make_tree

from loadplan.engines import apply
from loadplan.engines.series import read_series
from loadplan.engines.targets import load_targets

ROOT = Path(__file__).parents[3]
LOADER_PATCH = "patches/sglang/host-resident-weights.patch"
OTHER_PATCH = "patches/sglang/deepseek-v4-engram-patterns.patch"
# The last one that touches the loader.
LAST_PATCH = "patches/sglang/draft-weights.patch"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with its pristine and its patched tree, of the touched files only."""
    clone = tmp_path_factory.mktemp("original") / "clone"
    tests = [target.rules.tests_folder for target in load_targets().values()]
    for folder in ("python", "patches", "docs", "tools", *tests):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, clone / folder, ignore=ignore)
    for target in load_targets().values():
        engine = clone / "build" / "engines" / target.name
        make_tree(engine / "pristine", target=target)
        apply.apply(target, make_tree(engine / "patched", target=target))
    return clone


@pytest.fixture
def clone(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkout to change."""
    return Path(shutil.copytree(original, tmp_path / "clone"))


def run(clone: Path, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(clone / "python")}
    return warm.run([clone / "tools" / tool, *arguments], env=environment)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def texts(clone: Path) -> dict[str, str]:
    files = [*(clone / "patches").rglob("*"), clone / "docs" / "patches.md"]
    return {str(path): path.read_text() for path in files if path.is_file()}


def test_series_passes_and_refresh_changes_nothing(clone: Path) -> None:
    """Red when the committed series is not what the tools write."""
    result = run(clone, "check_patches.py")
    targets = load_targets()
    count = sum(len(read_series(target.patches)) for target in targets.values())
    assert result.stdout == f"Passed ({count} patches, {len(targets)} releases)\n"
    before = texts(clone)
    for name in targets:
        assert run(clone, "refresh_patches.py", name).returncode == 0
        assert texts(clone) == before


FAULTS = [
    ("patches/sglang/series", "engram-config.patch\n", "", "an orphan"),
    ("patches/sglang/series", "engram-config", "gone", "gone.patch does not exist"),
    (
        "patches/sglang/series",
        "engram-config.patch\n",
        "engram-config.patch\nengram-config.patch\n",
        "engram-config.patch is there 2 times",
    ),
    (LOADER_PATCH, "Forwarded: no\n", "", "expected one line 'Forwarded:', got 0"),
    (LOADER_PATCH, "temporary, until", "because", 'reason "because'),
    (LOADER_PATCH, "0.5.23", "0.5.22", "Applies-To is not sglang 0.5.23"),
    (LOADER_PATCH, "feat(loader): k", "K", "expected '[PATCH] type(scope)"),
    (LOADER_PATCH, "2026-11-29\nReason", "soon\nReason", "Last-Update is no date"),
    (LOADER_PATCH, "Tests: test/", "Tests: nowhere/", "no such file"),
    (LOADER_PATCH, "planned_weights.py\nTouches", "x.py\nTouches", "line 'Adds:'"),
    (
        LOADER_PATCH,
        "@@ -110,",
        "@@ -111,",
        "line 111 is not what the patch expects",
    ),
    (
        LAST_PATCH,
        "+from sglang",
        "+ from sglang",
        "hashes of sglang/srt/model_exe",
    ),
    (
        LAST_PATCH,
        "of this name",
        "of it",
        "hashes of sglang/srt/model_load",
    ),
    (LOADER_PATCH, "..ccd8932a", "..00000000", "not as make patches writes it"),
    (
        OTHER_PATCH,
        "Touches: python/sglang/srt/m",
        "Touches: x",
        "but has hunks for",
    ),
    (
        "patches/targets.toml",
        'patched = "1',
        'patched = "2',
        "hashes of sglang/srt/",
    ),
    ("patches/targets.toml", "hunks = 25", "hunks = 5", "expected fewer than 5"),
    ("docs/patches.md", "| no |", "| yes |", "the table is stale"),
    ("python/loadplan/core/plan.py", "import enum", "import  enum", "ruff format"),
    ("python/loadplan/core/plan.py", "import enum", "import enum, os", "F401"),
]


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"), FAULTS, ids=[fault[3] for fault in FAULTS]
)
def test_fault_is_reported(
    clone: Path, file: str, old: str, new: str, problem: str
) -> None:
    """Red when a fault in the series or its surroundings passes the check."""
    edit(clone / file, old, new)
    result = run(clone, "check_patches.py", "sglang")
    assert result.returncode == 1
    assert problem in result.stdout, result.stdout + result.stderr


def test_edit_of_the_patched_tree_becomes_a_hunk(clone: Path) -> None:
    """Red when make patches loses an edit, or setup overwrites one."""
    loader = clone / "build/engines/sglang/patched" / LOADER
    edit(loader, "import collections\n", "import collections\nimport colorsys\n")
    setup = run(clone, "engine_trees.py")
    assert setup.returncode == 1
    assert "loader.py: has edits that no patch holds" in setup.stderr
    assert run(clone, "refresh_patches.py", "sglang").returncode == 0
    assert "+import colorsys\n" in (clone / LAST_PATCH).read_text()
    assert run(clone, "engine_trees.py").returncode == 0
    # The import is unused: all is well but for the engine's own linter.
    result = run(clone, "check_patches.py", "sglang")
    assert "F401" in result.stdout
    assert "make patches" not in result.stdout


def test_file_that_is_touched_no_longer_is_retired(clone: Path) -> None:
    """Red when revert forgets what an earlier version of loadplan patched."""
    patch = clone / LAST_PATCH
    path = "python/sglang/srt/models/glm5_next_nextn.py"
    edit(patch, f"Touches: {path}\n", "")
    assert run(clone, "refresh_patches.py", "sglang").returncode == 0
    hashes = TARGET.files[path.removeprefix("python/")]
    assert (
        '[sglang.retired]\n"sglang/srt/models/glm5_next_nextn.py" = '
        f'"{hashes["pristine"]}"\n'
    ) in (clone / "patches/targets.toml").read_text()
    assert "Passed" in run(clone, "check_patches.py", "sglang").stdout


def test_recipe_for_a_new_release(clone: Path) -> None:
    """As docs/patches.md tells it; red when a step of it no longer works."""
    engines = clone / "build" / "engines" / "sglang"
    edit(clone / "patches/targets.toml", 'version = "0.5.23"', 'version = "0.5.24"')
    shutil.rmtree(engines / "patched")
    pristine = engines / "pristine"
    (pristine / TARGET.record).parent.rename(pristine / "sglang-0.5.24.dist-info")
    edit(pristine / LOADER, "import collections\n", "import collections\nimport abc\n")
    setup = run(clone, "engine_trees.py")
    assert setup.returncode == 1
    assert "loader.py: changed by something else" in setup.stderr

    shutil.copytree(pristine, engines / "patched")
    for patch in read_series(TARGET.patches):
        hunks = run(clone, "upstream_hunks.py", "sglang", patch.name)
        subprocess.run(
            ["patch", "--silent", "-p2", "-d", str(engines / "patched")],
            input=hunks.stdout,
            text=True,
            check=True,
        )
    for orig in engines.rglob("*.orig"):
        orig.unlink()
    assert run(clone, "refresh_patches.py", "sglang").returncode == 0
    setup = run(clone, "engine_trees.py")
    assert setup.returncode == 0, setup.stderr
    assert "@@ -111,6 +111,7 @@" in (clone / LOADER_PATCH).read_text()
    assert "Applies-To: sglang 0.5.24\n" in (clone / OTHER_PATCH).read_text()
    result = run(clone, "check_patches.py", "sglang")
    assert "make patches" not in result.stdout
    assert "0.5.23" not in result.stdout
