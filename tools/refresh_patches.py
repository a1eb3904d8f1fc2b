"""Write an engine's patches and their hashes from its edited tree.

Edit files below build/engines/ENGINE/patched, then run this. An edit goes to the last
patch of the series that touches its file; name new files of a patch in its header, on
a line "Touches: PATH" per file. Files that the engine does not have are no part of a
patch: edit them below python/.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from loadplan.engines import Target, find_target
from loadplan.patching import sha256
from loadplan.series import Patch, apply_hunks, read_series

BUILD = Path(__file__).resolve().parents[1] / "build"


def main(name: str) -> None:
    target = find_target(name)
    pristine = BUILD / "engines" / name / "pristine"
    edited = BUILD / "engines" / name / "patched"
    series = read_series(target.patches)
    last = {path: patch.name for patch in series for path in touched(patch)}
    before = {path: read(target, pristine, path) for path in last}
    hashes = {p: {"pristine": sha256(text.encode())} for p, text in before.items()}
    for patch in series:
        diffs = []
        for path in touched(patch):
            if last[path] == patch.name:
                after = read(target, edited, path)
            else:
                label = f"{patch.name}: {path}"
                after = apply_hunks(before[path], patch.hunks[path], label=label)
            diffs.append(diff(path, before[path], after))
            before[path] = after
        (target.patches / patch.name).write_text(patch.header + "\n" + "".join(diffs))
    for path, text in before.items():
        hashes[path]["patched"] = sha256(text.encode())
    write_hashes(target, hashes)


def touched(patch: Patch) -> list[str]:
    """The upstream paths that the header of ``patch`` names."""
    lines = patch.header.splitlines()
    return [line.split()[1] for line in lines if line.startswith("Touches: ")]


def read(target: Target, tree: Path, path: str) -> str:
    return (tree / path.removeprefix(target.prefix)).read_text()


def diff(path: str, before: str, after: str) -> str:
    """A unified diff of one file, as git writes it."""
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", before), ("b", after)):
            file = Path(folder, side, path)
            file.parent.mkdir(parents=True)
            file.write_text(text)
        command = ["git", "diff", "--no-index", "--full-index", "--no-color"]
        command += ["--no-ext-diff", "--no-prefix", f"a/{path}", f"b/{path}"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode > 1:
        raise RuntimeError(result.stderr)
    return result.stdout


def write_hashes(target: Target, hashes: dict[str, dict[str, str]]) -> None:
    """Replace the tables [ENGINE.files."PATH"], which stand last for each engine."""
    file = target.patches.parent / "targets.toml"
    kept, skipping = [], False
    for line in file.read_text().splitlines():
        if line.startswith("["):
            skipping = line.startswith(f"[{target.name}.files.")
        if not skipping:
            kept.append(line)
    lines = "\n".join(kept).rstrip().splitlines()
    for path, pair in sorted(hashes.items()):
        lines += ["", f'[{target.name}.files."{path.removeprefix(target.prefix)}"]']
        lines += [f'{state} = "{digest}"' for state, digest in sorted(pair.items())]
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
