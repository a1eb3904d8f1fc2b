"""The machine without a GPU: the stub library row by row, the record, the patches.

The rows live in test/gpu/odd_files.py, which conform.py runs against the real library.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import odd_files  # noqa: E402
from odd_files import Case, Entry, Raises, Shard  # noqa: E402

from loadplan.standin import (
    gpu,  # noqa: E402
    instanttensor,  # noqa: E402
    records,  # noqa: E402
)
from loadplan.standin import instanttensor_sizes as sizes  # noqa: E402

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


@pytest.fixture
def good(tmp_path):
    """Paths of two plain files, not in sorted order: tensor c, then a and b."""
    case = Case("good", (odd_files.SECOND, odd_files.GOOD))
    return case.write(tmp_path, MEMORY)


def _opened(stub, files, **kwargs):
    return stub.safe_open(files, framework="pt", device=0, **kwargs)


@pytest.mark.parametrize(
    ("version", "case"), ROWS, ids=[f"{v}-{case.name}" for v, case in ROWS]
)
def test_stub_does_what_the_library_does(version, case, tmp_path, memory_path):
    """Red when the stub turns kinder, stricter or other than a row of the table."""
    assert not instanttensor.in_memory(str(tmp_path)), "give --basetemp on a disk"
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
            sizes.required_buffer_size_for_io, sizes.ring_for_tensors
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
        record = gpu.Record()
        stub = gpu.make_module(record=record)
        group = dist.group.WORLD
        with _opened(stub, good, process_group=group) as opened:
            assert [name for name, _ in opened.tensors()] == ["a", "b", "c"]
        assert record.calls[0].process_group is group
        with pytest.raises(
            ValueError, match="tensor_filter requires process_group=None"
        ):
            _opened(stub, good, process_group=group, tensor_filter=["a"])
    finally:
        dist.destroy_process_group()


_RANK = """
import json, sys
import torch.distributed as dist
from loadplan import fake
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


def test_call_is_recorded_as_it_came(good):
    """Red when the record shows the sorted list, defaults, or hides a refused call."""
    record = gpu.Record()
    stub = gpu.make_module(record=record)
    before = tuple(good)
    assert list(before) != sorted(before)
    with _opened(stub, good, copy=True, io_depth=4) as opened:
        taken = [name for name, _ in opened.tensors()]
    with pytest.raises(ValueError, match="CUDA"):
        stub.safe_open(good[0], "pt", device="cpu")
    assert record.calls == [
        records.Call(before, 0, None, {"copy": True, "io_depth": 4}),
        records.Call((good[0],), "cpu", None, {}),
    ]
    assert record.names == taken == ["a", "b", "c"]


@pytest.mark.parametrize("copy", [True, False])
def test_yielded_tensors_and_their_views_are_on_the_device(copy, good):
    """Red when a view of a streamed tensor counts as host memory, or a host one not."""
    record = gpu.Record()
    with _opened(gpu.make_module(record=record), good, copy=copy) as opened:
        for _, tensor in opened.tensors():
            assert record.on_device(tensor)
            assert record.on_device(tensor.view(torch.uint8)[3:5])
            assert record.on_device(torch.nn.Parameter(tensor, requires_grad=False))
            assert not record.on_device(tensor.clone())


def test_zero_byte_tensor_is_on_the_device_only_if_placed():
    """Red when zero-byte tensors, which share one null address, are confused."""
    record = gpu.Record()
    placed, other = torch.empty(0, 4), torch.empty(0, 4)
    record.place(placed)
    assert record.on_device(placed.view(4, 0))
    assert not record.on_device(other)


def test_memory_reused_after_a_free_is_not_on_the_device():
    """Red when addresses decide: the allocator hands freed ones out again."""
    record = gpu.Record()
    addresses = set()
    for _ in range(50):
        placed = record.place(torch.empty(4096))
        addresses.add(placed.data_ptr())
        del placed
    reused = [torch.empty(4096) for _ in range(50)]
    assert addresses & {tensor.data_ptr() for tensor in reused}
    assert not any(record.on_device(tensor) for tensor in reused)


def test_record_keeps_no_bytes_alive_and_forgets_freed_storages():
    """Red when a load of many GiB grows by what it placed."""
    record = gpu.Record()
    kept = record.place(torch.empty(8))
    gone = record.place(torch.empty(8))
    weak = StorageWeakRef(gone.untyped_storage())
    del gone
    assert weak.expired()
    for _ in range(5000):
        record.place(torch.empty(8))
    assert len(record._placed) <= 1025
    assert record.on_device(kept)


def _patched_state():
    return (
        sys.modules.get("instanttensor"),
        torch.cuda.current_device,
        torch.cuda.cudart,
        [
            getattr(sys.modules.get(f"{package}.spans"), "device_buffer", None)
            for package in ("loadplan.core", "sglang.srt.model_loader.loadplan")
        ],
    )


