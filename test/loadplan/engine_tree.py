"""A small tree of the released engine: only the files that the patches touch."""

from __future__ import annotations

import base64
import hashlib
import shutil
from pathlib import Path

from loadplan.engines import targets

TARGET = targets.find_target("sglang")
TREES = Path(__file__).parents[2] / "build" / "engines"
PRISTINE = TREES / TARGET.name / "pristine"
LOADER = "sglang/srt/model_loader/loader.py"

Snapshot = dict[str, tuple[bytes, int]]


def make_tree(root: Path, *, target: targets.Target = TARGET, end: str = "\n") -> Path:
    """Copy the touched files to ``root``, with a RECORD whose lines end by ``end``."""
    package = target.package
    paths = sorted((*target.files, f"{package}/__init__.py"))
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREES / target.name / "pristine" / path, root / path)
    record = root / target.record
    record.parent.mkdir()
    (record.parent / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {target.name}\nVersion: {target.version}\n"
    )
    lines = [record_line(root, path) for path in paths]
    lines += [
        f"{record.parent.name}/RECORD,,",
        f"{package}/__pycache__/x.cpython.pyc,,",
    ]
    record.write_bytes("".join(line + end for line in lines).encode())
    return root


def record_line(root: Path, path: str) -> str:
    content = (root / path).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return f"{path},sha256={digest.rstrip('=')},{len(content)}"


def snapshot(root: Path) -> Snapshot:
    """Content and mode of every file and folder by path, compiled files left out."""
    paths = (path for path in root.rglob("*") if path.suffix != ".pyc")
    return {
        path.relative_to(root).as_posix(): (
            path.read_bytes() if path.is_file() else b"",
            path.lstat().st_mode,
        )
        for path in paths
    }
