"""Every probe of the doctor on this machine, and on one that refuses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from files import write_shard

from loadplan import cli, doctor
from loadplan.core import header
from loadplan.doctor import Finding, Need, Verdict, gpu, host, storage
from loadplan.inspection.loads import Hardware
from loadplan.standin.gpu import make_module

GOLDEN = Path(__file__).parent / "golden"
_PR_SET_THP_DISABLE = 41


def one(findings: list[Finding], about: str) -> Finding:
    (found,) = (finding for finding in findings if finding.about == about)
    return found


def refuse(number: int):
    """A system call that fails with ``number``."""

    def call(*arguments: object) -> int:
        ctypes.set_errno(number)
        return -1

    return call


# InstantTensor.


def test_instanttensor_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when its absence is found out only by the server."""
    monkeypatch.setitem(sys.modules, "instanttensor", None)
    (found,) = gpu._instanttensor(Need())
    assert found.verdict is Verdict.FAILS
    assert "pip install instanttensor" in found.change


def test_old_instanttensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a release that refuses what 0.2 takes passes for it."""
    monkeypatch.setitem(sys.modules, "instanttensor", make_module("0.1.9"))
    release, backends = gpu._instanttensor(Need())
    assert (release.verdict, backends.verdict) == (Verdict.SLOW, Verdict.UNTRIED)
    assert "unaligned" in release.means


@pytest.mark.parametrize(
    ("refused", "in_memory", "verdict"),
    [
        ((), False, Verdict.OK),
        (("URING",), False, Verdict.SLOW),
        (("URING", "AIO"), False, Verdict.FAILS),
        (("URING", "AIO"), True, Verdict.OK),
        (("MMAP",), True, Verdict.FAILS),
    ],
)
def test_backends_that_are_refused(
    refused: tuple[str, ...], in_memory: bool, verdict: Verdict
) -> None:
    """Red when a load without any way to read is called good."""
    backends = {name: SimpleNamespace(value=name) for name in ("URING", "AIO", "MMAP")}
    status = lambda value: (value not in refused, f"no {value} here", "")  # noqa: E731
    module = SimpleNamespace(
        _C=SimpleNamespace(backend_status=status), Backend=backends
    )
    found = gpu._backends(module, Need(in_memory=in_memory))
    assert found.verdict is verdict
    for name in refused if verdict is not Verdict.OK else ():
        assert f"{name}: no {name} here" in found.result


def test_installed_instanttensor_is_asked() -> None:
    """Red when the library's own answer is no longer to be had."""
    release, backends = gpu._instanttensor(Need())
    assert release.verdict is Verdict.OK
    assert backends.verdict is not Verdict.UNTRIED


# The GPU.


class Cudart:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.registered.append(nbytes)
        return 2 if nbytes > self.limit else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.pop()
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """One GPU with 80 GiB free of 90 that registers at most 1 MiB."""
    fake = Cudart(1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 90 << 30))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


def test_registration_that_is_refused(cudart: Cudart) -> None:
    """Red when the limit is found only after the whole load."""
    found = gpu._registration(Need(pin=2 << 20))
    assert found.verdict is Verdict.FAILS
    assert "CUDA error 2" in found.result
    assert gpu._registration(Need(pin=2 << 20, layout=None)).verdict is Verdict.OK


def test_registration_that_works_is_undone(cudart: Cudart) -> None:
    """Red when the doctor keeps memory."""
    assert gpu._registration(Need(pin=1 << 20)).verdict is Verdict.OK
    assert cudart.registered == []


@pytest.mark.parametrize(
    ("need", "verdict"),
    [(None, Verdict.OK), (70 << 30, Verdict.OK), (81 << 30, Verdict.FAILS)],
)
def test_gpu_memory(cudart: Cudart, need: int | None, verdict: Verdict) -> None:
    """Red when what is free is not compared with what is needed."""
    (found,) = gpu._gpus(Need(gpu_bytes=need))
    assert found.verdict is verdict
    assert "80.00 GiB of 90.00 GiB" in found.result


def test_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a load seems possible there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = gpu._gpus(Need())
    assert found.verdict is Verdict.FAILS
    assert gpu._registration(Need()).verdict is Verdict.UNTRIED


# Storage.


def test_io_uring_and_aio_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Docker's seccomp profile does; red when both may be missing on a disk."""
    monkeypatch.setattr(storage, "_system_call", refuse(errno.EPERM))
    for in_memory, verdict in ((False, Verdict.FAILS), (True, Verdict.OK)):
        findings = storage.probe(Need(in_memory=in_memory))
        for about in ("io_uring", "AIO"):
            found = one(findings, about)
            assert found.verdict is verdict
            assert "EPERM" in found.result
    assert "seccomp" in one(findings, "io_uring").change


def test_io_uring_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the fallback is not told, or called a failure."""
    monkeypatch.setattr(storage, "_try_io_uring", lambda: (False, "refused: EPERM"))
    monkeypatch.setattr(storage, "_try_aio", lambda: (True, "works"))
    findings = storage.probe(Need())
    assert one(findings, "io_uring").verdict is Verdict.SLOW
    assert "falls back to AIO" in one(findings, "io_uring").means
    assert "is needed" in one(findings, "AIO").means


def test_direct_read_that_is_refused() -> None:
    """A file of /proc, which has no direct reads; red when none is tried."""
    found = storage._direct_reads(Need(shard="/proc/self/status"))
    assert found.verdict is Verdict.FAILS
    assert "EINVAL" in found.result
    in_memory = Need(shard="/proc/self/status", in_memory=True)
    assert storage._direct_reads(in_memory).verdict is Verdict.OK
    assert storage._direct_reads(Need()).verdict is Verdict.UNTRIED


def test_direct_read_of_a_short_shard(tmp_path: Path) -> None:
    """Red when a shard of less than 4 KiB is an error."""
    shard = write_shard(tmp_path / "a.safetensors", [("a", "U8", (8,))])
    result = storage._try_direct_read(str(shard))
    assert result == "" or "EINVAL" in result  # not every file system has them


def test_locking_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a limit is only read and not tried."""
    monkeypatch.setattr(storage, "_lock", refuse(errno.ENOMEM))
    found = storage._locked_memory()
    assert found.verdict is Verdict.SLOW
    assert "ENOMEM" in found.result
    assert "--ulimit memlock" in found.change


