"""The headers of opened files, as InstantTensor reads them, for the stub.

Exception types and texts are those that users of the library see. `_019` and `_022` are
the ways of the releases 0.1.9 and 0.2.2.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import threading
from collections.abc import Callable
from typing import Any, Literal

# What is said of a file: its `__metadata__`, its tensors' entries by name, and where in
# the file the first tensor begins.
Header = tuple[Any, dict[str, Any], int]
# A tensor to read: name, header entry, index of the file, offset in that file.
Selected = tuple[str, dict[str, Any], int, int]


def name_matcher(
    patterns: list[str] | None, mode: Literal["exact", "glob", "regex"]
) -> Callable[[str], bool]:
    """Whether a tensor's name is one of ``patterns``; all are without any."""
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


def read_header_022(path: str) -> Header:
    """Refuse what the library refuses; only the LAST listed tensor is checked."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"{path}: {size} B, expected 8 B of header length")
        payload_start = 8 + int.from_bytes(file.read(8), "little")
        if size < payload_start:
            raise ValueError(f"{path}: {size} B, expected {payload_start} B of header")
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


def read_header_019(path: str) -> Header:
    """Believe the file; nothing is compared with its size."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # The library asks for all of `length`; never allocate for a lie.
        text = file.read(min(length, os.fstat(file.fileno()).st_size))
    tensors = json.loads(text.decode("utf-8"))
    return tensors.pop("__metadata__", None), tensors, 8 + length


def read_headers(
    paths: list[str], read_header: Callable[[str], Header]
) -> list[Header | None]:
    """Read each header in its own thread; one that raises there leaves None."""
    results: list[Header | None] = [None] * len(paths)

    def read(index: int, path: str) -> None:
        results[index] = read_header(path)

    threads = [threading.Thread(target=read, args=item) for item in enumerate(paths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def select(
    headers: list[Header | None], keep: Callable[[str], bool]
) -> tuple[Any, list[Selected]]:
    """The last `__metadata__`, and the tensors to read in the order of their bytes."""
    last_metadata, selected = None, []
    for index, header in enumerate(headers):
        # A header that was refused is None here: the TypeError that users see.
        file_metadata, tensors, payload_start = header
        if file_metadata is not None:
            last_metadata = file_metadata
            if file_metadata.get("format", "pt") != "pt":
                raise ValueError("InstantTensor only supports pytorch format for now")
        # Stable: tensors that start at one byte keep the order of the JSON text.
        ordered = sorted(tensors.items(), key=lambda item: item[1]["data_offsets"][0])
        spans = [entry["data_offsets"] for _, entry in ordered]
        if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
            raise ValueError("Safetensors data offsets must be contiguous")
        if not spans:
            # Only 0.1.9 lets a file without tensors come to here, and trips.
            raise IndexError("list index out of range")
        selected += [
            (name, entry, index, payload_start + entry["data_offsets"][0])
            for name, entry in ordered
            if keep(name)
        ]
    return last_metadata, selected
