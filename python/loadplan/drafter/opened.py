"""A variant whose files are read when a check needs them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import checkpoint, draft, files, head, quantize, samples, scheme


class Failed(LoadPlanError):
    """A check did not hold."""


class Variant:
    """A variant and what it was made from; everything is read when it is needed."""

    def __init__(self, folder: Path, source: Path | None) -> None:
        self.folder = folder
        self.source_folder = source

    @functools.cached_property
    def checkpoint(self) -> checkpoint.Checkpoint:
        return checkpoint.read_checkpoint(self.folder)

    @functools.cached_property
    def source(self) -> checkpoint.Checkpoint:
        assert self.source_folder is not None
        return checkpoint.read_checkpoint(self.source_folder)

    @functools.cached_property
    def record(self) -> dict[str, Any] | None:
        path = self.folder / checkpoint.RECORD
        return files.read_json(path, what="a record") if path.exists() else None

    @functools.cached_property
    def head(self) -> head.Head:
        name = None if self.record is None else self.record.get("head")
        return head.find_head(self.checkpoint, name)

    @functools.cached_property
    def quantization(self) -> dict[str, Any] | None:
        return scheme.quantization_config(self.checkpoint.config)

    @functools.cached_property
    def scheme(self) -> scheme.Scheme:
        found = scheme.of_head(self.quantization, self.head.name)
        if found is None:
            raise Failed(
                f"config.json leaves {self.head.name!r} unquantised, expected a group"
            )
        return found

    @functools.cached_property
    def drafts(self) -> list[str]:
        return draft.draft_files(self.checkpoint)

    @functools.cached_property
    def draft(self) -> quantize.QuantizedHead:
        return quantize.read(self.folder / draft.HEAD_FILE)

    @functools.cached_property
    def float_head(self) -> torch.Tensor:
        where = head.find_head(self.source, self.head.name)
        return head.read_float_head(self.source, where)[0]

    @property
    def has_no_draft(self) -> bool:
        """Whether the variant was made without a draft's head."""
        return self.record is not None and self.record.get("draft") is None

    def read_head(self, name: str, rows: tuple[int, int] | None) -> torch.Tensor:
        """Rows ``[begin, end)`` of a tensor of the head, or all of it."""
        tensor = self.head.tensors[name]
        shard = self.folder / self.checkpoint.weight_map[tensor.name]
        return samples.read_rows(shard, tensor, rows)
