# SPDX-License-Identifier: Apache-2.0

"""Rows of a host table, read from the checkpoint straight into their memory."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch

from sglang.srt.model_loader.loadplan import SafetensorsRowSource, together


class RowReads:
    """The row reads of one table on one rank, from its weight loaders to finish_load.

    A failure waits for `finish`, which raises it on every rank: a rank that stopped
    earlier would leave the others in the barrier of finish_load.
    """

    def __init__(self, parallel: Any):
        self._parallel = parallel
        self._done: List[Tuple[SafetensorsRowSource, int, int]] = []
        self._error: Optional[Exception] = None

    def read(
        self, target: torch.Tensor, loaded_weight: torch.Tensor, row_start: int
    ) -> bool:
        """Fill `target`; False where only a copy of the weight will do."""
        source = getattr(loaded_weight, "row_source", None)
        if source is None or target.device.type != "cpu":
            return False
        if target.dtype != source.dtype:
            return False  # A copy converts.
        # Weight loaders run in threads: an append is all that they share.
        self._done.append((source, row_start, target.shape[0]))
        try:
            source.read_rows_into(target, row_start)
        except Exception as error:
            self._error = error
        return True

    def finish(self) -> None:
        """Raise a failure of any rank, then give back the page cache of what was read."""
        if not self._done:
            return
        done, self._done = self._done, []
        error, self._error = self._error, None

        def result() -> None:
            if error is not None:
                raise error

        alone = self._parallel.tp_size == 1
        together(None if alone else self._parallel.tp_group.cpu_group, result)
        # Cached checkpoint pages would keep huge pages from the table.
        for source, row_start, rows in done:
            source.drop_cached(row_start, rows)
