"""Check each engine's patch series against its pinned release and against its rules.

    PYTHONPATH=python python tools/check_patches.py [--static] [ENGINE ...]

Prints every problem; exit code 1 if there is one. A series that is at fault by itself
is not exported and linted. Needs the pristine release below build/engines, which ``make
setup`` lays out; ``--static`` neither exports nor lints.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import patch_table
from refresh_patches import BUILD, applies_to, diff

from loadplan.engines import export
from loadplan.engines.series import (
    Patch,
    apply_hunks,
    read_patch,
    read_series,
    series_names,
)
from loadplan.engines.stages import added_files, own_stages
from loadplan.engines.survey import sha256
from loadplan.engines.targets import Target, data_folder, load_targets

_SUBJECT = re.compile(r"\[PATCH\] [a-z]+\([a-z0-9-]+\): [^A-Z].*[^.]")
_REASON = re.compile(r"(temporary|local), .+")
_WIDTH = 80


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--static", action="store_true")
    parser.add_argument("engines", nargs="*", metavar="ENGINE")
    arguments = parser.parse_args()
    targets = load_targets()
    if arguments.engines:
        targets = {name: targets[name] for name in arguments.engines}
    problems = [
        f"{target.name}: {problem}"
        for target in targets.values()
        for problem in check(target, static=arguments.static)
    ]
    # The table takes well-formed headers for granted.
    if not problems and patch_table.is_stale():
        problems = [f"{patch_table.PAGE.name}: the table is stale, run make patches"]
    for problem in problems:
        print(problem)
    if problems:
        return 1
    count = sum(len(series_names(target.patches)) for target in targets.values())
    print(f"Passed ({count} patches, {len(targets)} releases)")
    return 0


def check(target: Target, *, static: bool = False) -> Iterator[str]:
    """The problems of one engine's series, in the order of how early they matter."""
    found = [*check_files(target), *check_headers(target)]
    yield from found
    if found:
        return  # what follows takes a well-formed series for granted
    pristine = BUILD / "engines" / target.name / "pristine"
    if not (pristine / target.record).is_file():
        yield f"{pristine}: no {target.name} {target.version} here, run make setup"
        return
    try:
        patched: dict[str, str] = {}
        found = [*check_hunks(target, pristine, patched)]
        yield from found
        if not (found or static):
            yield from check_export(target, pristine, patched)
    except ValueError as error:
        yield str(error)


def check_files(target: Target) -> Iterator[str]:
    """Every patch stands in the series once, and every entry is there."""
    names = series_names(target.patches)
    present = {path.name for path in target.patches.glob("*.patch")}
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"series: {name} is there {names.count(name)} times"
        if name not in present:
            yield f"series: {name} does not exist"
    for name in sorted(present - set(names)):
        yield f"{name}: an orphan, the series does not name it"


def check_headers(target: Target) -> Iterator[str]:
    """Headers name what export, status and the table need."""
    owned: list[str] = []
    for path in sorted(target.patches.glob("*.patch")):
        patch = read_patch(path)
        owned += added_files(target, patch)
        for problem in _header(target, patch):
            yield f"{patch.name}: {problem}"
    for path in map(target.upstream, target.new_files()):
        if owned.count(path) != 1:
            yield (
                f"{path}: expected one line 'Adds:' or one layer in LAYERS.toml that "
                f"brings it, got {owned.count(path)}"
            )


