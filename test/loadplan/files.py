"""Write small safetensors files by hand, also such as no library would write."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E8M0": 8}
BITS |= {"F8_E4M3": 8, "BF16": 16, "F32": 32, "BOOL": 8, "C64": 64}


def content(nbytes: int, salt: int = 0) -> bytes:
    """Bytes that repeat only after 251, so that a shifted read shows."""
    return bytes((7 * i + 3 + salt) % 251 for i in range(nbytes))


def write_shard(
    path: Path,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    *,
    metadata: object = None,
    payload: bytes | None = None,
    salt: int = 0,
) -> Path:
    """Write ``(name, dtype, shape)`` tensors packed in that order; return ``path``.

    ``metadata`` None leaves ``__metadata__`` out. ``payload`` replaces the bytes.
    """
    entries: dict[str, object] = {}
    if metadata is not None:
        entries["__metadata__"] = metadata
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    body = content(end, salt) if payload is None else payload
    path.write_bytes(struct.pack("<Q", len(header)) + header + body)
    return path
