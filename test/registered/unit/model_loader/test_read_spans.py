"""What shares its file with host tensors is read in few reads, and nothing else is."""

import os
import struct
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from small_loads import SmallLoads, raw, tensors_of

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

PATTERNS = (".table.",)


class TestReadSpans(SmallLoads):
    def load_counted(self, patterns=PATTERNS, reader=None):
        """What arrives, and which bytes of the payload of `a` positioned reads took."""
        with open(Path(self.folder, "a.safetensors"), "rb") as file:
            payload = 8 + struct.unpack("<Q", file.read(8))[0]
        reads, preadv = [], os.preadv

        def counted(fd, buffers, offset, *flags):
            nbytes = preadv(fd, buffers, offset, *flags)
            if offset >= payload:
                reads.append((offset - payload, nbytes))
            return nbytes

        variables = {} if reader is None else {"LOADPLAN_STREAM_READER": reader}
        with (
            mock.patch.object(os, "preadv", counted),
            mock.patch.dict(os.environ, variables),
        ):
            return self.load(patterns), sorted(reads)

    @pytest.mark.feature
    def test_neighbours_are_one_read_and_host_tensors_none(self):
        # Turns red when each tensor costs a read, or the table's bytes are read too.
        expected = self.write(a=tensors_of("l.table.weight", "x", "yy", "zzz"))
        found, reads = self.load_counted()
        self.assert_exact(found, expected)
        self.assertEqual(reads, [(64, 3 * 64)])
        on_device = [name for name, t in found.items() if self.seen.on_device(t)]
        self.assertEqual(on_device, ["x", "yy", "zzz"])

    @pytest.mark.feature
    def test_gap_above_a_hundredth_is_not_read(self):
        # Turns red when unwanted bytes between two tensors are read for fewer reads.
        expected = self.write(a=tensors_of("k", "l.table.weight", "x"))
        found, reads = self.load_counted()
        self.assert_exact(found, expected)
        self.assertEqual(reads, [(0, 64), (128, 64)])

    @pytest.mark.feature
    def test_tensor_of_many_pieces_is_exact(self):
        # Turns red when what several threads read is put together wrong.
        large = torch.arange(2 << 20).view(torch.uint8)
        tensors = tensors_of("l.table.weight", "yy") | {"x": large}
        expected = self.write(a=tensors, b=tensors_of("w"))
        found, reads = self.load_counted()
        # Not assertEqual: it would print them.
        self.assertTrue({n: raw(t) for n, t in found.items()} == expected)
        self.assertEqual(sum(nbytes for _, nbytes in reads), large.nbytes + 64)
        self.assertGreater(len(reads), 1)

    @pytest.mark.feature
    def test_whole_files_are_read_that_way_where_the_operator_says_so(self):
        # Turns red when LOADPLAN_STREAM_READER=read still calls InstantTensor.
        expected = self.write(a=tensors_of("x", "yy"))
        found, reads = self.load_counted(None, reader="read")
        self.assert_exact(found, expected)
        self.assertEqual((self.seen.calls, reads), ([], [(0, 128)]))
        self.assertTrue(all(map(self.seen.on_device, found.values())))

    @pytest.mark.guard(mutation="whole files are read by tensor by default")
    def test_whole_files_are_streamed_by_default(self):
        # Turns red when InstantTensor is passed over without being asked.
        expected = self.write(a=tensors_of("x", "yy"))
        found, reads = self.load_counted(None)
        self.assert_exact(found, expected)
        self.assertEqual((self.seen.streamed, reads), (["a.safetensors"], []))


if __name__ == "__main__":
    unittest.main()
