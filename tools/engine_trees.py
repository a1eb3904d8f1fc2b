"""Lay out every pinned engine under build/engines: a pristine tree and a patched one.

Safe to run again: a finished tree is left alone, an unfinished one is made anew.
"""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from loadplan.engines.apply import apply
from loadplan.engines.survey import FileState, file_states
from loadplan.engines.targets import Target, load_targets

BUILD = Path(__file__).resolve().parents[1] / "build"


def main() -> None:
    for target in load_targets().values():
        folder = BUILD / "engines" / target.name
        pristine, patched = folder / "pristine", folder / "patched"
        if not _has_release(target, pristine):
            _unpack(target, pristine)
        if not _is_patched(target, patched):
            _copy_patched(target, pristine, patched)
        print(f"{target.name} {target.version}: {pristine} and {patched}")


def _has_release(target: Target, tree: Path) -> bool:
    return (tree / f"{target.package}-{target.version}.dist-info").is_dir()


def _is_patched(target: Target, tree: Path) -> bool:
    if not _has_release(target, tree):
        return False
    states = file_states(target, tree)
    for path in target.files:
        if states[path] is FileState.UNKNOWN:
            sys.exit(
                f"{tree / path}: has edits that no patch holds; keep them by 'make "
                f"patches', or remove {tree}"
            )
    return all(state is FileState.PATCHED for state in states.values())


def _wheel(target: Target) -> Path:
    wheels = BUILD / "wheels"
    pattern = f"{target.package}-{target.version}-*.whl"
    if not any(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--dest", str(wheels), f"{target.name}=={target.version}"]
        subprocess.run(command, check=True)
    return next(wheels.glob(pattern))


def _unpack(target: Target, tree: Path) -> None:
    wheel = _wheel(target)
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if any(fnmatch.fnmatch(name, pattern) for pattern in target.unpack):
                    archive.extract(name, scratch)
        _replace(Path(scratch), tree)


def _copy_patched(target: Target, pristine: Path, patched: Path) -> None:
    with tempfile.TemporaryDirectory(dir=patched.parent) as scratch:
        # Copies, since files below the patched tree are edited by hand.
        shutil.copytree(
            pristine,
            Path(scratch) / "tree",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        apply(target, Path(scratch) / "tree")
        _replace(Path(scratch) / "tree", patched)


def _replace(source: Path, destination: Path) -> None:
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir()
    # A rename is one step: the destination is empty or whole.
    source.chmod(0o755)
    source.rename(destination)
    if not source.exists():
        source.mkdir()  # TemporaryDirectory removes it


if __name__ == "__main__":
    main()
