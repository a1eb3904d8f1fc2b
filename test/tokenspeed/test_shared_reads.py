"""Two ranks read what InstantTensor does not once between them.

The ranks are forks of this process, which has imported the engine and no device.
"""

import multiprocessing
import unittest

import pytest
import torch
from small_tokenspeed_loads import SmallLoads

NBYTES = 20 << 20
NAMES = ["x", "yy", "zzz", "zzzz"]


def tensor_of(name):
    return torch.full((NBYTES,), len(name), dtype=torch.uint8)


class TestSharedReads(SmallLoads):
    def on_rank(self, rank, pipe):
        torch.set_num_threads(1)
        dist = torch.distributed
        rendezvous = f"file://{self.folder}/rendezvous"
        dist.init_process_group("gloo", rendezvous, rank=rank, world_size=2)
        paths = [str(self.folder / f"{stem}.safetensors") for stem in "ab"]
        header = self.module("loadplan.header")
        loading = self.module("loadplan.loading")
        broadcast = self.module("loadplan.broadcast")
        broadcast.LEAST_SHARED_BYTES = self.least
        # Each rank has the files in an order of its own.
        headers = header.read_headers(paths[::-1] if rank else paths)
        plan = loading.decide_routes(headers, reader="read")
        group = dist.group.WORLD
        with self.reads() as reads:
            found = dict(
                loading.run_load(
                    plan,
                    stream_files=None,
                    device=torch.device("cuda", 0),
                    group=group,
                    device_group=group,
                )
            )
        expected = {name: tensor_of(name) for name in NAMES}
        whole = found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in NAMES
        )
        pipe.send((whole, sum(count for _, count in reads)))
        # A peer may still be in the last exchange.
        pipe.poll(60)

    def read_by_ranks(self):
        """How many bytes each rank read of what all got whole."""
        self.module("loadplan.broadcast")
        self.write(
            **{
                "a": {name: tensor_of(name) for name in NAMES[:2]},
                "b": {name: tensor_of(name) for name in NAMES[2:]},
            }
        )
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=self.on_rank, args=(i, end), daemon=True)
            for i, (_, end) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        try:
            self.assertTrue(all(pipe.poll(60) for pipe, _ in pipes), "a rank is silent")
            results = [pipe.recv() for pipe, _ in pipes]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        self.assertEqual([whole for whole, _ in results], [True, True])
        return [count for _, count in results]

    @pytest.mark.feature
    def test_each_byte_is_read_once_between_the_ranks(self):
        # Turns red when every rank reads all, or one of them reads for both.
        self.least = 0
        read = self.read_by_ranks()
        self.assertEqual(sum(read), len(NAMES) * NBYTES)
        self.assertGreaterEqual(min(read), NBYTES)

    @pytest.mark.feature
    def test_little_is_read_by_each_rank_alone(self):
        # Turns red when a few bytes cost an exchange of all ranks.
        self.least = len(NAMES) * NBYTES + 1
        self.assertEqual(self.read_by_ranks(), [len(NAMES) * NBYTES] * 2)


if __name__ == "__main__":
    unittest.main()