def test_everything_is_restored_after_nesting_and_errors():
    """Red when one patch outlives its block, in whatever way the block ends."""
    with gpu.fake_gpu():
        pass  # Imports what the context patches, so that states can be compared.
    pristine = _patched_state()
    with pytest.raises(KeyError), gpu.fake_gpu() as outer:
        first = _patched_state()
        assert all(a is not b for a, b in zip(first[:3], pristine[:3], strict=True))
        with pytest.raises(OSError), gpu.fake_gpu(version="0.1.9") as inner:
            assert inner is not outer
            assert _patched_state() != first
            raise OSError
        assert _patched_state() == first
        raise KeyError
    assert _patched_state() == pristine


def test_modules_imported_inside_stay_imported(tmp_path, monkeypatch):
    """Red when leaving the block makes the next import a second copy of a module."""
    (tmp_path / "imported_under_fake_gpu.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with gpu.fake_gpu():
        module = importlib.import_module("imported_under_fake_gpu")
    assert sys.modules.pop("imported_under_fake_gpu") is module


def test_library_is_found_while_pretended():
    """Red when code that asks for the library by name, not by import, misses it."""
    with gpu.fake_gpu(version="0.1.9"):
        import instanttensor

        assert importlib.util.find_spec("instanttensor") is not None
        assert not hasattr(instanttensor, "__version__")
        names = inspect.signature(instanttensor.safe_open.__init__).parameters
        assert "tensor_filter" not in names


def test_read_takes_its_memory_on_the_pretended_device():
    """Red when READ takes device memory otherwise than by its one function."""
    spans = importlib.import_module("loadplan.core.spans")
    with gpu.fake_gpu() as record:
        taken = spans.device_buffer(6, torch.device("cuda", 0))
        assert (taken.numel(), taken.dtype) == (6, torch.uint8)
        assert record.on_device(taken)


def test_host_registration_is_recorded_and_fails_above_its_limit():
    """Red when a host table that cannot be pinned goes unnoticed on this machine."""
    with gpu.fake_gpu(host_register_limit=100) as record:
        cudart = torch.cuda.cudart()
        assert torch.cuda.current_device() == 0
        assert int(cudart.cudaHostRegister(4096, 100, 0)) == 0
        assert int(cudart.cudaHostRegister(8192, 101, 2)) == 2
    assert record.host_registrations == [
        records.HostRegistration(4096, 100, 0, error=0),
        records.HostRegistration(8192, 101, 2, error=2),
    ]


def test_importing_needs_neither_an_engine_nor_safetensors():
    """Red when the stub leans on what it stands beside."""
    code = textwrap.dedent("""
        import sys
        sys.modules["safetensors"] = sys.modules["numpy"] = None
        sys.path.insert(0, sys.argv[1])
        import importlib, types
        package = types.ModuleType("loadplan")
        package.__path__ = [sys.argv[1] + "/loadplan"]
        sys.modules["loadplan"] = package
        import loadplan.standin.gpu
        sys.exit(any(name.split(".")[0] == "sglang" for name in sys.modules))
    """)
    python = Path(gpu.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(python)], check=True, timeout=120)


@pytest.fixture
def sglang_loader():
    """SGLang's loader module, pristine or patched."""
    return pytest.importorskip(
        "sglang.srt.model_loader.loader", reason="SGLang is not on the path"
    )


def test_sglang_streams_a_checkpoint_through_the_stub(sglang_loader, tmp_path):
    """Red when the stub can no longer stand under the released engine's own loader."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.runtime_context import get_context

    shards = (
        Shard("model-1.safetensors", odd_files.GOOD.tensors, metadata={"format": "pt"}),
        Shard("model-2.safetensors", odd_files.SECOND.tensors),
    )
    Case("model", shards).write(tmp_path, MEMORY)
    loader = sglang_loader.DefaultModelLoader(LoadConfig(load_format="instanttensor"))
    source = sglang_loader.DefaultModelLoader.Source(str(tmp_path), None)
    with gpu.fake_gpu() as record, get_context().override_server_args():
        items = list(loader._get_weights_iterator(source))
        assert all(record.on_device(tensor) for _, tensor in items)
    got = [odd_files.described(*item) for item in items]
    assert got == [odd_files.honest(s, e) for s in shards for e in s.tensors]
    (call,) = record.calls
    assert [Path(file).name for file in call.files] == [shard.file for shard in shards]
    assert call.device == torch.device("cuda", 0)
    assert call.process_group is None
    assert call.kwargs["copy"] is True


def test_sglang_is_pretended_a_gpu_only_inside(sglang_loader):
    """Red when a patch of the engine outlives the block or is no longer made."""
    engram = importlib.import_module("sglang.srt.layers.engram")
    platforms = importlib.import_module("sglang.srt.platforms")
    platform = platforms.current_platform
    before = (dict(vars(platform)), platform.device_type, engram._sorted_host_reads)
    with gpu.fake_gpu():
        assert platform.device_type == "cuda"
        assert platform.get_device(1) == torch.device("cuda", 1)
        assert engram._sorted_host_reads(0) is False
    after = (dict(vars(platform)), platform.device_type, engram._sorted_host_reads)
    assert after == before
