"""The distribution carries all that a patched engine needs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRISTINE = ROOT / "build" / "engines" / "sglang" / "pristine"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked outside the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("loadplan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_installed_command_patches_and_reverts_an_engine(
    installed: Path, tmp_path: Path
) -> None:
    """Red when patches or new files are left out of the wheel."""
    from loadplan.engines import targets

    target = targets.find_target("sglang")
    for path in (*target.files, "sglang/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((PRISTINE / path).read_bytes())
    environment = os.environ | {"PYTHONPATH": str(installed)}
    changed = len(target.files) + len(target.new_files())
    for command, word in (("apply", "patched"), ("revert", "pristine")):
        result = subprocess.run(
            [sys.executable, "-m", "loadplan", command, "sglang"]
            + ["--target", str(tmp_path)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert f"{word}, {changed} files changed" in result.stdout
