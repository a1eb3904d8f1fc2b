"""An opened list of files, as each release of InstantTensor has it, for the stub."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, Self

import torch
import torch.distributed as dist

from loadplan.standin.backends import Place, lie_in_memory
from loadplan.standin.caller import warn
from loadplan.standin.dtypes import TORCH_DTYPES_019, TORCH_DTYPES_022
from loadplan.standin.headers import (
    name_matcher,
    read_header_019,
    read_header_022,
    read_headers,
    select,
)
from loadplan.standin.journal import Journal
from loadplan.standin.reads import choose_reads_019, choose_reads_022
from loadplan.standin.ring import choose_ring_019, choose_ring_022
from loadplan.standin.settings import settings_from

# What a reader of memory that nobody filled gets; zeros would look like weights.
_STALE_BYTE = b"\xa5"
_POSITIONAL = ("filename", "framework", "device", "process_group")


class SafeOpen022:
    """An opened list of files, as release 0.2.2 has it."""

    _journal: Journal
    _free_memory: int
    _dtypes = TORCH_DTYPES_022
    _hangs_on_short_file = True
    _read_header = staticmethod(read_header_022)
    _choose_reads = staticmethod(choose_reads_022)
    _choose_ring = staticmethod(choose_ring_022)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        opened = super().__new__(cls)
        # Only here can "passed with its default" be told from "not passed".
        opened._passed = kwargs
        return opened

    def __init__(
        self,
        filename: str | list[str],
        framework: str,
        device: int | str | torch.device,
        process_group: dist.ProcessGroup | None = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Any = None,
        tensor_filter: list[str] | None = None,
        tensor_name_match_mode: Literal["exact", "glob", "regex"] = "glob",
    ) -> None:
        # First of all, so that these are the arguments and nothing else.
        self._start(locals())

    def __enter__(self) -> Self:
        if self._files is None:
            self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exited = True
        files, self._files = self._files or [], None
        for file in files:
            file.close()
        # The library frees the ring; views that were kept no longer hold weights.
        self._ring.fill_(_STALE_BYTE[0])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), once; nothing is checked before the first item."""
        if self._exited:
            raise RuntimeError("tensors() called after safe_open context exited")
        if self.iterated:
            raise RuntimeError("tensors() can only be called once")
        self.iterated = True
        for name, entry, file_index, offset in self._selected:
            dtype = self._torch_dtype(entry)
            self._check_alignment(name, dtype, offset)
            raw = self._fetch(entry, file_index, offset)
            raw = raw.clone() if self.copy else raw
            tensor = raw.view(dtype).view(torch.Size(entry["shape"]))
            self._journal.place(tensor)
            self._journal.names.append(name)
            yield name, tensor

    def keys(self) -> list[str]:
        """Names in the order of `tensors()`."""
        return self.offset_keys()

    def offset_keys(self) -> list[str]:
        """Names by file and offset."""
        return [name for name, _, _, _ in self._selected]

    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of the last file that has one; a TypeError without any."""
        return dict(self.file_metadata)

    def get_tensor_metadata(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """The dtype and logical shape of the last tensor called `name`."""
        entry = {key: entry for key, entry, _, _ in self._selected}[name]
        return self._torch_dtype(entry), torch.Size(entry["shape"])

    def _start(self, arguments: dict[str, Any]) -> None:
        filename, process_group = arguments["filename"], arguments["process_group"]
        one = isinstance(filename, str | os.PathLike)
        self._journal.note_call(
            files=(filename,) if one else tuple(filename),  # Before they are sorted.
            device=arguments["device"],
            process_group=process_group,
            kwargs={k: v for k, v in self._passed.items() if k not in _POSITIONAL},
        )
        names = arguments.get("tensor_filter")
        if names is not None and process_group is not None:
            raise ValueError("tensor_filter requires process_group=None")
        mode = arguments.get("tensor_name_match_mode", "glob")
        keep = name_matcher(names, mode)
        listed = [filename] if isinstance(filename, str) else filename
        listed.sort()
        device = arguments["device"]
        device = torch.device("cuda", device) if type(device) is int else device
        if torch.device(device).type != "cuda":
            raise ValueError("InstantTensor only supports CUDA devices for now")
        if arguments["framework"] != "pt":
            raise ValueError("InstantTensor only supports pytorch for now")

        self.filename: list[str] = listed
        self.framework = "pt"
        self.device = torch.device(device)
        self.process_group = process_group
        grouped = process_group is not None
        self.world_size = dist.get_world_size(process_group) if grouped else 1
        self.rank = dist.get_rank(process_group) if grouped else 0
        self.copy = arguments["copy"]
        self.iterated = False
        self._filtered = names is not None
        self._exited = False
        self._fetched = 0
        self._files: list[BinaryIO] | None = None

        settings = settings_from(arguments)
        place = Place(
            lie_in_memory(self.filename),
            self.world_size,
            self._free_memory,
            self._least,
        )
        chosen = self._choose_reads(settings, place)
        self.backend, self.chunk_size = chosen.backend, chosen.chunk_size
        self.concurrency, self.io_depth = chosen.concurrency, chosen.io_depth
        read = read_headers(self.filename, self._read_header)
        self.file_metadata, self._selected = select(read, keep)
        spans = [entry["data_offsets"] for _, entry, _, _ in self._selected]
        self.tensor_sizes = [end - begin for begin, end in spans]
        self.total_tensor_size = sum(self.tensor_sizes)
        self.buffer_size = self._choose_ring(
            settings.buffer_size, chosen, place, self.tensor_sizes
        )
        self._warn_of_views()
        if arguments["load_now"]:
            self._open()

    def _warn_of_views(self) -> None:
        fits = self.buffer_size >= self.total_tensor_size and not self._filtered
        if not self.copy and not fits:
            warn(
                f"copy=False with buffer_size ({self.buffer_size} B) and "
                f"total_tensor_size ({self.total_tensor_size} B): kept views change",
                UserWarning,
            )

    def _check_alignment(self, name: str, dtype: torch.dtype, offset: int) -> None:
        """Nothing to refuse: an unaligned tensor gets an aligned place in the ring."""

    def _least(self, value: int) -> int:
        """The smallest `value` of the group; every rank must call."""
        if self.process_group is None:
            return value
        least = torch.tensor([value])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.process_group)
        return int(least)

    def _open(self) -> None:
        if self.device.index is None:
            # The compiled part wants a number; more lines follow there.
            raise TypeError(
                "open(): incompatible function arguments. The following argument types "
                "are supported:"
            )
        if not self.filename:
            raise RuntimeError("io_uring_register failed: Bad address")
        self._compare_layouts()
        self._files = [open(path, "rb") for path in self.filename]
        # One slot that every read reuses, not the gigabytes that `buffer_size` tells.
        largest = max(
            (self._claimed(entry) for _, entry, _, _ in self._selected), default=0
        )
        self._slot = bytearray(_STALE_BYTE) * max(largest, 1)
        self._ring = torch.frombuffer(self._slot, dtype=torch.uint8)
        if not self.copy:
            self._journal.place(self._ring)

    def _compare_layouts(self) -> None:
        """Ranks that read different files would hang or mix bytes: say so instead."""
        if self.process_group is None:
            return
        layouts: list[Any] = [None] * self.world_size
        dist.all_gather_object(layouts, self._selected, group=self.process_group)
        if any(layout != layouts[0] for layout in layouts):
            raise RuntimeError(
                "the ranks of the process group opened different tensors; the real "
                "library would hang or mix their bytes"
            )

    def _claimed(self, entry: dict[str, Any]) -> int:
        """Bytes that shape and dtype claim, whatever the offsets say; 0 if unknown."""
        dtype = self._dtypes.get(entry["dtype"])
        return math.prod(entry["shape"]) * dtype.itemsize if dtype is not None else 0

    def _torch_dtype(self, entry: dict[str, Any]) -> torch.dtype:
        if entry["dtype"] not in self._dtypes:
            raise ValueError(f"Unsupported safetensors dtype: {entry['dtype']}")
        return self._dtypes[entry["dtype"]]

    def _fetch(
        self, entry: dict[str, Any], file_index: int, offset: int
    ) -> torch.Tensor:
        """Read one tensor into the ring; claimed bytes past the file stay stale."""
        if self._files is None:
            raise RuntimeError("tensors() goes on after exit: the library crashes here")
        if not self.copy:
            # The library may overwrite any earlier view now; do it to all of them.
            self._ring.fill_(_STALE_BYTE[0])
        begin, end = entry["data_offsets"]
        claimed = self._claimed(entry)
        owner, self._fetched = self._fetched % self.world_size, self._fetched + 1
        if owner == self.rank:
            file = self._files[file_index]
            file.seek(offset)
            read = file.readinto(memoryview(self._slot)[:claimed])
            self._journal.bytes_read += read
            if read < min(claimed, end - begin) and self._hangs_on_short_file:
                raise RuntimeError(f"{file.name}: too short, the library hangs here")
        if self.process_group is not None:
            # As in the library, a rank that stays away leaves the others waiting.
            source = dist.get_global_rank(self.process_group, owner)
            dist.broadcast(self._ring[:claimed], source, group=self.process_group)
        return self._ring[:claimed]


class SafeOpen019(SafeOpen022):
    """What release 0.1.9 does otherwise."""

    _dtypes = TORCH_DTYPES_019
    _hangs_on_short_file = False  # It yields stale bytes.
    _read_header = staticmethod(read_header_019)
    _choose_reads = staticmethod(choose_reads_019)
    _choose_ring = staticmethod(choose_ring_019)

    def __init__(
        self,
        filename: str | list[str],
        framework: str,
        device: int | str | torch.device,
        process_group: dist.ProcessGroup | None = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Any = None,
    ) -> None:
        # First of all, so that these are the arguments and nothing else.
        self._start(locals())

    def _warn_of_views(self) -> None:
        if not self.copy and self.buffer_size < self.total_tensor_size:
            warn(
                f"copy=False with buffer_size ({self.buffer_size} B) < "
                f"total_tensor_size ({self.total_tensor_size} B): kept views change",
                UserWarning,
            )

    def _check_alignment(self, name: str, dtype: torch.dtype, offset: int) -> None:
        address = self._ring.data_ptr() + offset  # The ring keeps file alignment.
        if offset % dtype.itemsize != 0:
            raise ValueError(
                f"Tensor {name} address {address:#x} is not aligned to dtype {dtype} "
                f"size {dtype.itemsize}B"
            )
