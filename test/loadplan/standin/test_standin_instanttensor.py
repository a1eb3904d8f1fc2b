"""The stub of InstantTensor, row by row.

The rows live in test/gpu/odd_files.py, which conform.py runs against the real library.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import odd_files
import pytest
import torch
from odd_files import Case, Entry, Raises, Shard

from loadplan.standin import gpu
from loadplan.standin.backends import in_memory
from loadplan.standin.reads import required_buffer_size_for_io
from loadplan.standin.ring import ring_for_tensors

MEMORY = Path("/dev/shm")


VERSIONS = ("0.2.2", "0.1.9")


ROWS = [(version, case) for version in VERSIONS for case in odd_files.cases(version)]


@pytest.fixture
def memory_path(tmp_path):
    """A folder on tmpfs that goes away with the test."""
    folder = MEMORY / f"{tmp_path.parent.name}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _opened(stub, files, **kwargs):
    return stub.safe_open(files, framework="pt", device=0, **kwargs)


@pytest.mark.parametrize(
    ("version", "case"), ROWS, ids=[f"{v}-{case.name}" for v, case in ROWS]
)
def test_stub_does_what_the_library_does(version, case, tmp_path, memory_path):
    """Red when the stub turns kinder, stricter or other than a row of the table."""
    assert not in_memory(str(tmp_path)), "give --basetemp on a disk"
    files = case.write(tmp_path, memory_path)
    stub = gpu.make_module(version)
    seen = odd_files.observe(stub.safe_open, files, env=case.env, **case.kwargs)

    expected = case.expects(version)
    if isinstance(expected, Raises):
        assert seen.error is not None
        assert (seen.error[0], bool(re.search(expected.text, seen.error[1]))) == (
            expected.kind,
            True,
        ), seen.error
    else:
        assert seen.error is None
        assert odd_files.certain(seen.tensors, expected) == [
            odd_files.dataclasses.replace(want, defined=None) for want in expected
        ]
    assert (seen.dead_threads > 0) == (expected is odd_files.LOST_REASON)
    assert {key: seen.settings[key] for key in case.settings} == dict(case.settings)
    assert len(seen.warnings) == len(case.warns), seen.warnings
    for want, got in zip(case.warns, seen.warnings, strict=True):
        assert re.search(want, got), got
    assert seen.order_after == sorted(files)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", odd_files.PROBES)
def test_stub_is_used_like_the_library(version, name, tmp_path):
    """Red when an opened file answers other than the library's does."""
    files = Case("good", (odd_files.GOOD, odd_files.SECOND)).write(tmp_path, MEMORY)
    probe, expected = odd_files.PROBES[name]
    assert probe(gpu.make_module(version).safe_open, files) == expected


def test_parameters_are_those_of_each_release():
    """Red when a release's stub gains or loses an argument that callers probe for."""
    common = (
        "filename framework device process_group buffer_size chunk_size concurrency "
        "io_depth max_free_mem_usage load_now copy backend"
    ).split()
    for version, added in (
        ("0.1.9", []),
        ("0.2.2", ["tensor_filter", "tensor_name_match_mode"]),
    ):
        safe_open = gpu.make_module(version).safe_open
        assert inspect.isclass(safe_open)
        assert list(inspect.signature(safe_open).parameters) == common + added
        own = list(inspect.signature(safe_open.__init__).parameters)
        assert own == ["self", *common, *added]


def test_installed_library_has_the_same_surface():
    """Red when the pinned library changes its arguments, names or ring arithmetic."""
    real = pytest.importorskip("instanttensor", reason="no wheel for this machine")
    version = odd_files.version_of(real)
    stub = gpu.make_module(version)
    assert odd_files.surface(stub) == odd_files.surface(real)
    if version == "0.2.2":
        impl = importlib.import_module("instanttensor._impl")
        assert odd_files.ring_sizes(
            required_buffer_size_for_io, ring_for_tensors
        ) == odd_files.ring_sizes(
            impl.required_buffer_size_for_io, impl.recommended_buffer_size_for_tensors
        )


def test_unknown_release_is_refused():
    """Red when an unknown release silently behaves like a known one."""
    with pytest.raises(ValueError, match="version '0.3', expected one of"):
        gpu.make_module("0.3")


