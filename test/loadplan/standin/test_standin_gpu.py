"""The machine without a GPU: what is replaced, and put back."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import odd_files
import pytest
import torch
from odd_files import Case, Shard

from loadplan.standin import gpu
from loadplan.standin.journal import HostRegistration

MEMORY = Path("/dev/shm")


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
    with gpu.fake_gpu() as journal:
        taken = spans.device_buffer(6, torch.device("cuda", 0))
        assert (taken.numel(), taken.dtype) == (6, torch.uint8)
        assert journal.on_device(taken)


def test_host_registration_is_noted_and_fails_above_its_limit():
    """Red when a host table that cannot be pinned goes unnoticed on this machine."""
    with gpu.fake_gpu(host_register_limit=100) as journal:
        cudart = torch.cuda.cudart()
        assert torch.cuda.current_device() == 0
        assert int(cudart.cudaHostRegister(4096, 100, 0)) == 0
        assert int(cudart.cudaHostRegister(8192, 101, 2)) == 2
    assert journal.host_registrations == [
        HostRegistration(4096, 100, 0, error=0),
        HostRegistration(8192, 101, 2, error=2),
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
    with gpu.fake_gpu() as journal, get_context().override_server_args():
        items = list(loader._get_weights_iterator(source))
        assert all(journal.on_device(tensor) for _, tensor in items)
    got = [odd_files.described(*item) for item in items]
    assert got == [odd_files.honest(s, e) for s in shards for e in s.tensors]
    (call,) = journal.calls
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
