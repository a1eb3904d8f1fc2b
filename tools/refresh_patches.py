"""Write an engine's patches, their hashes and their table from its edited tree.

Edit files below build/engines/ENGINE/patched, then run this. An edit goes to the last
patch of the series that touches its file; name new files of a patch in its header, on
a line "Touches: PATH" per file. Files that the engine does not have are no part of a
patch: edit them below python/.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import patch_table

from loadplan.engines import export
from loadplan.engines.series import (
    Hunk,
    Patch,
    apply_hunks,
    read_series,
    reverse_hunks,
)
from loadplan.engines.stages import changed_files
from loadplan.engines.survey import sha256
from loadplan.engines.targets import Target, find_target, load_targets

BUILD = Path(__file__).resolve().parents[1] / "build"


def main(names: list[str]) -> None:
    for name in names or load_targets():
        refresh(name)
    patch_table.write()
    for name in names or load_targets():
        target = find_target(name)
        print(f"Lines that the mails add to {name} {target.version}:")
        print(export.size_table(export.plan_export(target)))


def refresh(name: str) -> None:
    target = find_target(name)
    pristine = BUILD / "engines" / name / "pristine"
    edited = BUILD / "engines" / name / "patched"
    series = read_series(target.patches)
    own = own_diffs(target, series)
    last = {
        path: patch.name
        for patch in series
        for path in patch.trailers("Touches")
        if path not in own[patch.name]
    }
    before = {path: read(target, pristine, path) for path in last}
    hashes = {p: {"pristine": sha256(text.encode())} for p, text in before.items()}
    for patch in series:
        diffs = []
        for path in patch.trailers("Touches"):
            if path in own[patch.name]:
                diffs.append(own[patch.name][path])
                continue
            if last[path] == patch.name:
                after = read(target, edited, path)
            else:
                label = f"{patch.name}: {path}"
                hunks = moved(before[path], patch.hunks[path])
                after = apply_hunks(before[path], hunks, label=label)
            diffs.append(diff(path, before[path], after))
            before[path] = after
        header = applies_to(target, patch)
        text = "\n".join([header, "".join(diffs)]) if diffs else header
        (target.patches / patch.name).write_text(text, encoding="utf-8")
    for path, text in before.items():
        hashes[path]["patched"] = sha256(text.encode())
    write_hashes(target, hashes)


def own_diffs(target: Target, series: list[Patch]) -> dict[str, dict[str, str]]:
    """By patch and path, the diffs of files that an earlier patch of it added.

    Their last form is what is edited, below python/. An edit at a place that no patch
    changes moves their hunks; one at such a place needs its hunk edited too.
    """
    texts = {target.upstream(p): c.decode() for p, c in target.new_files().items()}
    found: dict[str, dict[str, str]] = {}
    for patch in reversed(series):
        found[patch.name] = {}
        for path in changed_files(target, patch):
            after = texts[path]
            hunks = moved(after, reverse_hunks(patch.hunks[path]))
            texts[path] = apply_hunks(after, hunks, label=f"{patch.name}: {path}")
            found[patch.name][path] = diff(path, texts[path], after)
    return found


def moved(text: str, hunks: tuple[Hunk, ...]) -> tuple[Hunk, ...]:
    """``hunks`` at their lines in a new release, nearest to where they were."""
    lines = tuple(text.splitlines(keepends=True))
    found = []
    for hunk in hunks:
        size = len(hunk.old)
        starts = range(1, len(lines) - size + 2)
        places = [s for s in starts if lines[s - 1 : s - 1 + size] == hunk.old]
        near = min(places, key=lambda s, at=hunk.start: abs(s - at), default=hunk.start)
        found.append(dataclasses.replace(hunk, start=near))
    return tuple(found)


def applies_to(target: Target, patch: Patch) -> str:
    """The header of ``patch``, for the pinned release."""
    line = f"Applies-To: {target.name} {target.version}"
    return re.sub(r"^Applies-To: .*$", line, patch.header, flags=re.MULTILINE)


def read(target: Target, tree: Path, path: str) -> str:
    return (tree / path.removeprefix(target.prefix)).read_bytes().decode()


def diff(path: str, before: str, after: str) -> str:
    """A unified diff of one file, as git writes it."""
    with tempfile.TemporaryDirectory() as folder:
        for side, text in (("a", before), ("b", after)):
            file = Path(folder, side, path)
            file.parent.mkdir(parents=True)
            file.write_bytes(text.encode())
        command = ["git", "diff", "--no-index", "--full-index", "--no-color"]
        command += ["--no-ext-diff", "--no-prefix", f"a/{path}", f"b/{path}"]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode > 1:
        raise RuntimeError(result.stderr)
    return result.stdout


def write_hashes(target: Target, hashes: dict[str, dict[str, str]]) -> None:
    """Replace the tables [ENGINE.retired] and [ENGINE.files.*] of ``target``.

    Those of all engines stand at the end. A file that is no longer touched is kept as
    retired: an installation may still have it patched by the loadplan of before.
    """
    touched = {path.removeprefix(target.prefix): pair for path, pair in hashes.items()}
    retired = target.retired | {
        path: pair["pristine"] for path, pair in target.files.items()
    }
    gone = {path: digest for path, digest in retired.items() if path not in touched}
    targets = load_targets()
    targets[target.name] = dataclasses.replace(target, files=touched, retired=gone)
    file = target.patches.parent / "targets.toml"
    kept, written = [], False
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            written = ".files." in line or ".retired]" in line
        if not written:
            kept.append(line)
    lines = "\n".join(kept).rstrip().splitlines()
    for engine in targets.values():
        lines += hash_tables(engine)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def hash_tables(target: Target) -> list[str]:
    """The lines of targets.toml that hold the hashes of ``target``."""
    lines = []
    if target.retired:
        lines += ["", f"[{target.name}.retired]"]
        lines += [f'"{path}" = "{digest}"' for path, digest in target.retired.items()]
    for path, pair in sorted(target.files.items()):
        lines += ["", f'[{target.name}.files."{path}"]']
        lines += [f'{state} = "{digest}"' for state, digest in sorted(pair.items())]
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
