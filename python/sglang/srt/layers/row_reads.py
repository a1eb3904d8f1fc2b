# SPDX-License-Identifier: Apache-2.0

"""Rows of a host table, read from the checkpoint straight into their memory."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from sglang.srt.model_loader.loadplan import SafetensorsRowSource, together

_Read = Tuple[SafetensorsRowSource, int, int, Optional[Exception]]


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
        """Fill `target`; False where only a copy of the weight will do."""
        source = getattr(loaded_weight, "row_source", None)
        if source is None or target.device.type != "cpu":
            return False
        if target.dtype != source.dtype:
            return False  # A copy converts.
        error = None
        try:
            source.read_rows_into(target, row_start)
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
