"""Rows of a packed head, read alone: what a check looks at of a large one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from loadplan.core.header import LoadPlanError, TensorHeader
from loadplan.drafter import safetensors_file
from loadplan.drafter.scheme import Scheme

BLOCK = 8
"""Rows that share the words in which their zero points are packed."""

_PLACES = 32
# Of a 4-bit row to the unquantised one, and of two 4-bit rows to each other: about 0.1
# and 0.15. Rows of different tokens have 1.4.
_CLOSE = 0.5

Reader = Callable[[str, "tuple[int, int] | None"], torch.Tensor]
"""Given a tensor's name in the head and rows, or None for all of it, reads it."""


def spread(count: int, number: int = _PLACES) -> list[int]:
    """At most ``number`` of ``count`` things, the first and the last among them."""
    if count <= number:
        return list(range(count))
    return sorted({(count - 1) * i // (number - 1) for i in range(number)})


def places(rows: int) -> list[tuple[int, int]]:
    """Blocks of rows, ``(begin, end)``, over all of a head."""
    blocks = -(-rows // BLOCK)
    return [(b * BLOCK, min((b + 1) * BLOCK, rows)) for b in spread(blocks)]


def read_rows(
    path: Path, tensor: TensorHeader, rows: tuple[int, int] | None
) -> torch.Tensor:
    """Rows ``[begin, end)`` of a tensor in a file, or all of it."""
    if rows is not None:
        begin, end = rows
        stride = (tensor.end - tensor.begin) // tensor.shape[0]
        tensor = tensor._replace(
            shape=(end - begin, *tensor.shape[1:]),
            begin=tensor.begin + begin * stride,
            end=tensor.begin + end * stride,
        )
    return safetensors_file.read(path, tensor)


def rows_of(
    read: Reader, scheme: Scheme, begin: int, end: int, width: int
) -> dict[str, torch.Tensor]:
    """The tensors of a head of the rows ``[begin, end)``; ``begin`` starts a block."""
    rows = (begin, end)
    found = {
        "weight_packed": read("weight_packed", rows),
        "weight_scale": read("weight_scale", rows),
    }
    if scheme.kind == "nvfp4":
        found["weight_global_scale"] = read("weight_global_scale", None)
        return found
    found["weight_shape"] = torch.tensor([end - begin, width])
    if not scheme.symmetric:
        words = (begin // BLOCK, -(-end // BLOCK))
        found["weight_zero_point"] = read("weight_zero_point", words)
    return found


def check_close(what: str, row: torch.Tensor, other: torch.Tensor) -> None:
    """Raises LoadPlanError where two rows are not of the same token."""
    size = other.norm()
    error = float((row - other).norm() / size) if size else float(row.norm() > 0)
    if not error < _CLOSE:
        raise LoadPlanError(
            f"{what} is {error:.2f} away, relative to its size; expected below {_CLOSE}"
        )
