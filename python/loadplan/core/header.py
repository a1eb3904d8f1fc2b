"""What one safetensors file holds and where, read from its header alone.

The verdict on a file, the names and their order are official safetensors'.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .content import stranger
from .small_file import read_json

INDEX_NAME = "model.safetensors.index.json"
_INDEX = "a JSON object whose weight_map maps tensor names to shards"

# The file starts with the header's length as a little-endian 64-bit integer
# (https://github.com/huggingface/safetensors, README, "Format").
_LENGTH_BYTES = 8

# Bits per element and torch's name of the dtype, by its name in the header. None:
# torch has no such dtype, so official safetensors lists the tensor and cannot load it.
_DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    # Two values share a byte, so torch's last dimension is half the header's.
    "F4": (4, "float4_e2m1fn_x2"),
}

# Official safetensors has judged the text before it is parsed here; orjson is faster
# and comes with the engines.
try:
    from orjson import loads as _parse
except ImportError:
    _parse = json.loads

# Network file systems answer slowly, one request after the other.
_HEADER_THREADS = 16

# statfs(2) f_type of the file systems that live in memory.
_IN_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs, ramfs


class LoadPlanError(ValueError):
    """A checkpoint or a request that cannot be loaded as it is.

    The text names the file and the tensor, what was found, what was expected and
    the way out.
    """


class ShortFileError(LoadPlanError, EOFError):
    """A file ended before the bytes that its header promises."""


class TensorHeader(NamedTuple):
    """One tensor of a file.

    ``dtype`` and ``shape`` are the header's own (an F4 shape counts values, not
    bytes); ``begin`` and ``end`` are offsets in bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def element_bits(self) -> int:
        return _DTYPES[self.dtype][0]

    @property
    def is_sub_byte(self) -> bool:
        return self.element_bits < 8

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype official safetensors loads this as, None if it cannot."""
        bits, name = _DTYPES[self.dtype]
        # A packed dtype needs whole bytes in its last dimension.
        if name is None or (bits < 8 and self.shape[-1] * bits % 8):
            return None
        return getattr(torch, name, None)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape official safetensors loads this as: packed for sub-byte dtypes."""
        if not self.is_sub_byte:
            return self.shape
        return (*self.shape[:-1], self.shape[-1] * self.element_bits // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class FileHeader:
    """One shard: its tensors in the order of their bytes.

    ``identity`` is the device and inode, equal for two links to one file; ``mtime_ns``
    is when the file was last written; ``in_memory`` tells tmpfs and ramfs from
    everything else, None where the ranks that load together differ; ``size`` is in
    bytes.
    """

    path: str
    size: int
    identity: tuple[int, int]
    in_memory: bool | None
    metadata: dict[str, str] | None
    tensors: tuple[TensorHeader, ...]
    mtime_ns: int = 0

    @property
    def payload_bytes(self) -> int:
        # Nothing lies between the tensors, and there may be thousands of them.
        return self.tensors[-1].end - self.tensors[0].begin if self.tensors else 0

    def check_unchanged(self, status: os.stat_result) -> None:
        """Refuse an opened file that is not the one whose header was read.

        Raises:
            LoadPlanError: it was replaced or written to meanwhile.
            ShortFileError: it has become shorter.
        """
        _check_same(self.path, status, (*self.identity, self.size, self.mtime_ns))


def read_header(path: str) -> FileHeader:
    """Read and check the header of ``path``; no payload is read.

    Raises:
        LoadPlanError: missing, not a regular file, refused by official safetensors, or
            changed while it was read.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        what = "no such file"
        if os.path.islink(path):
            what = f"a link to {os.readlink(path)!r}, which is not there"
        raise LoadPlanError(
            f"{path}: {what}, expected a safetensors shard; is the download complete?"
        ) from error
    # Opening a FIFO or a device would block or have effects.
    if not stat.S_ISREG(status.st_mode):
        raise LoadPlanError(
            f"{path}: not a regular file, expected a safetensors shard; "
            "replace it or remove it from the checkpoint"
        )
    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata()
            names = opened.offset_keys()
    except SafetensorError as error:
        found = stranger(path)
        what = f"it is {found}" if found else f"{error}; download the file again"
        raise LoadPlanError(f"{path}: refused by safetensors: {what}") from error
    with open(path, "rb") as file:
        _check_same(path, os.fstat(file.fileno()), _version(status))
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = _parse(file.read(length))
    start = _LENGTH_BYTES + length
    tensors = tuple(_tensor(path, name, entries[name], start) for name in names)
    return FileHeader(
        path=path,
        size=status.st_size,
        identity=(status.st_dev, status.st_ino),
        in_memory=is_in_memory(path),
        metadata=metadata,
        tensors=tensors,
        mtime_ns=status.st_mtime_ns,
    )


def read_headers(paths: Sequence[str]) -> list[FileHeader]:
    """Read the headers of ``paths``, in that order, several files at a time."""
    with concurrent.futures.ThreadPoolExecutor(_HEADER_THREADS) as pool:
        return list(pool.map(read_header, paths))


def read_index(folder: str) -> dict[str, str] | None:
    """Map each tensor name of the checkpoint's index to a path, None without index.

    Paths are ``folder`` and the shard's name without dots that mean nothing, as a
    listing of ``folder`` spells them.

    Raises:
        LoadPlanError: the index is no index, or it names a file outside ``folder``.
    """
    path = os.path.join(folder, INDEX_NAME)
    index = read_json(path, expected=_INDEX, error=LoadPlanError)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        found = "no weight_map" if weight_map is None else "a weight_map that is none"
        raise LoadPlanError(f"{path}: {found}, expected {_INDEX}; download it again")
    paths: dict[str, str] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise LoadPlanError(
                f"{path}: names {shard!r} for tensor {name!r}, expected {_INDEX}; "
                "download it again"
            )
        # An index comes with the checkpoint and must not choose other files to read.
        if shard not in paths and not _is_inside(shard):
            raise LoadPlanError(
                f"{path}: names shard {shard!r} for tensor {name!r}, expected a path "
                "inside the checkpoint's folder; do not load this checkpoint"
            )
        paths[shard] = os.path.join(folder, os.path.normpath(shard))
    return {name: paths[shard] for name, shard in weight_map.items()}


def _is_inside(shard: str) -> bool:
    """Whether ``shard`` can be the name of a file below the checkpoint's folder."""
    try:
        named = b"\0" not in os.fsencode(shard) and os.path.normpath(shard) != "."
    except UnicodeEncodeError:
        return False
    return named and not os.path.isabs(shard) and ".." not in shard.split("/")


def _version(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from another one, and from itself after a change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_same(path: str, status: os.stat_result, expected: tuple[int, ...]) -> None:
    *_, size, _ = expected
    if status.st_size < size:
        raise ShortFileError(
            f"{path}: ends at byte {status.st_size}, expected {size} B: it changed "
            "while loading; load again when nothing writes to the checkpoint"
        )
    if _version(status) != expected:
        raise LoadPlanError(
            f"{path}: changed while loading: device, inode, size and time of change "
            f"are {_version(status)}, expected those of the header, {expected}; load "
            "again when nothing writes to the checkpoint"
        )


def _tensor(path: str, name: str, entry: dict, start: int) -> TensorHeader:
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    if dtype not in _DTYPES:
        raise LoadPlanError(
            f"{path}: tensor {name!r} has dtype {dtype!r}, expected one of "
            f"{sorted(_DTYPES)}; update loadplan"
        )
    return TensorHeader(name, dtype, tuple(entry["shape"]), start + begin, start + end)


def is_in_memory(path: str) -> bool:
    """Whether the file at ``path`` lies on tmpfs or ramfs."""
    return file_system(path) in _IN_MEMORY_FILE_SYSTEMS


def file_system(path: str) -> int:
    """The type of the file system that holds ``path``: f_type of statfs(2)."""
    # os.statvfs does not tell the type; it is the first word of struct statfs, which
    # is 120 bytes on the 64-bit Linux machines that GPUs sit in.
    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), path)
    return buffer[0] & 0xFFFFFFFF
