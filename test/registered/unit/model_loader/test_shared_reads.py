"""What is read by tensor is read once between the ranks that load together."""

import unittest
from unittest import mock

import pytest
import torch
from small_loads import SmallLoads, raw, tensors_of
from two_ranks import load_group, on_two_ranks

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

PATTERNS = (".table.",)
# Two tensors of this size are too large to be read in one go.
LARGE = 20 << 20


class TestSharedReads(SmallLoads):
    def write_large(self):
        large = {
            name: torch.arange(LARGE // 8).add(start).view(torch.uint8)
            for name, start in (("x", 0), ("yy", 1))
        }
        self.expected = self.write(a=tensors_of("l.table.weight") | large)

    def loads(self, least=1, failing_rank=None):
        """How many bytes each rank read; all have arrived on it."""
        read = self.core("read")
        broadcast = self.core("broadcast")

        def load(rank):
            counts = []

            def counted(file, buffer, offset):
                if rank == failing_rank:
                    raise OSError("the disk is gone")
                counts.append(len(buffer))
                return read_into(file, buffer, offset)

            read_into = read.OpenFile.read_into
            with (
                mock.patch.object(broadcast, "LEAST_SHARED_BYTES", least),
                mock.patch.object(read.OpenFile, "read_into", counted),
            ):
                found = self.load(PATTERNS, load_group=load_group())
                # Not assertEqual: it would print them.
                self.assertTrue({n: raw(t) for n, t in found.items()} == self.expected)
                return sum(counts)

        return on_two_ranks(self, load)

    @pytest.mark.feature
    def test_each_byte_is_read_by_one_rank_and_arrives_on_both(self):
        # Turns red when both ranks read the same bytes, or get each other's places.
        self.write_large()
        for rank in self.loads():
            self.assertEqual(rank.result, LARGE, rank.error)

    @pytest.mark.feature
    def test_little_is_read_by_each_rank_alone(self):
        # Turns red when a few bytes cost an exchange.
        self.write_large()
        for rank in self.loads(least=2 * LARGE + 1):
            self.assertEqual(rank.result, 2 * LARGE, rank.error)

    @pytest.mark.feature
    def test_rank_that_cannot_read_ends_both(self):
        # Turns red when the other rank waits for bytes that never come, or uses others.
        self.write_large()
        healthy, broken = self.loads(failing_rank=1)
        self.assertIn("the disk is gone", str(broken.error))
        self.assertIn("rank 1 of 2", str(healthy.error))

    @pytest.mark.guard(mutation="files that are streamed take part in the exchange")
    def test_whole_files_are_read_by_the_library_as_ever(self):
        # Turns red when InstantTensor, which shares its reads itself, is passed over.
        expected = self.write(a=tensors_of("x"))

        def load(rank):
            self.assert_exact(self.load(load_group=load_group()), expected)
            return self.seen.streamed

        for rank in on_two_ranks(self, load):
            self.assertEqual(rank.result, ["a.safetensors"], rank.error)


if __name__ == "__main__":
    unittest.main()
