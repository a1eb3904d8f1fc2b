"""Write a safetensors file piece by piece, without holding it in memory.

The format (8 bytes of length, little-endian, a JSON header, the payload) is described
in the README of the safetensors project. The library writes only tensors that are all
in memory, and some of its versions write into an existing inode.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError, TensorHeader
from loadplan.core.header import read_header as core_read_header
from loadplan.drafter import files

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One tensor to write: ``chunks`` yields its ``nbytes`` bytes, in row order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Callable[[], Iterator[Any]]


def tensor_piece(name: str, tensor: torch.Tensor) -> Piece:
    """A tensor in memory; it must not change until it is written."""
    held = tensor.detach().contiguous().cpu()
    payload = held.reshape(-1).view(torch.uint8).numpy()
    return Piece(
        name=name,
        dtype=DTYPES[held.dtype],
        shape=tuple(held.shape),
        nbytes=payload.nbytes,
        chunks=lambda: iter([payload.data]),
    )


def file_piece(path: Path, tensor: TensorHeader) -> Piece:
    """A tensor that lies in the file ``path``, byte for byte."""

    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(tensor.begin)
            left = tensor.end - tensor.begin
            while left:
                block = file.read(min(left, files.BLOCK))
                if not block:
                    raise LoadPlanError(
                        f"{path}: ends {left} B before the end of {tensor.name!r}, "
                        "expected it whole; is something still writing it?"
                    )
                left -= len(block)
                yield block

    return Piece(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        nbytes=tensor.end - tensor.begin,
        chunks=chunks,
    )


def write(
    path: Path,
    pieces: Sequence[Piece],
    *,
    metadata: dict[str, str],
    mode: int | None = None,
    progress: files.Progress = files.no_progress,
) -> None:
    """Write ``pieces`` to ``path``, in their order where alignment allows.

    The same pieces give the same bytes. Wider elements come first, so that each tensor
    is aligned to its own.
    """
    ordered = sorted(pieces, key=lambda piece: -_width(piece))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for piece in ordered:
        begin, end = end, end + piece.nbytes
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for piece in ordered:
            for chunk in piece.chunks():
                yield chunk
                progress(len(chunk))

    files.write(path, chunks(), mode=mode)


def read(path: Path, tensor: TensorHeader) -> torch.Tensor:
    """The tensor in memory of its own.

    Raises:
        LoadPlanError: torch has no such dtype, or the file is too short.
    """
    if tensor.dtype not in TORCH_DTYPES:
        raise LoadPlanError(
            f"{path}: {tensor.name!r} has dtype {tensor.dtype}, expected one of "
            f"{sorted(TORCH_DTYPES)}; this head cannot be read"
        )
    buffer = bytearray()
    for chunk in file_piece(path, tensor).chunks():
        buffer += chunk
    dtype = TORCH_DTYPES[tensor.dtype]
    if not buffer:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def read_all(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every tensor of a small file, and its metadata."""
    header = read_header(path)
    tensors = {tensor.name: read(path, tensor) for tensor in header.tensors}
    return tensors, header.metadata or {}


def read_header(path: Path) -> Any:
    """The checked header of ``path``, see :func:`loadplan.core.read_header`."""
    return core_read_header(os.fspath(path))


def _width(piece: Piece) -> int:
    count = 1
    for size in piece.shape:
        count *= size
    return piece.nbytes // count if count else 0
