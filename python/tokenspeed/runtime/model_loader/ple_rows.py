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


"""Rows of an offloaded PLE table, read from the checkpoint straight into its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenspeed.runtime.configs.qwen4_exp_config import Qwen4ExpTextConfig


def ple_table_patterns(config: Qwen4ExpTextConfig) -> tuple[str, ...]:
    """What the checkpoint names of n-gram tables that stay in host memory contain."""
    if not config.ple_offload_embedding:
        return ()
    return (".ngram_embedding.shard_", ".ngram_embedding.weight")


def read_ple_rows(
    target: torch.Tensor, loaded_weight: torch.Tensor, row_start: int
) -> bool:
    """Fill ``target`` with the rows of a host-resident weight from ``row_start`` on.

    Returns False where only a copy will do: the weight has no rows to read, holds
    another dtype, or the table is on the device.
    """
    source = getattr(loaded_weight, "row_source", None)
    if source is None or target.device.type != "cpu" or target.dtype != source.dtype:
        return False
    source.read_rows_into(target, row_start)
    # Cached checkpoint pages would only repeat what the table holds.
    source.drop_cached(row_start, target.shape[0])
    return True
