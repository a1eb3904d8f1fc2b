"""A stub of the InstantTensor library that is as strict and as wrong as the real one.

It knows two releases, 0.1.9 and 0.2.2, and reads files on the CPU. Exception types
and the texts that users see are the library's, so that what is learnt here holds there;
`test/gpu/conform.py` compares both on a GPU. Known differences: every backend counts as
available, a process group may be of any kind, reads are never asynchronous, a view of
the ring never survives the next read, and where the library hangs or crashes the stub
raises a RuntimeError that says so.
"""

from __future__ import annotations

import ctypes
import fnmatch
import importlib.machinery
import inspect
import itertools
import json
import math
import os
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self

import torch
import torch.distributed as dist

from loadplan.standin import instanttensor_sizes as sizes

if TYPE_CHECKING:
    from loadplan.standin.records import Record

# statfs(2): TMPFS_MAGIC and RAMFS_MAGIC.
_MEMORY_FILESYSTEMS = frozenset({0x01021994, 0x858458F6})
# What a reader of memory that nobody filled gets; zeros would look like weights.
_STALE_BYTE = b"\xa5"
_POSITIONAL = ("filename", "framework", "device", "process_group")

_TORCH_NAMES_019 = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    # The trap: two values a byte, but sizes are taken from the logical shape.
    "F4": "float4_e2m1fn_x2",
}
_TORCH_NAMES_022 = _TORCH_NAMES_019 | {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def _torch_dtypes(names: dict[str, str]) -> dict[str, torch.dtype]:
    """Leave out what this torch lacks: the library then calls it unsupported."""
    found = {st: getattr(torch, name, None) for st, name in names.items()}
    return {st: dtype for st, dtype in found.items() if dtype is not None}


def in_memory(path: str) -> bool:
    """Whether `path` lies on tmpfs or ramfs; False for a path that cannot be asked."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return False
    # Linux: the first member of struct statfs is f_type, one C long.
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF in _MEMORY_FILESYSTEMS


def _name_matcher(
    patterns: list[str] | None, mode: Literal["exact", "glob", "regex"]
) -> Callable[[str], bool]:
    if mode not in ("exact", "glob", "regex"):
        raise ValueError("tensor_name_match_mode must be 'exact', 'glob', or 'regex'")
    if patterns is None:
        return lambda name: True
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise TypeError("Name patterns must be a list of strings")
    if mode == "exact":
        return frozenset(patterns).__contains__
    compiled = []
    for pattern in patterns:
        try:
            text = fnmatch.translate(pattern) if mode == "glob" else pattern
            compiled.append(re.compile(text))
        except re.error as error:
            raise ValueError(f"Invalid regex pattern {pattern!r}: {error}") from error
    return lambda name: any(pattern.fullmatch(name) for pattern in compiled)


class _SafeOpen022:
    """An opened list of files, as release 0.2.2 has it."""

    _record: Record
    _free_memory: int
    _dtypes = _torch_dtypes(_TORCH_NAMES_022)
    _hangs_on_short_file = True
    _choose_reads = staticmethod(sizes.choose_reads_022)
    _choose_ring = staticmethod(sizes.choose_ring_022)

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
            self._record.place(tensor)
            self._record.names.append(name)
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
        self._record.note_call(
            files=(filename,) if one else tuple(filename),  # Before they are sorted.
            device=arguments["device"],
            process_group=process_group,
            kwargs={k: v for k, v in self._passed.items() if k not in _POSITIONAL},
        )
        names = arguments.get("tensor_filter")
        if names is not None and process_group is not None:
            raise ValueError("tensor_filter requires process_group=None")
        keep = _name_matcher(names, arguments.get("tensor_name_match_mode", "glob"))
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

        settings = sizes.settings_from(arguments)
        place = sizes.Place(
            self._lie_in_memory(), self.world_size, self._free_memory, self._least
        )
        reads = self._choose_reads(settings, place)
        self.backend, self.chunk_size = reads.backend, reads.chunk_size
        self.concurrency, self.io_depth = reads.concurrency, reads.io_depth
        self._take_headers(self._read_headers(), keep)
        self.buffer_size = self._choose_ring(
            settings.buffer_size, reads, place, self.tensor_sizes
        )
        self._warn_of_views()
        if arguments["load_now"]:
            self._open()

    @staticmethod
    def _read_header(path: str) -> tuple[Any, dict[str, Any], int]:
        """Refuse what the library refuses; only the LAST listed tensor is checked."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ValueError(f"{path}: {size} B, expected 8 B of header length")
            payload_start = 8 + int.from_bytes(file.read(8), "little")
            if size < payload_start:
                raise ValueError(
                    f"{path}: {size} B, expected {payload_start} B of header"
                )
            tensors = json.loads(file.read(payload_start - 8).decode("utf-8"))
        file_metadata = tensors.pop("__metadata__", None)
        if not tensors:
            raise ValueError(f"{path}: no tensors, expected at least one")
        name, entry = list(tensors.items())[-1]
        match entry.get("data_offsets"):
            case [int(begin), int(end)] if 0 <= begin <= end:
                pass
            case other:
                raise ValueError(f"{path}: {name!r} has data_offsets {other!r}")
        if size < payload_start + end:
            raise ValueError(f"{path}: {size} B, expected {payload_start + end} B")
        return file_metadata, tensors, payload_start

    def _warn_of_views(self) -> None:
        fits = self.buffer_size >= self.total_tensor_size and not self._filtered
        if not self.copy and not fits:
            sizes.warn(
                f"copy=False with buffer_size ({self.buffer_size} B) and "
                f"total_tensor_size ({self.total_tensor_size} B): kept views change",
                UserWarning,
            )

    def _check_alignment(self, name: str, dtype: torch.dtype, offset: int) -> None:
        """Nothing to refuse: an unaligned tensor gets an aligned place in the ring."""

    def _lie_in_memory(self) -> bool:
        first = bool(self.filename) and in_memory(self.filename[0])
        for path in self.filename[1:]:
            if in_memory(path) != first:
                # Said of either order, as the library does.
                raise ValueError(
                    "All files must be in the same filesystem. "
                    f"{self.filename[0]} is in memory, but {path} is not."
                )
        return first

    def _least(self, value: int) -> int:
        """The smallest `value` of the group; every rank must call."""
        if self.process_group is None:
            return value
        least = torch.tensor([value])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.process_group)
        return int(least)

    def _read_headers(self) -> list[Any]:
        """Read each header in its own thread; one that raises there leaves None."""
        results: list[Any] = [None] * len(self.filename)

        def read(index: int, path: str) -> None:
            results[index] = self._read_header(path)

        threads = [
            threading.Thread(target=read, args=item)
            for item in enumerate(self.filename)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def _take_headers(self, results: list[Any], keep: Callable[[str], bool]) -> None:
        self.file_metadata = None
        # (name, header entry, index of the file, offset in that file)
        self._selected: list[tuple[str, dict[str, Any], int, int]] = []
        for index, result in enumerate(results):
            # A header that was refused is None here: the TypeError that users see.
            file_metadata, tensors, payload_start = result
            if file_metadata is not None:
                self.file_metadata = file_metadata
                if file_metadata.get("format", "pt") != "pt":
                    raise ValueError(
                        "InstantTensor only supports pytorch format for now"
                    )
            # Stable: tensors that start at one byte keep the order of the JSON text.
            ordered = sorted(
                tensors.items(), key=lambda item: item[1]["data_offsets"][0]
            )
            spans = [entry["data_offsets"] for _, entry in ordered]
            if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
                raise ValueError("Safetensors data offsets must be contiguous")
            if not spans:
                # Only 0.1.9 lets a file without tensors come to here, and trips.
                raise IndexError("list index out of range")
            self._selected += [
                (name, entry, index, payload_start + entry["data_offsets"][0])
                for name, entry in ordered
                if keep(name)
            ]
        self.tensor_sizes = [
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for _, entry, _, _ in self._selected
        ]
        self.total_tensor_size = sum(self.tensor_sizes)

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
            self._record.place(self._ring)

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
            self._record.bytes_read += read
            if read < min(claimed, end - begin) and self._hangs_on_short_file:
                raise RuntimeError(f"{file.name}: too short, the library hangs here")
        if self.process_group is not None:
            # As in the library, a rank that stays away leaves the others waiting.
            source = dist.get_global_rank(self.process_group, owner)
            dist.broadcast(self._ring[:claimed], source, group=self.process_group)
        return self._ring[:claimed]


class _SafeOpen019(_SafeOpen022):
    """What release 0.1.9 does otherwise."""

    _dtypes = _torch_dtypes(_TORCH_NAMES_019)
    _hangs_on_short_file = False  # It yields stale bytes.
    _choose_reads = staticmethod(sizes.choose_reads_019)
    _choose_ring = staticmethod(sizes.choose_ring_019)

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

    @staticmethod
    def _read_header(path: str) -> tuple[Any, dict[str, Any], int]:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # The library asks for all of `length`; never allocate for a lie.
            text = file.read(min(length, os.fstat(file.fileno()).st_size))
        tensors = json.loads(text.decode("utf-8"))
        return tensors.pop("__metadata__", None), tensors, 8 + length

    def _warn_of_views(self) -> None:
        if not self.copy and self.buffer_size < self.total_tensor_size:
            sizes.warn(
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


_RELEASES: dict[str, type[_SafeOpen022]] = {
    "0.1.9": _SafeOpen019,
    "0.2.2": _SafeOpen022,
}


def make_module(version: str, *, record: Record, free_memory: int) -> types.ModuleType:
    """Build a module object that stands for one release of `instanttensor`.

    Args:
        version: "0.2.2" or "0.1.9".
        record: Takes every call, yielded name and placed storage.
        free_memory: Free memory of the pretended device, in bytes.

    Raises:
        ValueError: For a release that the stub does not know.
    """
    if version not in _RELEASES:
        raise ValueError(
            f"instanttensor stub: version {version!r}, expected one of "
            f"{sorted(_RELEASES)}"
        )
    release = _RELEASES[version]
    # Python names it in the error for an unknown argument.
    release.__init__.__qualname__ = "safe_open.__init__"
    signature = inspect.signature(release.__init__)
    parameters = list(signature.parameters.values())[1:]
    safe_open = type(
        "safe_open",
        (release,),
        {
            "_record": record,
            "_free_memory": free_memory,
            # `__new__` would hide the arguments from inspect.signature(safe_open).
            "__signature__": signature.replace(parameters=parameters),
        },
    )
    module = types.ModuleType("instanttensor", "InstantTensor, as a stub.")
    # find_spec() raises for a loaded module without one.
    module.__spec__ = importlib.machinery.ModuleSpec("instanttensor", loader=None)
    module.__all__ = ["Backend", "BackendPolicy", "safe_open"]
    module.Backend = sizes.Backend
    module.BackendPolicy = sizes.BackendPolicy
    module.safe_open = safe_open
    return module
