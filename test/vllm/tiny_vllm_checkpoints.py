"""Small checkpoints, loaded by vLLM's real loader on one rank or on several."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tiny_vllm_configs import (
    engine_config,
    write_model,
)

from loadplan.standin.gpu import Journal, fake_gpu
from vllm.config import EngramConfig, LoadConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

TABLE = "layers.1.engram.embed.weight"
SCALE = "layers.1.engram.embed.scale"
GATE = "layers.1.engram.wkv.weight"
DENSE = "layers.0.attn.wq_a.weight"
NORM = "norm.weight"
LARGE = "layers.0.large.weight"
EXPERTS = [f"layers.0.ffn.experts.{i}.w1.weight" for i in range(4)]
EXPERT_SCALES = [f"layers.0.ffn.experts.{i}.w1.scale" for i in range(4)]

_KINDS = {
    TABLE: ((64, 32), torch.float8_e4m3fn),
    SCALE: ((64, 1), torch.float8_e8m0fnu),
    GATE: ((8, 64), torch.bfloat16),
    DENSE: ((16, 16), torch.float8_e4m3fn),
    NORM: ((16,), torch.bfloat16),
    LARGE: ((3, 4 << 20), torch.uint8),
    **dict.fromkeys(EXPERTS, ((16, 8), torch.bfloat16)),
    **dict.fromkeys(EXPERT_SCALES, ((16, 1), torch.float8_e8m0fnu)),
}


def tensor_of(name: str) -> torch.Tensor:
    """The tensor that every checkpoint here holds under ``name``."""
    shape, dtype = _KINDS.get(name, ((8, 8), torch.bfloat16))
    generator = torch.Generator().manual_seed(sum(name.encode()))
    raw = torch.randint(
        256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator
    )
    return raw.to(torch.uint8).view(dtype)


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def nbytes(*names: str) -> int:
    return sum(tensor_of(name).nbytes for name in names)


def write_checkpoint(folder: Path | str, **files: list[str]) -> dict[str, tuple]:
    """Write shards of names and an index; what a whole load must yield."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for stem, names in files.items():
        path = Path(folder, f"{stem}.safetensors")
        save_file({n: tensor_of(n) for n in names}, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, path.name)
    index = Path(folder, "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": weight_map}))
    return {name: raw(tensor_of(name)) for name in weight_map}


class Load:
    """What one load yielded, what InstantTensor was asked for and what READ read."""

    def __init__(
        self,
        pairs: list[tuple[str, torch.Tensor]],
        journal: Journal,
        read: list[tuple[str, int]],
    ) -> None:
        self.names = [name for name, _ in pairs]
        self.tensors = {name: raw(tensor) for name, tensor in pairs}
        self.on_device = {name for name, t in pairs if journal.on_device(t)}
        self.with_rows = {name for name, t in pairs if hasattr(t, "row_source")}
        self.calls = [
            SimpleNamespace(
                files=[os.path.basename(file) for file in call.files],
                grouped=call.process_group is not None,
                device=call.device,
                options={k: v for k, v in call.kwargs.items() if v is not None},
            )
            for call in journal.calls
        ]
        self.streamed = nbytes(*journal.names)
        self.read = sum(count for _, count in read)
        self.read_files = {os.path.basename(path) for path, _ in read}

    @property
    def grouped_files(self) -> list[str]:
        """The files that all ranks read together, in order of their names."""
        return sorted(f for call in self.calls if call.grouped for f in call.files)


@contextlib.contextmanager
def counted_reads() -> Iterator[list[tuple[str, int]]]:
    """The path and the bytes of each positioned read."""
    reads, preadv = [], os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(fd, buffers, offset)
        reads.append((os.readlink(f"/proc/self/fd/{fd}"), count))
        return count

    with mock.patch.object(os, "preadv", counting):
        yield reads


def load(folder: Path | str, **options: Any) -> Load:
    """Load through DefaultModelLoader as the engine does, with its current config."""
    return Load(*_load(folder, **options))


def weights_of(folder: Path | str, **options: Any) -> dict[str, torch.Tensor]:
    """The weights as they reach a model's weight loaders."""
    pairs, _, _ = _load(folder, **options)
    return dict(pairs)


def _load(
    folder: Path | str,
    *,
    model: Any = None,
    local_expert_ids: set[int] | None = None,
    cpu_offload: bool = False,
    load_format: str = "instanttensor",
    share_all: bool = False,
    **gpu: Any,
) -> tuple[list[tuple[str, torch.Tensor]], Journal, list[tuple[str, int]]]:
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    loader.local_expert_ids = local_expert_ids
    config = vllm_config()
    config.engram_config = EngramConfig(cpu_offload=True) if cpu_offload else None
    source = SimpleNamespace(model=str(folder), revision=None)
    with (
        set_current_vllm_config(config),
        fake_gpu(engine="vllm", **gpu) as journal,
        counted_reads() as reads,
        _sharing_all() if share_all else contextlib.nullcontext(),
    ):
        pairs = list(loader.get_all_weights(source, model or torch.nn.Module()))
    return pairs, journal, reads


def _sharing_all() -> contextlib.AbstractContextManager:
    """Let ranks share what they read, however little it is."""
    try:
        from vllm.model_executor.model_loader.loadplan import broadcast
    except ImportError:
        return contextlib.nullcontext()  # The release has nothing to share.
    return mock.patch.object(broadcast, "LEAST_SHARED_BYTES", 0)


def vllm_config() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), "llama")
        return engine_config(model, LoadConfig(), method="ngram")


def load_on_rank(rank: int, ranks: int, folder: str, options: Any) -> Load:
    """A target of ``run_ranks``: ``options(rank)``, or what it is, goes to load."""
    return load(folder, **(options[rank] if isinstance(options, list) else options))


def run_ranks(ranks: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``target(rank, ranks, *args)`` in a process per rank; results by rank.

    Each rank has vLLM's real world group, over gloo, and serves many calls, because
    importing vLLM takes long. A rank that fails raises RuntimeError with its traceback
    and ends every rank.
    """
    if ranks not in _started:
        _started[ranks] = _Ranks(ranks)
    try:
        return _started[ranks].run(target, args)
    except BaseException:
        _started.pop(ranks).kill()
        raise


class _Ranks:
    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            pipe, end = context.Pipe()
            common = (end, rank, ranks, f"file://{self._folder.name}/rendezvous")
            process = context.Process(target=_rank, args=common, daemon=True)
            process.start()
            end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, target: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((target, args))
        results = {}
        deadline = time.monotonic() + 120
        while len(results) < len(self._pipes):
            silent = [p for rank, p in enumerate(self._pipes) if rank not in results]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no result from {len(silent)} rank(s)")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                results[rank] = _receive(pipe, rank)
        return [results[rank] for rank in range(len(self._pipes))]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_started: dict[int, _Ranks] = {}


def _rank(pipe: Connection, rank: int, ranks: int, method: str) -> None:
    torch.set_num_threads(1)
    try:
        init_distributed_environment(ranks, rank, method, rank, backend="gloo")
        while True:
            target, args = pipe.recv()
            pipe.send((target(rank, ranks, *args), None))
    except EOFError:
        pass  # The tests are done.
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        # A peer may still be in a collective: stay until the parent ends all.
        pipe.poll(None)


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        result, error = pipe.recv()
    except EOFError as gone:
        raise RuntimeError(f"rank {rank} died without a result") from gone
    if error is not None:
        raise RuntimeError(f"rank {rank} failed:\n{error}")
    return result
