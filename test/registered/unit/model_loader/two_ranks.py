"""Two ranks over gloo, each a process of its own, for tests of loading together."""

import multiprocessing
import os
import queue
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist

from sglang.srt.distributed.parallel_state import GroupCoordinator


def load_group():
    """The group of both ranks, as a LoadConfig takes it."""
    group = object.__new__(GroupCoordinator)
    members = {"cpu_group": dist.group.WORLD, "device_group": dist.group.WORLD}
    vars(group).update(world_size=2, rank_in_group=dist.get_rank(), **members)
    return group


def _main(rank, meet, work, results):
    torch.set_num_threads(1)  # The parent's other threads are not in a fork.
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    try:
        outcome = SimpleNamespace(result=work(rank), error=None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        outcome = SimpleNamespace(result=None, error=text)
    results.put((rank, outcome))
    results.close()
    results.join_thread()
    # The other rank may still be in a collective that needs this process.
    dist.barrier()
    os._exit(0)


def on_two_ranks(test, work, patience=60):
    """Run `work(rank)` in two forks of `test`; what each returned or how it ended.

    A rank that says nothing for `patience` seconds fails the test.
    """
    context = multiprocessing.get_context("fork")
    results, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        processes = [
            context.Process(target=_main, args=(rank, meet, work, results))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        try:
            while len(found) < 2:
                rank, outcome = results.get(timeout=patience)
                found[rank] = outcome
        except queue.Empty:
            test.fail(f"only {sorted(found)} of 2 ranks came to an end: {found}")
        finally:
            for process in processes:
                process.join(5 if len(found) == 2 else 0)
                process.kill()
                process.join()
    return [found[rank] for rank in range(2)]
