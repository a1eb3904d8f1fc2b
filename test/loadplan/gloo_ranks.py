"""Ranks over gloo, each a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def _rank_main(
    rank: int, ranks: int, folder: Path, target: Callable[[int], object], results
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    try:
        outcome = ("result", target(rank))
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    results.put((rank, outcome))
    dist.barrier()


def on_ranks(
    tmp_path: Path,
    target: Callable[[int], object],
    *,
    ranks: int = 2,
    patience: float = 60,
    missing: tuple[int, ...] = (),
) -> list[tuple[str, object] | None]:
    """Run ``target(rank)`` in a process each; what each returned or raised.

    All must be done in ``patience`` seconds; nothing is heard of the ``missing``.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(
            target=_rank_main, args=(rank, ranks, tmp_path, target, results)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        heard = ranks - len(missing)
        found = dict(results.get(timeout=patience) for _ in range(heard))
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found.get(rank) for rank in range(ranks)]
