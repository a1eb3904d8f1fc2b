"""Engram tables, filled by their own load_sharded from rows of the files."""

import os
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_tokenspeed_loads import SmallLoads, raw

from tokenspeed.runtime.models.deepseek_v41_engram import RowShardedEngramEmbedding

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROWS, BEGIN, END = 17, 4, 11
BYTES = torch.arange(4 * ROWS, dtype=torch.uint8).view(ROWS, 4)


def table_of(begin, end, layout="sharded"):
    """A host table of some rows, without the layers around."""
    table = object.__new__(RowShardedEngramEmbedding)
    torch.nn.Module.__init__(table)
    table.host_table, table.host_layout = True, layout
    table.num_embeddings, table.row_start, table.row_end = ROWS, begin, end
    table._shared_writer = True
    for field, dtype in (("weight", FP8), ("scale", torch.uint8)):
        empty = torch.zeros(end - begin, 4, dtype=torch.uint8).view(dtype)
        setattr(table, field, torch.nn.Parameter(empty, requires_grad=False))
    return table


class TestTableRows(SmallLoads):
    def setUp(self):
        super().setUp()
        scale = BYTES.clone().view(E8M0)
        self.write(a={"weight": BYTES.view(FP8), "scale": scale})
        self.path = str(self.folder / "a.safetensors")

    @pytest.mark.feature
    def test_host_tensor_of_a_load_carries_its_rows(self):
        # Turns red when a weight loader can only copy from a memory map.
        weight = self.load(patterns=("weight",))["weight"]
        source = getattr(weight, "row_source", None)
        self.assertIsNotNone(source)
        rows = torch.zeros(3, 4, dtype=torch.uint8).view(FP8)
        source.read_rows_into(rows, 5)
        self.assertEqual(raw(rows), raw(BYTES[5:8].view(FP8)))

    def fill(self, table):
        """Fill a table as the model does; what was read, and given back."""
        given_back, fadvise = [], os.posix_fadvise

        def advised(fd, offset, nbytes, advice):
            given_back.append((offset, nbytes))
            fadvise(fd, offset, nbytes, advice)

        reads = self.module("table_rows").TableReads(SimpleNamespace())
        advising = mock.patch.object(os, "posix_fadvise", advised)
        with self.reads() as found, advising:
            for field in ("weight", "scale"):
                reads.load(table, field, self.path, field)
            reads.finish()
        return found, sorted(given_back)

    @pytest.mark.feature
    def test_rank_reads_just_its_own_rows_into_the_table(self):
        # Turns red when rows pass through another buffer, or those of others too.
        table = table_of(BEGIN, END)
        with mock.patch.object(RowShardedEngramEmbedding, "_copy_rows") as copied:
            found, given_back = self.fill(table)
        self.assertEqual(copied.call_count, 0)
        self.assertEqual(raw(table.weight), raw(BYTES[BEGIN:END].view(FP8)))
        self.assertEqual(raw(table.scale), raw(BYTES[BEGIN:END]))
        self.assertEqual([count for _, count in found], [4 * (END - BEGIN)] * 2)
        # Cached pages would keep huge pages from the tables.
        self.assertEqual(given_back, found)

    @pytest.mark.feature
    def test_ranks_of_a_node_split_the_rows_of_a_shared_table(self):
        # Turns red when one rank fills the table alone, or rows are left out.
        table = table_of(0, ROWS, "shared")
        rows = self.module("table_rows").TableRows
        for place, size in ((0, 8), (1, 9)):
            with self.reads() as found:
                source = rows(self.path, "weight", share=(place, 2))
                table.load_sharded("weight", source, 1)
            self.assertEqual([count for _, count in found], [4 * size])
        self.assertEqual(raw(table.weight), raw(BYTES.view(FP8)))

    @pytest.mark.feature
    def test_failure_waits_until_all_ranks_hear_of_it(self):
        # Turns red when a rank leaves before the barrier that the others wait in.
        reads = self.module("table_rows").TableReads(SimpleNamespace())
        reads.load(table_of(BEGIN, END), "weight", self.path, "missing")
        with self.assertRaisesRegex(ValueError, "no tensor 'missing'"):
            reads.finish()

    @pytest.mark.guard(mutation="every slice is taken for rows of a file")
    def test_slice_of_safetensors_is_copied_as_ever(self):
        # Turns red when a caller of before no longer fills a table.
        table = table_of(BEGIN, END)

        class Slice:
            def get_shape(self):
                return [ROWS, 4]

            def __getitem__(self, index):
                return BYTES.view(FP8)[index]

        with self.reads() as found:
            table.load_sharded("weight", Slice(), 3)
        self.assertEqual(raw(table.weight), raw(BYTES[BEGIN:END].view(FP8)))
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
