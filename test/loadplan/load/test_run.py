"""A load that is watched, compared and interrupted; test_cli.py has the proofs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from files import write_shard
from safetensors.torch import load_file

from loadplan.core.header import read_headers
from loadplan.core.loading import decide_routes
from loadplan.core.plan import LoadPlan
from loadplan.load.run import run_load
from loadplan.synth.options import SynthOptions
from loadplan.synth.writer import synthesize

ROOT = Path(__file__).parents[3]
ENGINE = ROOT / "build" / "engines" / "sglang" / "patched"


class Engine:
    """An engine of one table, whose weights are what the files hold."""

    name = "test"

    def __init__(self, checkpoint: Path) -> None:
        self._weights = load_file(checkpoint / "model.safetensors")
        self.table = torch.zeros_like(self._weights["b.engram.embed.weight"])
        self.closed = 0

    def tables(self) -> str:
        return "none"

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from self._weights.items()
        finally:
            self.closed += 1

    default_weights = weights

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        if ".engram.embed." in name:
            self.table.copy_(tensor)
            return True
        return False

    def finish(self) -> dict[str, torch.Tensor]:
        return {"b.engram.embed.weight": self.table}


class Steps:
    """Notes the phases; raises KeyboardInterrupt in the one called ``interrupt``."""

    def __init__(self, interrupt: str = "") -> None:
        self.phases: list[tuple[str, int]] = []
        self.nbytes: dict[str, int] = {}
        self._interrupt = interrupt

    def begin(self, phase: str, nbytes: int) -> None:
        self.phases.append((phase, nbytes))

    def done(self, nbytes: int) -> None:
        phase = self.phases[-1][0]
        self.nbytes[phase] = self.nbytes.get(phase, 0) + nbytes
        if phase == self._interrupt:
            raise KeyboardInterrupt


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = [("a", "U8", (100,)), ("b.engram.embed.weight", "U8", (10, 20))]
    write_shard(tmp_path / "model.safetensors", [*tensors, ("c", "U8", (3, 7))])
    return tmp_path


def plan_of(checkpoint: Path) -> LoadPlan:
    headers = read_headers([str(checkpoint / "model.safetensors")])
    return decide_routes(headers, host_resident_weight_patterns=[".engram.embed."])


def test_phases_and_seconds_add_up(checkpoint: Path) -> None:
    """Red when a phase, a byte of one or the time of a route is lost."""
    steps = Steps()
    report = run_load(
        Engine(checkpoint), plan_of(checkpoint), checkpoint, reader="", steps=steps
    )
    # What shares its file with the table is read apart from it.
    assert steps.phases == [
        ("READ", 121),
        ("HOST", 200),
        ("READ", 121),
        ("checking", 321),
    ]
    assert steps.nbytes == {"READ": 121, "HOST": 200, "checking": 321}
    assert report.wrong == ()
    assert report.table_bytes == 200
    assert report.loading_seconds == pytest.approx(
        sum(route.seconds for route in report.routes.values())
    )
    assert report.default is None


def test_comparison_tells_whether_the_default_loader_brings_the_same(
    checkpoint: Path,
) -> None:
    """Red when other bytes of the default loader go unseen."""
    engine = Engine(checkpoint)
    plan = plan_of(checkpoint)
    report = run_load(engine, plan, checkpoint, reader="", compare=True)
    assert report.default is not None and report.default.same
    engine.default_weights = lambda: map(damaged, engine.weights())
    report = run_load(engine, plan, checkpoint, reader="", compare=True)
    assert report.default is not None and not report.default.same


def damaged(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, tensor = item
    return name, tensor + 1 if name == "c" else tensor


@pytest.mark.parametrize("phase", ["READ", "HOST", "checking"])
def test_interrupt_leaves_nothing_running(checkpoint: Path, phase: str) -> None:
    """Red when a thread, or the engine's iterator, outlives an interrupted load."""
    before = set(threading.enumerate())
    engine = Engine(checkpoint)
    with pytest.raises(KeyboardInterrupt):
        run_load(engine, plan_of(checkpoint), checkpoint, reader="", steps=Steps(phase))
    assert engine.closed == 1
    assert set(threading.enumerate()) == before


# The command.


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "checkpoint"
    synthesize(folder, SynthOptions(size=256 << 20, mixed_engram=True))
    return folder


def start(*arguments: object, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "loadplan", "load", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    return subprocess.Popen(
        [*command, "--engine-dir", str(ENGINE)],
        env=environment | options,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What runs in the background ignores it, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def reads_a_shard(process: subprocess.Popen[str]) -> bool:
    """Whether a file of the checkpoint is open there."""
    for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).endswith(".safetensors"):
                return True
    return False


def test_compare_through_the_engine(synthetic: Path) -> None:
    """Red when the engine's default loader is not run, or memory is not measured."""
    output, error = start(synthetic, "--compare", "--json").communicate(timeout=300)
    report = json.loads(output)
    assert report["wrong"] == [], error
    assert report["default"]["same"] is True
    assert report["table_bytes"] == report["routes"]["host"]["nbytes"]
    for peaks in (report["peaks"], report["default"]["peaks"]):
        assert set(peaks) == {"host", "pinned", "page_cache", "device"}
    # The stub's "device" is host memory too: at least its largest tensor was held.
    assert report["peaks"]["host"] > 0


def test_ctrl_c_ends_the_load_and_everything_it_started(
    synthetic: Path, tmp_path: Path
) -> None:
    """Red when it is a traceback, another exit code, or something stays behind."""
    process = start(synthetic, "--compare", TMPDIR=str(tmp_path))
    while not reads_a_shard(process) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert error.splitlines()[-1] == "ERROR interrupted"
    assert "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(tmp_path.iterdir()) == []
