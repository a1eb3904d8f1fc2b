"""Selected tensors are read in spans, and nothing beside them."""

import os
import unittest
from unittest import mock

import pytest
from small_tokenspeed_loads import SmallLoads, tensors_of


class TestReadSpans(SmallLoads):
    @pytest.mark.feature
    def test_neighbours_are_one_read_and_the_table_beside_them_is_none(self):
        # Turns red when tensors are read one by one, or what stays on the host too.
        expected = self.write(a=tensors_of("x", "yy", "zzz", "l.table.weight"))
        with self.reads() as reads:
            found = self.load(patterns=(".table.",))
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"x", "yy", "zzz"})
        self.assertEqual(sum(count for _, count in reads), 3 * 64)
        # A table between two of them parts their reads.
        self.assertLessEqual(len(reads), 2)

    @pytest.mark.feature
    def test_unwanted_tensors_are_not_read(self):
        # Turns red when a draft reads its target's tensors of a shared file.
        names = [f"{kind}.{i}" for i in range(3) for kind in ("a_no", "b_mtp")]
        expected = self.write(a=tensors_of(*sorted(names)))
        with self.reads() as reads:
            found = self.load(wanted=lambda name: "mtp" in name)
        self.assert_exact(found, {n: t for n, t in expected.items() if "mtp" in n})
        self.assertEqual([count for _, count in reads], [3 * 64])

    @pytest.mark.feature
    def test_operator_may_do_without_instanttensor(self):
        # Turns red when LOADPLAN_STREAM_READER=read still streams a file.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        with mock.patch.dict(os.environ, LOADPLAN_STREAM_READER="read"):
            found = self.load()
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"x", "yy"})
        self.assertEqual(self.seen.calls, [])

    @pytest.mark.guard(mutation="whole files are read by position")
    def test_whole_files_are_not_read_by_position(self):
        # Turns red when InstantTensor loses a file that it can stream.
        self.write(a=tensors_of("x", "yy"))
        with self.reads() as reads:
            self.load()
        self.assertEqual(reads, [])


if __name__ == "__main__":
    unittest.main()
