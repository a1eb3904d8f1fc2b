"""The runner that forks: a job is like a fresh process, and says so when it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_part
import run_tests
import warm
import warm_server

forks_only = pytest.mark.skipif(
    os.environ.get(warm.SETTING) == "off", reason="every job is a fresh process"
)
HELLO = "import loadplan, os, sys; print(loadplan.__file__, os.getcwd(), sys.argv)"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        "import sys; sys.exit('a reason')",
        "1 / 0",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import atexit; atexit.register(print, 'last')",
        "import sys; print(sys.argv, __name__, 'sys' in vars(sys.modules[__name__]))",
        "import subprocess, sys; print(subprocess.call(['false']), sys.stdin.read())",
        "import os; print(os.environ['HERE'], os.getcwd())",
        "import threading; threading.Timer(0.1, print, ['timer']).start()",
    ],
)
def test_job_does_what_a_fresh_process_does(tmp_path: Path, code: str) -> None:
    """Output, errors and exit code; red when a fork can be told from the real one."""
    options = {"cwd": tmp_path, "env": os.environ | {"HERE": "yes"}}
    forked = warm.run(["-c", code, "word"], **options)
    fresh = warm.run(["-c", code, "word"], fresh=True, **options)
    assert forked.returncode == fresh.returncode
    assert forked.stdout == fresh.stdout
    # A traceback goes on through the server's own lines.
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_job_imports_from_its_own_tree(tmp_path: Path) -> None:
    """Red when a module of the parent or of another job is taken for its own."""
    for name in ("one", "two"):
        package = tmp_path / name / "loadplan"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        environment = os.environ | {"PYTHONPATH": str(package.parent)}
        job = warm.run(["-c", HELLO], cwd=tmp_path, env=environment)
        assert job.stdout.startswith(f"{package}/__init__.py {tmp_path}"), job.stderr


SPAWN = """
import multiprocessing, os, sys
def name(_):
    return os.environ["HERE"], "torch" in sys.modules
if __name__ == "__main__":
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            print(pool.map(name, [0]))
"""
PYTEST = """
import multiprocessing, subprocess, sys
from spawning import name
def test_processes_are_our_own_children():
    for kind in ("spawn", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            assert pool.map(name, [0]) == [("yes", WARM)]
"""


@forks_only
def test_processes_of_multiprocessing_begin_as_forks(tmp_path: Path) -> None:
    """Red when each rank of a test imports torch again, or gets another world."""
    (tmp_path / "spawning.py").write_text(SPAWN)
    (tmp_path / "test_it.py").write_text(PYTEST.replace("WARM", "True"))
    options = {
        "cwd": tmp_path,
        "env": os.environ | {"HERE": "yes", "PYTHONPATH": str(tmp_path)},
    }
    script = [tmp_path / "spawning.py"]
    assert warm.run(script, **options).stdout == 2 * "[('yes', False)]\n"
    job = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    result = warm.run(job, **options)
    assert result.returncode == 0, result.stdout
    assert warm.run(job, fresh=True, **options).returncode == 1


@forks_only
def test_job_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """Red when a test that hangs keeps a rank alive behind it."""
    code = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}'); time.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["-c", code], cwd=tmp_path, timeout=5)
    # The next job is begun after the last one's end was seen to.
    warm.run(["-c", ""])
    job, child = (tmp_path / "pids").read_text().split()
    assert not Path("/proc", job).exists()
    status = Path("/proc", child, "status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_server_with_an_engine_forks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a job could begin with another tree's engine."""
    monkeypatch.setitem(sys.modules, "sglang.srt", sys)
    with pytest.raises(RuntimeError, match="'sglang'.* loaded before the fork"):
        warm_server.check_before_fork()


@pytest.mark.parametrize(
    ("output", "code", "counts"),
    [
        ("..\n2 passed in 0.10s\n", 0, {"passed": 2}),
        (
            "1 failed, 2 passed, 1 skipped, 3 subtests passed, 1 warning in 61.10s"
            " (0:01:01)\n",
            1,
            {"failed": 1, "passed": 2, "skipped": 1},
        ),
        ("2 errors in 0.10s\n", 2, {"error": 3}),
        ("2 passed in 0.10s\n", 1, {"passed": 2, "error": 1}),
        ("2 passed in 0.10s\n", -11, {"passed": 2, "error": 1}),
        ("no tests ran in 0.10s\n", 5, {"error": 1}),
        ("Segmentation fault\n", -11, {"error": 1}),
    ],
)
def test_counts_are_pytests_and_no_failure_is_lost(
    output: str, code: int, counts: dict[str, int]
) -> None:
    """Red when a file that crashes or collects nothing counts as well."""
    assert run_tests.counts_of(output, code) == Counter(counts)


def test_closing_line_is_worded_as_pytests() -> None:
    """Red when CI can no longer read it."""
    counts = Counter(passed=20, failed=3, error=2)
    assert run_tests.closing_line(counts, 4.051) == (
        "3 failed, 20 passed, 2 errors in 4.05s"
    )


def test_every_test_file_is_run_once() -> None:
    """Red when a new folder of tests is run by nothing."""
    files = {job.path for job in run_tests.find_jobs(run_tests.FOLDERS)}
    present = {
        path.relative_to(run_tests.ROOT).as_posix()
        for path in (run_tests.ROOT / "test").rglob("test_*.py")
    }
    assert files == present
    assert files.issuperset(run_tests.PARTS)
    assert all((run_tests.ROOT / path).exists() for path in run_tests.CHECK)


@pytest.mark.parametrize(("tests", "parts"), [(7, 3), (12, 12), (20, 1)])
def test_parts_of_a_file_are_all_of_it(tests: int, parts: int) -> None:
    """Red when a test falls between two parts, or is run twice."""
    found = []
    for part in range(parts):
        items = list(range(tests))
        config = SimpleNamespace(getoption=lambda _, part=part: f"{part}/{parts}")
        pytest_part.pytest_collection_modifyitems(config, items)
        assert items
        found += items
    assert found == list(range(tests))
