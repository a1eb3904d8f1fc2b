# SPDX-License-Identifier: Apache-2.0

"""Is there room for the host tables? Asked before the first of them is built."""

from __future__ import annotations

import socket
from typing import Sequence, Tuple

from sglang.srt.layers.engram_config import resolve_engram_tables
from sglang.srt.model_loader.loadplan.header import LoadPlanError
from sglang.srt.model_loader.loadplan.host_memory import available_memory
from sglang.srt.model_loader.loadplan.ranks import together
from sglang.srt.model_loader.loadplan.stream import flag
from sglang.srt.runtime_context import get_parallel


def check_host_tables(
    num_embeddings: Sequence[int], row_bytes: int, hash_index: int
) -> None:
    """Refuse on every rank what would be killed while the tables are filled.

    Called by each Engram layer with the rows of all layers' tables. Collective over the
    TP group: no rank takes memory before all have looked.
    """
    host_layout = resolve_engram_tables().host_layout
    # Some virtual machines show memory only when it is used.
    skipped = flag("LOADPLAN_SKIP_HOST_MEMORY_CHECK")
    if host_layout is None or skipped or flag("LOADPLAN_DISABLE"):
        return
    parallel = get_parallel()
    if parallel.pp_size > 1:
        # A stage may build only some of the layers, so each looks for itself.
        num_embeddings = [num_embeddings[hash_index]]
    elif hash_index > 0:
        return
    node = socket.gethostname()

    def look() -> Tuple[str, int, int]:
        # Shards follow hash columns, so that their rows differ by a few.
        rows = sum(-(-total // parallel.tp_size) for total in num_embeddings)
        return node, rows * row_bytes, available_memory()

    group = None if parallel.tp_size == 1 else parallel.tp_group.cpu_group
    seen = together(group, "room for the host tables", look)
    for name in sorted({name for name, _, _ in seen}):
        # A shared table is one for the whole group, which lies on one node.
        need = sum(nbytes for other, nbytes, _ in seen if other == name)
        have = min(free for other, _, free in seen if other == name)
        if need > have:
            raise LoadPlanError(
                f"DeepSeek-V4.1 Engram tables: the host layout {host_layout} needs "
                f"{need / 2**30:.2f} GiB of host memory on {name!r} and "
                f"{have / 2**30:.2f} GiB can be had there, expected room for all; "
                "raise the container's memory limit, end what else runs there, use "
                'more nodes, or --engram-config \'{"placement": "gpu"}\'; '
                "LOADPLAN_SKIP_HOST_MEMORY_CHECK=1 where memory grows as it is used"
            )
