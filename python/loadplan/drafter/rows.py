"""Captured hidden states on disk: shards of rows and a manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError, TensorHeader
from loadplan.drafter import files, safetensors_file

MANIFEST = "manifest.json"
STATES, TOKENS, NEXT = "hidden_states", "tokens", "next_tokens"
_READ = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
    """A finished capture; ``shards`` are paths with their headers, in order."""

    folder: Path
    manifest: dict[str, Any]
    shards: tuple[tuple[Path, dict[str, TensorHeader]], ...]

    @property
    def rows(self) -> int:
        return self.manifest["rows"]

    @property
    def width(self) -> int:
        return self.manifest["width"]

    def blocks(
        self, begin: int, end: int, *, size: int = _READ
    ) -> Iterator[torch.Tensor]:
        """The hidden states of rows ``[begin, end)``, at most ``size`` at once.

        Raises:
            LoadPlanError: one of them is not finite.
        """
        first = 0
        for path, tensors in self.shards:
            tensor = tensors[STATES]
            count, width = tensor.shape
            stride = (tensor.end - tensor.begin) // count
            low, high = max(begin - first, 0), min(end - first, count)
            for row in range(low, high, size):
                number = min(size, high - row)
                at = tensor.begin + row * stride
                part = tensor._replace(
                    shape=(number, width),
                    begin=at,
                    end=at + number * stride,
                )
                states = safetensors_file.read(path, part)
                if not torch.isfinite(states).all():
                    raise LoadPlanError(
                        f"{path}: rows {row} to {row + number} are not all finite, "
                        "expected a capture as it was written; capture again"
                    )
                yield states
            first += count

    def next_tokens(self) -> torch.Tensor:
        """The token that came after each row, I64 ``[rows]``."""
        parts = [safetensors_file.read(p, held[NEXT]) for p, held in self.shards]
        return torch.cat(parts)


def read_capture(folder: Path) -> Capture:
    """Read manifest and headers.

    Raises:
        LoadPlanError: no capture, or its shards are not those of the manifest.
    """
    manifest = files.read_json(folder / MANIFEST, what="a capture's manifest")
    try:
        named = [(shard["file"], shard["rows"]) for shard in manifest["shards"]]
        rows, width, dtype = manifest["rows"], manifest["width"], manifest["dtype"]
    except (KeyError, TypeError) as error:
        raise LoadPlanError(
            f"{folder / MANIFEST}: {type(error).__name__} {error}, expected a "
            "capture's manifest; capture again"
        ) from error
    shards = []
    for name, count in named:
        path = folder / Path(name).name
        header = safetensors_file.read_header(path)
        tensors = {tensor.name: tensor for tensor in header.tensors}
        expected = {
            STATES: (dtype, (count, width)),
            TOKENS: ("I64", (count,)),
            NEXT: ("I64", (count,)),
        }
        found = {name: (t.dtype, t.shape) for name, t in tensors.items()}
        if found != expected:
            raise LoadPlanError(
                f"{path}: holds {found}, expected {expected} as in {MANIFEST}; "
                "capture again"
            )
        shards.append((path, tensors))
    if rows != sum(count for _, count in named) or not rows:
        raise LoadPlanError(
            f"{folder / MANIFEST}: {rows} rows in all and "
            f"{sum(count for _, count in named)} in its shards, expected the same and "
            "some; capture again"
        )
    return Capture(folder, manifest, tuple(shards))


def split(capture: Capture, held_out: int | None) -> int:
    """The row from which on they are held out: the last ``held_out``, else a fifth.

    Raises:
        LoadPlanError: nothing would be left on one side.
    """
    number = capture.rows // 5 if held_out is None else held_out
    if not 0 < number < capture.rows:
        raise LoadPlanError(
            f"{capture.folder}: {number} of {capture.rows} rows held out, expected "
            "some and not all; capture more rows or change --held-out-rows"
        )
    return capture.rows - number
