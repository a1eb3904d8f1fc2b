# SPDX-License-Identifier: Apache-2.0

"""Rows of a host table, read from the checkpoint straight into their memory."""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Tuple

import torch

from sglang.srt.model_loader.loadplan.ranks import together
from sglang.srt.model_loader.loadplan.read import SafetensorsRowSource

_Read = Tuple[SafetensorsRowSource, int, int, Optional[Exception]]

# For rows on their way to a device. Weight loaders run in threads: two tables have four.
_BUFFER_BYTES = 32 << 20


class RowReads:
    """The row reads of one table on one rank, from its weight loaders to finish_load.

    A failure waits for `finish`, which raises it on every rank: a rank that stopped
    earlier would leave the others in the barrier of finish_load.
    """

    def __init__(self, parallel: Any):
        self._parallel = parallel
        # By address of the rows: a load that starts anew replaces what one that never
        # came to its end left behind.
        self._reads: Dict[int, _Read] = {}

    def read(
        self, target: torch.Tensor, loaded_weight: torch.Tensor, row_start: int
    ) -> bool:
        """Fill `target` with rows of the file; False if the weight has no row source."""
        source = getattr(loaded_weight, "row_source", None)
        if source is None:
            return False
        error = None
        try:
            _fill(target, source, row_start)
        except Exception as e:
            error = e
        self._reads[target.data_ptr()] = (source, row_start, target.shape[0], error)
        return True

    def finish(self) -> None:
        """Raise a failure of any rank, then give back the page cache of what was read."""
        if not self._reads:
            return
        reads, self._reads = list(self._reads.values()), {}

        def result() -> None:
            for _, _, _, error in reads:
                if error is not None:
                    raise error

        alone = self._parallel.tp_size == 1
        group = None if alone else self._parallel.tp_group.cpu_group
        together(group, "the rows of a host table", result)
        # Cached checkpoint pages would keep huge pages from the table.
        for source, row_start, rows, _ in reads:
            source.drop_cached(row_start, rows)


def _fill(target: torch.Tensor, source: SafetensorsRowSource, row_start: int) -> None:
    if target.device.type == "cpu" and target.dtype == source.dtype:
        source.read_rows_into(target, row_start)
        return
    # Through a buffer, not through `loaded_weight`: that maps the file.
    row_bytes = source.dtype.itemsize * math.prod(target.shape[1:])
    step = max(1, _BUFFER_BYTES // max(1, row_bytes))
    buffer = torch.empty(
        (min(step, target.shape[0]), *target.shape[1:]),
        dtype=source.dtype,
        device="cpu",
    )
    for part in target.split(step):
        rows = buffer[: part.shape[0]]
        source.read_rows_into(rows, row_start)
        part.copy_(rows)
        row_start += part.shape[0]
