"""What an engine prints goes into the log, whoever prints it and however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

_PRINTING = """
import logging, os, sys
from pathlib import Path
from loadplan.load.noise import kept_in
print("before")
try:
    with kept_in(Path(sys.argv[1])) as (out, err):
        print("python")
        print("error", file=sys.stderr)
        os.write(1, b"compiled\\n")
        os.system("echo child >&2")
        handler = logging.StreamHandler()
        logging.getLogger("engine").addHandler(handler)
        print("ours", file=out)
        print("our bar", file=err)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("after", file=sys.stderr)
logging.getLogger("engine").warning("late")
os.write(1, b"last\\n")
"""


def test_what_the_engine_prints_is_in_the_log_alone(tmp_path: Path) -> None:
    """Red when a way to print is missed, our output is lost, or nothing is put back."""
    log = tmp_path / "engine.log"
    log.write_text("of another run\n")
    result = subprocess.run(
        [sys.executable, "-c", _PRINTING, log],
        env={"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["before", "ours", "last"]
    assert result.stderr.splitlines() == ["our bar", "after"]
    assert log.read_text().split() == ["python", "error", "compiled", "child", "late"]