def test_views_of_the_ring_change_with_the_next_read(good):
    """Red when copy=False is safe here, while the library overwrites what was kept."""
    stub = gpu.make_module()
    with _opened(stub, good, copy=False) as opened:
        items = [(item, odd_files.described(*item)) for item in opened.tensors()]
        same = [odd_files.described(*item) == seen for item, seen in items]
        assert same == [False, False, True]
    assert not any(odd_files.described(*item) == seen for item, seen in items)


def test_unaligned_tensor_is_an_aligned_view_in_the_later_release(tmp_path):
    """Red when copy=False yields an unaligned view, or a copy, of an odd offset."""
    shard = Shard(
        "odd.safetensors", (Entry("o", "I8", (1,), 0, 1), Entry("f", "F32", (2,), 1, 9))
    )
    files = Case("odd", (shard,)).write(tmp_path, MEMORY)
    with _opened(gpu.make_module(), files, copy=False) as opened:
        for (name, tensor), entry in zip(opened.tensors(), shard.tensors, strict=True):
            assert tensor.data_ptr() % tensor.itemsize == 0
            assert odd_files.described(name, tensor) == odd_files.honest(shard, entry)


def test_hang_of_the_library_is_an_error(tmp_path):
    """Red when a short file loads: opening checks only the tensor listed last."""
    entries = (Entry("b", "U8", (2,), 2, 4), Entry("a", "U8", (2,), 0, 2))
    shard = Shard("short.safetensors", entries, payload=b"xyz")
    files = Case("short", (shard,)).write(tmp_path, MEMORY)
    with (
        pytest.raises(RuntimeError, match="short.safetensors: too short, .* hangs"),
        _opened(gpu.make_module(), files) as opened,
    ):
        list(opened.tensors())


def test_crash_of_the_library_is_an_error(good):
    """Red when an iterator that outlives its file yields instead of crashing."""
    with _opened(gpu.make_module(), good) as opened:
        tensors = opened.tensors()
        next(tensors)
    with pytest.raises(RuntimeError, match="after exit: the library crashes"):
        next(tensors)


def test_warnings_point_at_the_caller(good):
    """Red when a filter by module no longer catches the stub's warnings."""
    with pytest.warns(RuntimeWarning, match="Enlarge|Shrink") as caught:
        _opened(gpu.make_module(), good, buffer_size=8 << 20).__exit__(None, None, None)
    assert {one.filename for one in caught} == {__file__}


def test_budget_is_half_of_the_free_memory(good):
    """Red when the ring no longer depends on the pretended device's memory."""
    stub = gpu.make_module(free_memory=64 << 20)
    with pytest.warns(RuntimeWarning, match="Shrink io_depth from 512 to 4"):
        opened = _opened(stub, good)
    with opened:
        assert opened.buffer_size == 32 << 20


def test_group_of_one_is_taken_but_not_with_a_filter(good, tmp_path):
    """Red when the stub accepts a filter in a collective call."""
    dist = torch.distributed
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        journal = gpu.Journal()
        stub = gpu.make_module(journal=journal)
        group = dist.group.WORLD
        with _opened(stub, good, process_group=group) as opened:
            assert [name for name, _ in opened.tensors()] == ["a", "b", "c"]
        assert journal.calls[0].process_group is group
        with pytest.raises(
            ValueError, match="tensor_filter requires process_group=None"
        ):
            _opened(stub, good, process_group=group, tensor_filter=["a"])
    finally:
        dist.destroy_process_group()


_RANK = """
import json, sys
import torch.distributed as dist
from loadplan.standin import gpu
rank, store, *files = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
stub = gpu.make_module(free_memory=(64 + 64 * rank) << 20)
def load(files):
    opened = stub.safe_open(files, "pt", 0, dist.group.WORLD, chunk_size=1 << 20)
    with opened:
        return opened.io_depth, [name for name, _ in opened.tensors()]
print(json.dumps(load(list(files))), flush=True)
try:
    load(files[rank:])
except RuntimeError as error:
    print(error, flush=True)
"""


def test_ranks_share_the_least_budget_and_must_open_the_same(good, tmp_path):
    """Red when ranks stop exchanging their budget or may read different files."""
    command = [sys.executable, "-W", "ignore", "-c", _RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), *good],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    for loaded, refused in outputs:
        # Half of rank 0's 64 MiB, for two reads of 1 MiB a step of depth.
        assert json.loads(loaded) == [16, ["a", "b", "c"]]
        assert refused.startswith("the ranks of the process group opened different")