# Memory.


@pytest.mark.parametrize(
    ("need", "verdict"), [(None, Verdict.OK), (1, Verdict.OK), (9, Verdict.FAILS)]
)
def test_host_memory(monkeypatch, need: int | None, verdict: Verdict) -> None:
    """Red when a load that would be killed is called good."""
    monkeypatch.setattr(host, "available_memory", lambda: 8 << 30)
    found = host._free_memory(Need(host_bytes=need and need << 30))
    assert found.verdict is verdict
    if verdict is Verdict.FAILS:
        assert "needs 9.00 GiB" in found.means
        assert "--memory" in found.change


@pytest.mark.parametrize("refusal", ["too small", "missing"])
@pytest.mark.parametrize(("ranks", "verdict"), [(1, "slow"), (8, "fails")])
def test_dev_shm_that_is_refused(
    monkeypatch, tmp_path: Path, refusal: str, ranks: int, verdict: str
) -> None:
    """Red when Docker's 64 MiB are called enough for eight ranks."""
    if refusal == "missing":
        monkeypatch.setattr(host, "_SHM", tmp_path / "none")
    else:
        monkeypatch.setattr(host, "_SHM", tmp_path)
        monkeypatch.setattr(host, "_SHM_BYTES", 1 << 62)
    found = host._shared_folder(Need(ranks=ranks))
    assert found.verdict.value == verdict
    assert "--shm-size" in found.change
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def without_huge_pages() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_huge_pages_that_are_not_given(shared: bool) -> None:
    """Turned off for this process; red when the kernel's yes to madvise is enough."""
    layout, other = ("shared", "per_rank") if shared else ("per_rank", "shared")
    with without_huge_pages():
        found = host._huge_pages(Need(layout=layout), shared=shared)
        unneeded = host._huge_pages(Need(layout=other), shared=shared)
    assert found.verdict is Verdict.SLOW
    assert "no huge page was given" in found.result
    assert "/sys/kernel/mm/transparent_hugepage/" in found.change
    assert unneeded.verdict is Verdict.OK


def test_huge_pages_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when madvise's EINVAL is a traceback."""

    class Refusing(mmap.mmap):
        def madvise(self, option: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(host, "_map", lambda shared: Refusing(-1, 1 << 20))
    assert "Invalid argument" in host._try_huge_pages(shared=False)


# The command.


def test_findings_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a probe dies, or the exit code does not follow from the findings."""
    write_shard(tmp_path / "model.safetensors", [("a", "U8", (1024, 8))])
    code = cli.main(["doctor", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    fails = [f["about"] for f in report["findings"] if f["verdict"] == "fails"]
    assert (code, report["works"]) == ((1, False) if fails else (0, True))
    assert len(report["findings"]) >= 11
    for found in report["findings"]:
        assert all(found[key] for key in ("about", "tried", "result", "means"))
        assert bool(found["change"]) or found["verdict"] in ("ok", "not tried")


def test_needs_are_what_inspect_says(tmp_path: Path, monkeypatch) -> None:
    """Red when the doctor compares with something else."""
    monkeypatch.setattr(header, "is_in_memory", lambda path: False)
    table = ("layers.1.engram.embed.weight", "U8", (1024, 1024))
    shard = write_shard(tmp_path / "model.safetensors", [("a", "U8", (8, 8)), table])
    need = doctor.need_of(
        [tmp_path],
        machine=Hardware(tp=2),
        engram_config='{"placement": "cpu", "replication": "per_node"}',
        draft=None,
        pin=1,
    )
    # The table, and each rank's one buffer for what shares its file.
    assert need.host_bytes == (1 << 20) + 2 * (8 << 20)
    assert (need.shard, need.layout, need.ranks) == (str(shard), "shared", 2)


FINDINGS = [
    Finding(
        "io_uring",
        "io_uring_setup for 512 reads",
        "refused: EPERM, Operation not permitted",
        Verdict.SLOW,
        "InstantTensor falls back to AIO",
        "docker run --security-opt seccomp=unconfined (or a profile that allows "
        "io_uring_setup); sysctl -w kernel.io_uring_disabled=0",
    ),
    Finding("AIO", "io_setup for 512 reads", "works", Verdict.OK, "is needed"),
    Finding("GPU 0", "asking CUDA", "4 GiB", Verdict.FAILS, "needs 8 GiB", "more GPUs"),
    Finding("registered memory", "1 GiB", "no GPU", Verdict.UNTRIED, "unknown"),
]


@pytest.mark.parametrize("columns", [80, 120])
def test_output_is_the_golden_one(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Piped, so without colour; red when a word or the width changes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(doctor, "examine", lambda need: FINDINGS)
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr()
    assert output.err == "ERROR the load cannot work here: GPU 0\n"
    assert "\x1b" not in output.out
    lines = [line.rstrip() for line in output.out.splitlines()]
    assert max(map(len, lines)) <= columns
    assert lines == (GOLDEN / f"doctor_{columns}.txt").read_text().splitlines()
