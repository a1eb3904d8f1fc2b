"""Run the test files, each as a fork of a process with torch and the like loaded.

    PYTHONPATH=python python tools/run_tests.py [--jobs N] [--check] [PATH ...]

Every file has a process of its own, with the patched tree of its engine in its path;
files that take long come in parts. What failed is printed in full. The last line is
pytest's closing line over all files; exit code 1 unless every job passed. Without
paths all tests are run; ``--check`` takes those that ``make check`` runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[1]
# An engine's tests need that engine's patched tree; the others load SGLang, if any.
ENGINES = {
    "test/tokenspeed": "tokenspeed",
    "test/loadplan/load/test_load_tokenspeed.py": "tokenspeed",
    "test/vllm": "vllm",
    "test/end_to_end": "vllm",
    "test": "sglang",
}
FOLDERS = (
    "test/loadplan",
    "test/registered",
    "test/tokenspeed",
    "test/vllm",
    "test/end_to_end",
    "test/proof",
)
# Files whose tests are dealt out to so many processes.
PARTS = {
    "test/proof/test_engine_tests_bite.py": 12,
    "test/proof/test_export_in_upstream.py": 3,
    "test/loadplan/project/test_maintenance.py": 2,
}
# What covers most for its time: no whole loads, a few quick files of each engine.
CHECK = (
    "test/loadplan/checkpoint",
    "test/loadplan/core",
    "test/loadplan/doctor",
    "test/loadplan/engines/test_record.py",
    "test/loadplan/engines/test_series.py",
    "test/loadplan/engines/test_survey.py",
    "test/loadplan/engines/test_targets.py",
    "test/loadplan/engines/test_tree.py",
    "test/loadplan/project/test_lint.py",
    "test/loadplan/project/test_rooms.py",
    "test/loadplan/standin/test_standin_journal.py",
    "test/loadplan/standin/test_standin_instanttensor.py",
    "test/loadplan/synth/test_fit.py",
    "test/loadplan/synth/test_layout.py",
    "test/loadplan/synth/test_options.py",
    "test/registered/unit/model_loader/test_host_resident_weights.py",
    "test/registered/unit/model_loader/test_odd_checkpoints.py",
    "test/tokenspeed/test_planned_instanttensor.py",
    "test/tokenspeed/test_streamed_load_weights.py",
    "test/vllm/test_draft_load_policy.py",
    "test/vllm/test_unused_checkpoint_weights.py",
)
# Of the tests of one file; none takes a third of it.
_LIMIT = 900
_WORDS = ("failed", "passed", "skipped", "xfailed", "xpassed", "error")
_COUNT = re.compile(r"(\d+) (failed|passed|skipped|xfailed|xpassed|error)s?\b")
_CLOSING = re.compile(r"^=*\s*((?:\d+ [a-z ]+, )*\d+ [a-z ]+) in [\d.]+s.*$")


@dataclasses.dataclass(frozen=True)
class Job:
    """One pytest process: a file, or one of so many parts of it; see pytest_part."""

    path: str
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        return f"{self.path} {self.part + 1}/{self.parts}".removesuffix(" 1/1")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: pytest's counts by word, or one error where it has none."""

    job: Job
    counts: Counter[str]
    seconds: float
    used: float
    output: str

    @property
    def good(self) -> bool:
        return not (self.counts["failed"] or self.counts["error"])


def find_jobs(paths: Iterable[str]) -> list[Job]:
    """One job for each test file below the paths, several for those in PARTS."""
    files: list[str] = []
    for path in paths:
        found = ROOT / path
        inside = sorted(found.rglob("test_*.py")) if found.is_dir() else [found]
        files += [file.relative_to(ROOT).as_posix() for file in inside]
    return [
        Job(file, part, PARTS.get(file, 1))
        for file in dict.fromkeys(files)
        for part in range(PARTS.get(file, 1))
    ]


def engine_of(path: str) -> str:
    """The engine whose patched tree a test file runs with."""
    return next(ENGINES[prefix] for prefix in ENGINES if path.startswith(prefix))


def counts_of(output: str, returncode: int) -> Counter[str]:
    """What pytest's closing line counts; one error more where the exit code differs."""
    lines = [line for line in output.splitlines() if _CLOSING.match(line)]
    counts = Counter[str]()
    if lines:
        for number, word in _COUNT.findall(lines[-1]):
            counts[word] += int(number)
    expected = 1 if counts["failed"] or counts["error"] else 0
    if returncode != expected or not counts.total():
        counts["error"] += 1
    return counts


def closing_line(counts: Counter[str], seconds: float) -> str:
    """As pytest words it: ``3 failed, 20 passed, 1 skipped in 4.05s``."""
    words = [
        f"{counts[word]} {word}{'s' * (word == 'error' and counts[word] > 1)}"
        for word in _WORDS
        if counts[word]
    ]
    return f"{', '.join(words) or 'no tests ran'} in {seconds:.2f}s"


def run_job(job: Job) -> Outcome:
    tree = ROOT / "build" / "engines" / engine_of(job.path) / "patched"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            map(str, (tree, ROOT / "python", Path(__file__).parent))
        ),
        # Compiled modules stay: most of a job is the import of an engine.
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_part"]
    command += [f"--part={job.part}/{job.parts}", job.path]
    started = time.monotonic()
    try:
        result = warm.run(command, cwd=ROOT, env=environment, timeout=_LIMIT)
        output, code = result.stdout + result.stderr, result.returncode
        used = getattr(result, "seconds", 0.0)
    except Exception as error:
        output, code, used = f"{job.name}: {error}", 1, 0.0
    counts = counts_of(output, code)
    return Outcome(job, counts, time.monotonic() - started, used, output)


def in_order(jobs: list[Job], seconds: dict[str, float]) -> list[Job]:
    """What took longest last time first; what is new before everything."""
    return sorted(jobs, key=lambda job: -seconds.get(job.name, float("inf")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("paths", nargs="*")
    arguments = parser.parse_args()
    memory = ROOT / "build" / "warm" / "seconds.json"
    seconds = json.loads(memory.read_text()) if memory.exists() else {}
    paths = arguments.paths or (CHECK if arguments.check else FOLDERS)
    jobs = in_order(find_jobs(paths), seconds)
    counts, started = Counter[str](), time.monotonic()
    with warm.server(), ThreadPoolExecutor(arguments.jobs) as pool:
        for future in as_completed([pool.submit(run_job, j) for j in jobs]):
            outcome = future.result()
            counts += outcome.counts
            seconds[outcome.job.name] = round(outcome.seconds, 1)
            line = closing_line(outcome.counts, outcome.seconds)
            print(f"{outcome.job.name}: {line}, CPU {outcome.used:.1f}s", flush=True)
            if not outcome.good:
                print(outcome.output, flush=True)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")
    print(closing_line(counts, time.monotonic() - started))
    return 0 if counts["passed"] and not (counts["failed"] or counts["error"]) else 1


if __name__ == "__main__":
    sys.exit(main())