def _header(target: Target, patch: Patch) -> Iterator[str]:
    for key in ("From", "Date", "Subject", "Applies-To", "Forwarded", "Reason"):
        if len(patch.trailers(key)) != 1:
            yield f"expected one line '{key}:', got {len(patch.trailers(key))}"
            return
    (subject,), (reason,) = patch.trailers("Subject"), patch.trailers("Reason")
    if not _SUBJECT.fullmatch(subject):
        yield f"subject {subject!r}, expected '[PATCH] type(scope): summary'"
    if not _REASON.fullmatch(reason):
        yield f"reason {reason!r}, expected 'temporary, until ...' or 'local, ...'"
    if applies_to(target, patch) != patch.header:
        yield f"Applies-To is not {target.name} {target.version}"
    try:
        datetime.date.fromisoformat(*patch.trailers("Last-Update"))
    except (TypeError, ValueError):
        yield "Last-Update is no date like 2026-11-29"
    if not re.search(r"\n\n(?!Applies-To)\S", patch.header):
        yield "no text that says why"
    for line in patch.header.splitlines():
        if len(line) >= _WIDTH and not re.match(r"[A-Z][\w-]+: ", line):
            yield f"a line of {len(line)} characters, expected fewer than {_WIDTH}"
    if sorted(patch.trailers("Touches")) != sorted(patch.hunks):
        yield f"Touches {patch.trailers('Touches')}, but has hunks for {[*patch.hunks]}"
    for key in ("Tests", "Docs", "Proofs"):
        if not patch.trailers(key) and key != "Proofs":
            yield f"no line '{key}:'"
        for path in patch.trailers(key):
            if not (data_folder() / path).is_file():
                yield f"{key} {path}: no such file"


def check_hunks(target: Target, pristine: Path, texts: dict[str, str]) -> Iterator[str]:
    """Hunks fit without fuzz or offset, are written as make patches does, and hash.

    Puts the patched text of every touched file into ``texts`` by its upstream path.
    """
    hashes: dict[str, dict[str, str]] = {}
    series = read_series(target.patches)
    own: dict[str, str] = {}
    for patch, stage in zip(series, own_stages(target, series), strict=True):
        written = ""
        before, own = own, stage
        for path, hunks in patch.hunks.items():
            if path in own:
                written += diff(path, before[path], own[path])
                continue
            file = path.removeprefix(target.prefix)
            if path not in texts:
                texts[path] = (pristine / file).read_bytes().decode()
                hashes[file] = {"pristine": sha256(texts[path].encode())}
            label = f"{patch.name}: {path}"
            after = apply_hunks(texts[path], hunks, label=label)
            written += diff(path, texts[path], after)
            texts[path] = after
            hashes[file]["patched"] = sha256(after.encode())
        if written != patch.diff:
            yield f"{patch.name}: not as make patches writes it, run make patches"
    for path in sorted(hashes.keys() | target.files.keys()):
        if hashes.get(path) != target.files.get(path):
            yield f"targets.toml: hashes of {path} are not right, run make patches"


def check_export(
    target: Target, pristine: Path, patched: dict[str, str]
) -> Iterator[str]:
    """What upstream would get is stable, new where it says so, and clean."""
    commits = export.plan_export(target)
    numbered = [*enumerate(commits, start=1)]
    total = len(commits)
    mails = [export.mail(target, c, number=n, total=total) for n, c in numbered]
    again = enumerate(export.plan_export(target), start=1)
    if mails != [export.mail(target, c, number=n, total=total) for n, c in again]:
        yield "the exported text is another one each time"
    texts = dict(patched)
    for commit in commits:
        for path, text in commit.new.items():
            if (pristine / path.removeprefix(target.prefix)).exists():
                yield f"{commit.name}: {path} exists in {target.name} {target.version}"
            texts[path] = text
    yield from lint(target, texts)


def lint(target: Target, texts: dict[str, str]) -> Iterator[str]:
    """What the engine's own formatter and linters say of these files."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            file = Path(folder, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        files = sorted(path for path in texts if path.endswith(".py"))
        for linter in target.rules.linters:
            result = subprocess.run(
                [sys.executable, "-m", *shlex.split(linter), *files],
                cwd=folder,
                capture_output=True,
                text=True,
            )
            if result.returncode != 0:
                yield f"{linter}:\n{result.stdout}{result.stderr}"


if __name__ == "__main__":
    sys.exit(main())
