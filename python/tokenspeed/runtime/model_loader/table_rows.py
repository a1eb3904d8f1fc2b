# Copyright (c) 2026 LightSeek Foundation
#
# Permission is hereby granted, free of charge, to any person obtaining a copy
# of this software and associated documentation files (the "Software"), to deal
# in the Software without restriction, including without limitation the rights
# to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
# copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in
# all copies or substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
# IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
# FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
# AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
# LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
# OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
# SOFTWARE.


"""Rows of a host table, read from the checkpoint straight into their memory."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from tokenspeed.runtime.distributed import Mapping
from tokenspeed.runtime.model_loader.loadplan.header import LoadPlanError, read_header
from tokenspeed.runtime.model_loader.loadplan.ranks import together
from tokenspeed.runtime.model_loader.loadplan.read import OpenFile, SafetensorsRowSource
from tokenspeed.runtime.model_loader.planned_weights import host_group, is_disabled
from tokenspeed.runtime.utils import get_colorful_logger

if TYPE_CHECKING:
    from tokenspeed.runtime.models.deepseek_v41_engram import (
        RowShardedEngramEmbedding,
    )

logger = get_colorful_logger(__name__)

# Host memory that a table on the device passes through; enough for 4 reads at once.
_TRANSIENT_BYTES = 64 << 20

# The release's own chunk.
_UNPLANNED_ROWS = 65536


class TableReads:
    """What one rank reads into the Engram tables of a model.

    A failure waits for ``finish``, which raises it on every rank: a rank that stopped
    earlier would leave the others in the barrier behind the tables.
    """

    def __init__(self, mapping: Mapping) -> None:
        world = None
        if torch.distributed.is_initialized():
            world = torch.distributed.group.WORLD
        self._group = host_group(world)
        self._share = (0, 1) if self._group is None else _share_of_node(mapping)
        self._tables: list[TableRows] = []
        self._error: Exception | None = None

    def load(
        self, table: RowShardedEngramEmbedding, field: str, path: str, name: str
    ) -> None:
        """Load ``field`` of ``table`` from tensor ``name`` of the file ``path``."""
        if is_disabled():
            with safe_open(path, framework="pt", device="cpu") as file:
                table.load_sharded(field, file.get_slice(name), _UNPLANNED_ROWS)
            return
        try:
            rows = TableRows(path, name, share=self._share)
            table.load_sharded(field, rows, rows.chunk_rows)
            self._tables.append(rows)
        except Exception as error:
            self._error = self._error or error

    def finish(self) -> None:
        """Raise a failure of any rank, then give back the page cache it filled."""
        if is_disabled():
            return

        def result() -> None:
            if self._error is not None:
                raise self._error

        together(self._group, "the rows of the Engram tables", result)
        # Cached checkpoint pages would keep huge pages from the tables.
        nbytes = sum(rows.drop_cached() for rows in self._tables)
        if nbytes:
            logger.info(f"loadplan: read {nbytes / 2**30:.2f} GiB into host tables.")


class TableRows:
    """Rows of one checkpoint table, in the form of a safetensors ``get_slice()``."""

    def __init__(self, path: str, name: str, *, share: tuple[int, int]) -> None:
        """Open tensor ``name`` of the safetensors file ``path``.

        ``share`` is this rank's place among those that fill a table in shared memory
        together, and how many they are.
        """
        header = read_header(path)
        tensors = {tensor.name: tensor for tensor in header.tensors}
        if name not in tensors or tensors[name].torch_dtype is None:
            raise LoadPlanError(
                f"{path}: no tensor {name!r} that torch can load, but the index "
                "promises an Engram table here; download index and shards again"
            )
        self._source = SafetensorsRowSource(OpenFile(header), tensors[name])
        self._share = share
        self._filled = range(0)
        values = math.prod(self._source.shape[1:])
        self._row_bytes = values * self._source.dtype.itemsize
        self.chunk_rows = _TRANSIENT_BYTES // max(self._row_bytes, 1)

    def get_shape(self) -> list[int]:
        return list(self._source.shape)

    def __getitem__(self, index: tuple[slice, slice]) -> torch.Tensor:
        start, stop, _ = index[0].indices(self.get_shape()[0])
        shape = (stop - start, *self.get_shape()[1:])
        rows = torch.empty(shape, dtype=self._source.dtype, device="cpu")
        self._source.read_rows_into(rows, start)
        return rows

    def fill(self, table: RowShardedEngramEmbedding, field: str) -> bool:
        """Read this rank's rows into a host table; False where only a copy will do."""
        target = getattr(table, field).data
        if not table.host_table or target.device.type != "cpu":
            return False
        if self.get_shape() != [table.num_embeddings, target.shape[1]]:
            return False  # A copy refuses it.
        if field == "scale" and self._source.dtype == torch.float8_e8m0fnu:
            target = target.view(torch.float8_e8m0fnu)
        if target.dtype != self._source.dtype:
            return False
        rows = range(table.row_start, table.row_end)
        if table.host_layout == "shared":
            place, ranks = self._share
            rows = rows[len(rows) * place // ranks : len(rows) * (place + 1) // ranks]
        self._source.read_rows_into(
            target[rows.start - table.row_start : rows.stop - table.row_start],
            rows.start,
        )
        self._filled = rows
        return True

    def drop_cached(self) -> int:
        """Give back the page cache of what ``fill`` read; its size in bytes."""
        self._source.drop_cached(self._filled.start, len(self._filled))
        return len(self._filled) * self._row_bytes


def _share_of_node(mapping: Mapping) -> tuple[int, int]:
    """This rank's place among those that share its node's memory, and how many."""
    # As the engine picks the writer of a shared table. Without the number of ranks the
    # first of them fills it alone, as in the release.
    place = os.environ.get("LOCAL_RANK")
    if place is None:
        return mapping.local_rank, mapping.nprocs_per_node
    return int(place), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
