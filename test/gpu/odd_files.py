"""One table of odd checkpoints and what InstantTensor does with each.

test/loadplan/test_fake.py holds the stub to it on any machine; conform.py compares the
stub and the real library case by case on a GPU. So the two cannot drift apart.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

MIB = 1024 * 1024
ABSENT = object()


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as a header lists it; `begin` and `end` are payload bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file; `raw` replaces everything, `payload` the patterned default."""

    file: str
    tensors: tuple[Entry, ...] = ()
    metadata: object = ABSENT
    payload: bytes | None = None
    payload_size: int | None = None
    header_padding: int = 0
    raw: bytes | None = None
    missing: bool = False
    in_memory: bool = False

    def contents(self) -> bytes:
        """The bytes of the whole file."""
        if self.raw is not None:
            return self.raw
        header: dict[str, Any] = {}
        if self.metadata is not ABSENT:
            header["__metadata__"] = self.metadata
        for entry in self.tensors:
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin, entry.end],
            }
        text = json.dumps(header).encode() + b" " * self.header_padding
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + self.data()

    def data(self) -> bytes:
        """The payload: a pattern that differs between files and between words."""
        if self.payload is not None:
            return self.payload
        size = self.payload_size
        if size is None:
            size = max((entry.end for entry in self.tensors), default=0)
        shift = sum(self.file.encode())
        pattern = bytes((7 * i + shift) % 251 for i in range(251))
        return (pattern * (size // 251 + 1))[:size]


@dataclass(frozen=True, slots=True)
class Got:
    """One yielded tensor; only `defined` leading bytes are certain, None means all."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    defined: int | None = None


@dataclass(frozen=True, slots=True)
class Raises:
    """An exception that reaches the caller; `text` is a regular expression."""

    kind: str
    text: str


HONEST = object()  # Every tensor just as the headers say, files in sorted order.
Expected = object  # HONEST, a tuple of Got, or Raises


@dataclass(frozen=True, slots=True)
class Case:
    """A row: files in the order given, arguments, and the library's behaviour.

    `expected_019` is there where release 0.1.9 differs. `settings` are attributes of
    the opened file, `warns` regular expressions, one a warning.
    """

    name: str
    shards: tuple[Shard, ...]
    expected: Expected = HONEST
    expected_019: Expected | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    warns: tuple[str, ...] = ()
    only_022: bool = False

    def write(self, disk: Path, memory: Path) -> list[str]:
        """Write the files and return their paths in the caller's order."""
        paths = []
        for shard in self.shards:
            path = (memory if shard.in_memory else disk) / shard.file
            if not shard.missing:
                path.write_bytes(shard.contents())
            paths.append(str(path))
        return paths

    def expects(self, version: str) -> Raises | tuple[Got, ...]:
        """The behaviour of one release, HONEST spelled out."""
        expected = self.expected
        if version == "0.1.9" and self.expected_019 is not None:
            expected = self.expected_019
        if expected is not HONEST:
            return expected
        ordered = sorted(self.shards, key=lambda shard: shard.file)
        return tuple(honest(s, e) for s in ordered for e in _by_offset(s.tensors))


def _by_offset(entries: tuple[Entry, ...]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.begin)


_TORCH_NAMES = {
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


def honest(shard: Shard, entry: Entry) -> Got:
    """The tensor that the header describes."""
    data = shard.data()[entry.begin : entry.end]
    return Got(entry.name, f"torch.{_TORCH_NAMES[entry.dtype]}", entry.shape, data)


@dataclass(slots=True)
class Observed:
    """What one run did, as far as two libraries can be compared."""

    tensors: list[Got] = field(default_factory=list)
    error: tuple[str, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    dead_threads: int = 0
    order_after: list[str] = field(default_factory=list)


def observe(
    safe_open: Callable[..., Any],
    files: list[str],
    *,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Observed:
    """Open `files` (the list may be sorted) and take every tensor."""
    seen = Observed()
    kwargs = {"framework": "pt", "device": 0} | kwargs
    with _environment(env or {}), _thread_deaths(seen), _caught(seen):
        try:
            with safe_open(files, **kwargs) as opened:
                seen.settings = _settings(opened)
                for name, tensor in opened.tensors():
                    seen.tensors.append(described(name, tensor))
        except Exception as error:
            seen.error = (type(error).__name__, str(error))
    seen.order_after = list(files)
    return seen


def described(name: str, tensor: torch.Tensor) -> Got:
    """Name, dtype, shape and bytes of one tensor on any device."""
    flat = tensor.detach().reshape(-1)
    flat = flat.view(torch.uint8).cpu()
    data = ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""
    return Got(name, str(tensor.dtype), tuple(tensor.shape), data)


def certain(tensors: list[Got], expected: tuple[Got, ...]) -> list[Got]:
    """`tensors` without the bytes that `expected` calls uncertain."""
    ends = [want.defined for want in expected] + [None] * len(tensors)
    return [
        dataclasses.replace(got, data=got.data[:end])
        for got, end in zip(tensors, ends, strict=False)
    ]


def _settings(opened: Any) -> dict[str, Any]:
    names = ("buffer_size", "chunk_size", "io_depth", "concurrency")
    values = {name: getattr(opened, name) for name in (*names, "total_tensor_size")}
    values["backend"] = opened.backend.name
    values["keys"] = opened.keys()
    values["offset_keys"] = opened.offset_keys()
    return values


@contextmanager
def _environment(env: Mapping[str, str]):
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _thread_deaths(seen: Observed):
    hook = threading.excepthook

    def count(args: Any) -> None:
        seen.dead_threads += 1

    threading.excepthook = count
    try:
        yield
    finally:
        threading.excepthook = hook


@contextmanager
def _caught(seen: Observed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    seen.warnings = [
        # What follows a colon is advice, which the stub words for itself.
        f"{one.category.__name__}: {comparable(str(one.message)).split(': ')[0]}"
        for one in caught
    ]


def comparable(text: str) -> str:
    """`text` without addresses, which differ from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0x...", text)


def _u8(name: str, begin: int, end: int) -> Entry:
    return Entry(name, "U8", (end - begin,), begin, end)


def _one(name: str, *entries: Entry, expected: Expected = HONEST, **more: Any) -> Case:
    """A case of one file; fields of the file and of the case may be mixed."""
    of_case = {field.name for field in dataclasses.fields(Case)}
    case = {key: value for key, value in more.items() if key in of_case}
    file = {key: value for key, value in more.items() if key not in of_case}
    return Case(name, (Shard("a.safetensors", entries, **file),), expected, **case)


GOOD = Shard(
    "good.safetensors", (Entry("a", "F32", (4,), 0, 16), Entry("b", "U8", (8,), 16, 24))
)
SECOND = Shard("second.safetensors", (Entry("c", "BF16", (8,), 0, 16),))
_LAST = Shard("z.safetensors", (_u8("z", 0, 8),))
_EMPTY = Shard("empty.safetensors")
# The caller sees this and nothing of why a header was refused.
LOST_REASON = Raises("TypeError", "^cannot unpack non-iterable NoneType object$")
_NOT_CONTIGUOUS = Raises("ValueError", "^Safetensors data offsets must be contiguous$")
# 0.1.9 checks no header: the empty list of tensors is what it falls over.
_INDEX_ERROR = Raises("IndexError", "^list index out of range$")
_UNALIGNED_019 = Raises(
    "ValueError", "^Tensor .* is not aligned to dtype torch.float32"
)
_MARKS = bytes(range(0x21, 0x29)) + b"\xee" * 8
_F4_DTYPE = "torch.float4_e2m1fn_x2"
_BIG = Shard("big.safetensors", (_u8("s", 0, 1000), _u8("B", 1000, 1000 + 40 * MIB)))


def _empty_shard(position: str, names: tuple[str, str, str]) -> Case:
    shards = tuple(
        Shard(name) if name.startswith("empty") else Shard(name, (_u8(name, 0, 8),))
        for name in names
    )
    return Case(
        f"shard without tensors {position}",
        shards,
        LOST_REASON,
        expected_019=_INDEX_ERROR,
    )


HEADERS = [
    Case("two plain files", (GOOD, SECOND)),
    Case("files in an order that is not sorted", (SECOND, GOOD)),
    Case(
        "no files at all",
        (),
        Raises("RuntimeError", "^io_uring_register failed: Bad address$"),
        only_022=True,  # 0.1.9 aborts the process.
    ),
    _one(
        "shard without tensors alone",
        expected=LOST_REASON,
        expected_019=_INDEX_ERROR,
    ),
    _empty_shard("first", ("empty", "m", "n")),
    _empty_shard("in the middle", ("a", "empty", "n")),
    _empty_shard("last", ("a", "b", "empty")),
    Case(
        "shard with only __metadata__",
        (Shard("m.safetensors", metadata={"format": "pt"}), GOOD),
        LOST_REASON,
        expected_019=_INDEX_ERROR,
    ),
    _one("0-byte file", raw=b"", expected=LOST_REASON),
    _one(
        "AppleDouble file",
        raw=bytes([0, 5, 0x16, 7, 0, 2, 0, 0]) + b"x" * 92,
        expected=LOST_REASON,
    ),
    _one(
        "header that is no JSON",
        raw=b"\4" + bytes(7) + b"{{{{",
        expected=LOST_REASON,
    ),
    _one("file that is not there", missing=True, expected=LOST_REASON),
    _one(
        "zero-byte tensor listed after the tensor it shares its start with",
        _u8("a", 0, 2),
        _u8("b", 2, 4),
        Entry("z", "U8", (0, 4), 2, 2),
        expected=_NOT_CONTIGUOUS,
    ),
    _one(
        "zero-byte tensor listed before the tensor it shares its start with",
        _u8("a", 0, 2),
        Entry("z", "U8", (0, 4), 2, 2),
        _u8("b", 2, 4),
    ),
    _one("zero-byte tensor at the end", _u8("a", 0, 4), _u8("z", 4, 4)),
    _one("zero-byte tensor alone", Entry("z", "U8", (0, 4), 0, 0)),
    Case(
        "same tensor name in two files",
        (Shard("p", (_u8("x", 0, 4),)), Shard("q", (_u8("x", 0, 8),))),
    ),
    Case("same file given twice", (GOOD, GOOD)),
    _one("__metadata__ {}", _u8("a", 0, 4), metadata={}),
    _one("__metadata__ null", _u8("a", 0, 4), metadata=None),
    _one("__metadata__ format pt", _u8("a", 0, 4), metadata={"format": "pt"}),
    _one(
        "__metadata__ format mlx",
        _u8("a", 0, 4),
        metadata={"format": "mlx"},
        expected=Raises(
            "ValueError", "^InstantTensor only supports pytorch format for now$"
        ),
    ),
    _one("2 trailing bytes", _u8("a", 0, 4), payload_size=6),
    _one("gap before the first tensor", _u8("a", 2, 6)),
    _one(
        "gap in the middle", _u8("a", 0, 4), _u8("b", 6, 10), expected=_NOT_CONTIGUOUS
    ),
    _one("overlap", _u8("a", 0, 4), _u8("b", 2, 6), expected=_NOT_CONTIGUOUS),
    _one("header padded with 4,000 spaces", _u8("a", 0, 4), header_padding=4000),
    Case("file name without .safetensors", (dataclasses.replace(GOOD, file="blob"),)),
    Case(
        "one file in memory, one on disk",
        (GOOD, dataclasses.replace(_LAST, in_memory=True)),
        Raises("ValueError", "^All files must be in the same filesystem"),
    ),
    Case("file in memory", (dataclasses.replace(GOOD, in_memory=True),)),
]

DTYPES = [
    _one(
        "scalars and F32 at an odd offset",
        Entry("o", "I8", (1,), 0, 1),
        Entry("s", "F32", (), 1, 5),
        Entry("v", "F32", (1,), 5, 9),
        expected_019=_UNALIGNED_019,
    ),
    _one(
        "C64, U64, U32, U16, BOOL",
        Entry("c", "C64", (1,), 0, 8),
        Entry("u64", "U64", (1,), 8, 16),
        Entry("u32", "U32", (1,), 16, 20),
        Entry("u16", "U16", (2,), 20, 24),
        Entry("b", "BOOL", (2,), 24, 26),
        payload=bytes(range(24)) + b"\1\0",
    ),
    _one(
        "F8_E8M0 and F8_E4M3",
        Entry("e", "F8_E8M0", (4,), 0, 4),
        Entry("f", "F8_E4M3", (2, 2), 4, 8),
    ),
    _one(
        "F8_E4M3FNUZ",
        Entry("f", "F8_E4M3FNUZ", (4,), 0, 4),
        expected_019=Raises(
            "ValueError", "^Unsupported safetensors dtype: F8_E4M3FNUZ$"
        ),
    ),
    _one(
        "F4 takes the next tensor's bytes",
        Entry("s", "F8_E8M0", (8,), 0, 8),
        Entry("w", "F4", (2, 8), 8, 16),
        Entry("n", "F8_E8M0", (8,), 16, 24),
        payload=bytes(range(1, 9)) + _MARKS,
        expected=(
            Got("s", "torch.float8_e8m0fnu", (8,), bytes(range(1, 9))),
            Got("w", _F4_DTYPE, (2, 8), _MARKS),
            Got("n", "torch.float8_e8m0fnu", (8,), _MARKS[8:]),
        ),
    ),
    _one(
        "F4 last in its file takes stale memory",
        Entry("w", "F4", (2, 8), 0, 8),
        payload=_MARKS[:8],
        expected=(Got("w", _F4_DTYPE, (2, 8), _MARKS[:8], defined=8),),
    ),
    _one(
        "F4 of an odd row",
        Entry("w", "F4", (2, 3), 0, 3),
        payload=b"abc",
        expected=(Got("w", _F4_DTYPE, (2, 3), b"abc", defined=3),),
    ),
    *(
        _one(
            f"{dtype} is refused when its turn comes",
            _u8("a", 0, 4),
            Entry("w", dtype, (4,), 4, 7),
            expected=Raises("ValueError", f"^Unsupported safetensors dtype: {dtype}$"),
        )
        for dtype in ("F6_E2M3", "F6_E3M2")
    ),
    _one(
        "truncated payload",
        _u8("a", 0, 4),
        payload=b"abc",
        expected=LOST_REASON,
        expected_019=(Got("a", "torch.uint8", (4,), b"abc", defined=3),),
    ),
    _one(
        "shape of fewer bytes than the offsets",
        Entry("a", "U8", (2,), 0, 4),
        _u8("b", 4, 6),
        payload=b"abcdef",
        expected=(
            Got("a", "torch.uint8", (2,), b"ab"),
            Got("b", "torch.uint8", (2,), b"ef"),
        ),
    ),
    _one(
        "shape of more bytes than the offsets",
        Entry("a", "U8", (6,), 0, 4),
        _u8("b", 4, 6),
        payload=b"abcdef",
        expected=(
            Got("a", "torch.uint8", (6,), b"abcdef"),
            Got("b", "torch.uint8", (2,), b"ef"),
        ),
    ),
]


def _filtered(name: str, wanted: Any, mode: str, *kept: int, **more: Any) -> Case:
    everything = [honest(s, e) for s in (GOOD, SECOND) for e in s.tensors]
    return Case(
        f"tensor_filter {name}",
        (GOOD, SECOND),
        more.pop("expected", tuple(everything[i] for i in kept)),
        kwargs={"tensor_filter": wanted, "tensor_name_match_mode": mode},
        only_022=True,
        **more,
    )


FILTERS = [
    _filtered("of exact names", ["a", "c"], "exact", 0, 2),
    _filtered("that is empty", [], "exact"),
    _filtered("of unknown names", ["nope"], "exact"),
    _filtered("of globs", ["[ab]"], "glob", 0, 1),
    _filtered("of a regex that must match whole names", ["b|"], "regex", 1),
    _filtered(
        "of a bad regex",
        ["("],
        "regex",
        expected=Raises("ValueError", r"^Invalid regex pattern '\('"),
    ),
    _filtered(
        "of a bad mode",
        ["a"],
        "prefix",
        expected=Raises(
            "ValueError", "^tensor_name_match_mode must be 'exact', 'glob'"
        ),
    ),
    _filtered(
        "that is no list",
        ("a",),
        "exact",
        expected=Raises("TypeError", "^Name patterns must be a list of strings$"),
    ),
]

ARGUMENTS = [
    Case(
        "device that is not CUDA",
        (GOOD,),
        Raises("ValueError", "^InstantTensor only supports CUDA devices for now$"),
        kwargs={"device": "cpu"},
    ),
    Case(
        "device without an index",
        (GOOD,),
        Raises("TypeError", r"^open\(\): incompatible function arguments"),
        kwargs={"device": "cuda"},
    ),
    Case(
        "framework that is not pt",
        (GOOD,),
        Raises("ValueError", "^InstantTensor only supports pytorch for now$"),
        kwargs={"framework": "np"},
    ),
    Case(
        "unknown argument",
        (GOOD,),
        Raises("TypeError", "got an unexpected keyword argument 'nope'$"),
        kwargs={"nope": 1},
    ),
    Case("load_now=False", (GOOD,), kwargs={"load_now": False}),
    Case(
        "backend=[]",
        (GOOD,),
        Raises("ValueError", "^backend cannot be an empty list; use None"),
        kwargs={"backend": []},
    ),
    Case(
        "backend as text",
        (GOOD,),
        Raises("TypeError", "^backend must be a `Backend`, `BackendPolicy`, or list"),
        kwargs={"backend": "AIO"},
    ),
    Case(
        "INSTANTTENSOR_BACKEND unknown",
        (GOOD,),
        Raises("ValueError", "^backend=FAST is invalid. Available backends: dict_keys"),
        env={"INSTANTTENSOR_BACKEND": "FAST"},
    ),
    Case(
        "INSTANTTENSOR_BACKEND empty",
        (GOOD,),
        Raises("ValueError", "^INSTANTTENSOR_BACKEND cannot be empty$"),
        env={"INSTANTTENSOR_BACKEND": ","},
    ),
    Case(
        "INSTANTTENSOR_IO_DEPTH that is no number",
        (GOOD,),
        Raises("ValueError", "^invalid literal for int"),
        env={"INSTANTTENSOR_IO_DEPTH": "many"},
    ),
]


def _sized(name: str, shard: Shard = GOOD, **more: Any) -> Case:
    return Case(name, (shard,), **({"only_022": True} | more))


SIZES = [
    _sized(
        "ring of 4 GiB for 24 bytes on disk",
        settings={
            "chunk_size": 8 * MIB,
            "io_depth": 512,
            "concurrency": 0,
            "buffer_size": 4096 * MIB,
            "total_tensor_size": 24,
            "backend": "URING",
        },
    ),
    _sized(
        "ring of 4 GiB although almost everything is filtered out",
        expected=(honest(GOOD, GOOD.tensors[1]),),
        kwargs={"tensor_filter": ["b"]},
        settings={"buffer_size": 4096 * MIB, "total_tensor_size": 8},
    ),
    _sized(
        "ring grows to the largest tensor",
        _BIG,
        kwargs={"buffer_size": 8 * MIB},
        settings={"buffer_size": 40 * MIB, "io_depth": 1},
        warns=(
            "Shrink io_depth from 512 to 1 to fit buffer_size=8388608",
            "Enlarge buffer size from 8388608 to 41943040",
        ),
    ),
    _sized(
        "ring shrinks to what reads need",
        kwargs={"buffer_size": 100 * MIB},
        settings={"buffer_size": 96 * MIB, "io_depth": 12},
        warns=("Shrink io_depth", "Shrink buffer size from 104857600 to 100663296"),
    ),
    _sized(
        "io_depth=2",
        kwargs={"io_depth": 2},
        settings={"io_depth": 2, "buffer_size": 16 * MIB},
    ),
    _sized(
        "ring for tensors larger than the reads",
        Shard(
            "s.safetensors",
            (
                _u8("a", 0, 100_000),
                _u8("b", 100_000, 500_000),
                _u8("c", 500_000, 520_000),
                _u8("d", 520_000, 900_000),
            ),
        ),
        kwargs={"io_depth": 1, "chunk_size": 1},
        settings={"chunk_size": 1, "buffer_size": 900_000},
    ),
    _sized(
        "variables are read",
        env={
            "INSTANTTENSOR_CHUNK_SIZE": "5000",
            "INSTANTTENSOR_IO_DEPTH": "7",
            "INSTANTTENSOR_BACKEND": "AIO",
        },
        settings={"io_depth": 7, "buffer_size": 7 * 8192, "backend": "AIO"},
    ),
    _sized(
        "INSTANTTENSOR_BUFFER_SIZE",
        env={"INSTANTTENSOR_BUFFER_SIZE": str(16 * MIB)},
        settings={"io_depth": 2, "buffer_size": 16 * MIB},
        warns=("Shrink io_depth from 512 to 2 to fit buffer_size=16777216",),
    ),
    _sized(
        "an argument wins over its variable",
        kwargs={"io_depth": 3},
        env={"INSTANTTENSOR_IO_DEPTH": "7"},
        settings={"io_depth": 3},
    ),
    _sized(
        "backend policy by variable",
        env={"INSTANTTENSOR_BACKEND": " BUFFERED , AIO"},
        settings={"backend": "URING_BUFFERED", "chunk_size": 8 * MIB},
    ),
    _sized(
        "backend that cannot read memory",
        dataclasses.replace(GOOD, in_memory=True),
        env={"INSTANTTENSOR_BACKEND": "AIO"},
        expected=Raises("RuntimeError", "^No available backend was found among"),
    ),
    _sized(
        "concurrency where the kernel reads",
        kwargs={"concurrency": 4},
        settings={"concurrency": 0, "io_depth": 512},
        warns=("Backend URING does not support concurrency; overriding concurrency=4",),
    ),
    _sized(
        "concurrency in memory",
        dataclasses.replace(GOOD, in_memory=True),
        kwargs={"concurrency": 5},
        settings={"concurrency": 5, "io_depth": 15, "buffer_size": 30 * MIB},
    ),
    *(
        _sized(
            f"{name}={value}",
            expected=Raises("ValueError", text),
            kwargs={name: value},
        )
        for name, value, text in (
            ("concurrency", -1, "^concurrency must not be negative$"),
            ("chunk_size", 0, "^chunk_size must be greater than zero$"),
            ("chunk_size", 1024 * MIB + 1, "^chunk_size must be no greater than"),
            ("io_depth", 0, "^io_depth must be greater than zero$"),
            ("io_depth", 1025, "^io_depth must not exceed 1024$"),
            ("buffer_size", 0, "^buffer_size must be greater than zero$"),
            ("buffer_size", 4096, r"^buffer_size \(4096 B\) is too small for one I/O"),
        )
    ),
    _sized(
        "buffer_size too small for an explicit io_depth",
        kwargs={"buffer_size": 16 * MIB, "io_depth": 3},
        expected=Raises(
            "ValueError", r"is too small for io_depth=3; at least 25165824"
        ),
    ),
    *(
        _sized(
            f"max_free_mem_usage={value}",
            expected=Raises(
                "RuntimeError", "^Cannot select memory budget: max_free_mem"
            ),
            kwargs={"max_free_mem_usage": value},
        )
        for value in (0.0, 1.5, math.nan)
    ),
    _sized(
        "budget below one read",
        kwargs={"max_free_mem_usage": 1e-6},
        expected=Raises(
            "RuntimeError", "^Device memory budget .* is too small for one"
        ),
    ),
    _sized(
        "budget below the wanted depth",
        kwargs={"max_free_mem_usage": 0.01},
        warns=("Shrink io_depth from 512 to [0-9]+ due to memory limit",),
    ),
    _sized(
        "largest tensor above the budget",
        _BIG,
        kwargs={"max_free_mem_usage": 1e-6, "chunk_size": 4096, "io_depth": 1},
        expected=Raises("RuntimeError", r"^buffer_size \(.* B\) exceeds device memory"),
    ),
    _sized(
        "copy=False in a ring that holds everything",
        dataclasses.replace(GOOD, in_memory=True),
        kwargs={"copy": False, "concurrency": 1},
    ),
    _sized(
        "copy=False in a ring that is reused",
        _BIG,
        kwargs={"copy": False, "buffer_size": 8 * MIB},
        warns=("Shrink io_depth", "Enlarge buffer size", "copy=False with buffer_size"),
    ),
]

SIZES_019 = [
    Case(
        "0.1.9 ring on disk",
        (GOOD,),
        settings={
            "chunk_size": 8 * MIB,
            "io_depth": 512,
            "concurrency": 1,
            "buffer_size": 4096 * MIB,
            "backend": "URING",
        },
    ),
    Case(
        "0.1.9 ring is never larger than the tensors",
        (GOOD,),
        kwargs={"buffer_size": 8 * MIB},
        settings={"buffer_size": 24},
        warns=("Shrink buffer size from 8388608 to 24",),
    ),
    Case(
        "0.1.9 in memory",
        (dataclasses.replace(GOOD, in_memory=True),),
        settings={"chunk_size": 2 * MIB, "io_depth": 3, "backend": "MMAP"},
    ),
    Case(
        "0.1.9 backend that cannot read memory",
        (dataclasses.replace(GOOD, in_memory=True),),
        Raises(
            "RuntimeError", "^No available backend found from candidates .AIO.. AIO"
        ),
        env={"INSTANTTENSOR_BACKEND": "AIO"},
    ),
    Case(
        "0.1.9 budget below three reads",
        (GOOD,),
        Raises("RuntimeError", "^Device memory is not enough$"),
        kwargs={"max_free_mem_usage": 1e-6},
        warns=("Shrink io_depth from 512 to 3 due to memory limit",),
    ),
    Case(
        "0.1.9 has no tensor_filter",
        (GOOD,),
        Raises("TypeError", "got an unexpected keyword argument 'tensor_filter'$"),
        kwargs={"tensor_filter": ["a"]},
    ),
]


def cases(version: str) -> list[Case]:
    """Every case that makes sense for one release ("0.2.2" or "0.1.9")."""
    shared = HEADERS + DTYPES + ARGUMENTS
    if version == "0.1.9":
        return [case for case in shared if not case.only_022] + SIZES_019
    return shared + FILTERS + SIZES


def _error_of(action: Callable[[], object]) -> object:
    try:
        return action()
    except Exception as error:
        return type(error).__name__, str(error)


def _open_good(safe_open: Callable[..., Any], files: list[str]) -> Any:
    return safe_open(list(files), framework="pt", device=0, chunk_size=4096, io_depth=4)


def _twice(safe_open: Callable[..., Any], files: list[str]) -> object:
    with _open_good(safe_open, files) as opened:
        first = [name for name, _ in opened.tensors()]
        return first, _error_of(lambda: next(opened.tensors()))


def _after_exit(safe_open: Callable[..., Any], files: list[str]) -> object:
    with _open_good(safe_open, files) as opened:
        pass
    late = opened.tensors()  # Only the first item is refused, not the call.
    return opened.keys(), _error_of(lambda: next(late))


def _early_break(safe_open: Callable[..., Any], files: list[str]) -> object:
    with _open_good(safe_open, files) as opened:
        first = described(*next(opened.tensors()))
    with _open_good(safe_open, files) as opened:
        return first, [described(*item) for item in opened.tensors()]


def _kept(safe_open: Callable[..., Any], files: list[str]) -> object:
    with _open_good(safe_open, files) as opened:
        kept = list(opened.tensors())
    return [described(*item) for item in kept]


def _metadata(safe_open: Callable[..., Any], files: list[str]) -> object:
    with _open_good(safe_open, files) as opened:
        dtype, shape = opened.get_tensor_metadata("b")
        unknown = _error_of(lambda: opened.get_tensor_metadata("nope"))
        text = _error_of(opened.metadata)
        return (str(dtype), tuple(shape)), unknown, text, hasattr(opened, "get_tensor")


def _single_path(safe_open: Callable[..., Any], files: list[str]) -> object:
    with safe_open(files[0], "pt", "cuda:0", None, io_depth=1) as opened:
        return opened.keys()


_GOOD_TENSORS = [honest(s, e) for s in (GOOD, SECOND) for e in s.tensors]
_NO_METADATA = ("TypeError", "'NoneType' object is not iterable")

# Name -> (action on good.safetensors and second.safetensors, its result).
PROBES: dict[str, tuple[Callable[..., object], object]] = {
    "tensors() a second time": (
        _twice,
        (["a", "b", "c"], ("RuntimeError", "tensors() can only be called once")),
    ),
    "tensors() after exit": (
        _after_exit,
        (
            ["a", "b", "c"],
            ("RuntimeError", "tensors() called after safe_open context exited"),
        ),
    ),
    "early break, then again": (_early_break, (_GOOD_TENSORS[0], _GOOD_TENSORS)),
    "copy=True tensors outlive the context": (_kept, _GOOD_TENSORS),
    "metadata of tensors and files": (
        _metadata,
        (("torch.uint8", (8,)), ("KeyError", "'nope'"), _NO_METADATA, False),
    ),
    "one path instead of a list": (_single_path, ["a", "b"]),
}


def version_of(module: Any) -> str:
    """The release that a module's arguments tell; no release has a `__version__`."""
    names = inspect.signature(module.safe_open.__init__).parameters
    return "0.2.2" if "tensor_filter" in names else "0.1.9"


def surface(module: Any) -> dict[str, object]:
    """Arguments and names of one library, real or stub."""
    parameters = inspect.signature(module.safe_open.__init__).parameters.values()
    return {
        "arguments": [(p.name, p.kind.name, p.default) for p in parameters],
        "backends": {one.name: one.value for one in module.Backend},
        "policies": {one.name: one.value for one in module.BackendPolicy},
        "all": sorted(module.__all__),
    }


def ring_sizes(
    for_io: Callable[[int, int, int], int], for_tensors: Callable[[list[int]], int]
) -> list[int]:
    """Bytes of rings for a grid of reads and lists of tensor sizes, one library's."""
    grid = itertools.product((1, 4096, 4097, 8 * MIB), (1, 3, 512), (1, 2, 8))
    lists = ([], [0], [0, 0], [7], [1, 100, 1], [100, 1, 100], list(range(0, 900, 7)))
    return [for_io(*case) for case in grid] + [for_tensors(sizes) for sizes in lists]
