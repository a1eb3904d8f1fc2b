"""Rows of a host tensor, read from the checkpoint straight into their memory."""

import os
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from small_loads import SmallLoads

from sglang.srt.layers.engram import EngramEmbedding
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

PATTERNS = (".engram.embed.",)
PREFIX = "layers.1.engram.embed."
ROWS, DIM = 24, 64


def some_bytes(rows, columns):
    values = torch.arange(rows * columns).remainder(251).to(torch.uint8)
    return values.view(rows, columns)


class TestHostRowReads(SmallLoads):
    def setUp(self):
        super().setUp()
        self.values = some_bytes(ROWS, DIM)
        weight = self.values.view(torch.float8_e4m3fn)
        scale = self.values[:, :2].contiguous().view(torch.float8_e8m0fnu)
        self.write(table={PREFIX + "weight": weight, PREFIX + "scale": scale})

    def table(self, rank=0, tp_size=1):
        sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), tp_size)
        with get_parallel().override(tp_rank=rank, tp_group=None, **sizes):
            return EngramEmbedding(ROWS, DIM, 1, column_bounds=(0, 10, ROWS))

    def fill(self, table):
        """Give the table both weights of the checkpoint; how many bytes were read."""
        weights, read, preadv = self.load(PATTERNS), [], os.preadv

        def counted(*args):
            read.append(preadv(*args))
            return read[-1]

        with mock.patch.object(os, "preadv", counted):
            for part in ("weight", "scale"):
                parameter = getattr(table, part)
                parameter.weight_loader(parameter, weights[PREFIX + part])
        return sum(read)

    def source(self):
        source = getattr(self.load(PATTERNS)[PREFIX + "weight"], "row_source", None)
        self.assertIsNotNone(source)
        return source

    @pytest.mark.feature
    def test_host_tensor_reads_just_the_rows_that_are_asked_for(self):
        # Turns red when other rows arrive, or a byte beside them is touched.
        target = torch.full((9, DIM), 255, dtype=torch.uint8)
        self.source().read_rows_into(target[2:7].view(torch.float8_e4m3fn), 4)
        expected = torch.full((9, DIM), 255, dtype=torch.uint8)
        expected[2:7] = self.values[4:9]
        self.assertEqual(bytes(target.numpy()), bytes(expected.numpy()))

    @pytest.mark.feature
    def test_memory_that_does_not_fit_is_refused(self):
        # Turns red when bytes of one dtype are taken for another's, or rows for more.
        source = self.source()
        for target, row in (
            (torch.empty(2, DIM, dtype=torch.uint8), 0),
            (torch.empty(2, DIM - 1, dtype=torch.float8_e4m3fn), 0),
            (torch.empty(2, DIM, dtype=torch.float8_e4m3fn), ROWS - 1),
        ):
            with self.assertRaises(ValueError):
                source.read_rows_into(target, row)

    @pytest.mark.feature
    def test_each_rank_reads_its_own_rows_of_a_table(self):
        # Turns red when a rank reads the rows of others, or uses the mapped file.
        for rank, rows in ((0, slice(0, 10)), (1, slice(10, ROWS))):
            table = self.table(rank, tp_size=2)
            nbytes = self.fill(table)
            own = self.values[rows]
            found = bytes(table.weight.data.view(torch.uint8).numpy())
            self.assertEqual(found, bytes(own.numpy()))
            found = bytes(table.scale.data.view(torch.uint8).numpy())
            self.assertEqual(found, bytes(own[:, :2].contiguous().numpy()))
            self.assertEqual(nbytes, own.nbytes + 2 * len(own))

    @pytest.mark.feature
    def test_read_that_fails_is_raised_when_the_load_is_finished(self):
        # Turns red when a rank leaves the others in finish_load, or hides the failure.
        table = self.table()
        weight = torch.zeros(ROWS, DIM, dtype=torch.float8_e4m3fn)
        weight.row_source = self.source()
        os.truncate(Path(self.folder, "table.safetensors"), 16)
        table.weight.weight_loader(table.weight, weight)
        with self.assertRaises(EOFError):
            table.finish_load(label="layer 1")

    @pytest.mark.guard(mutation="every weight is taken for one with a row source")
    def test_weight_without_a_row_source_is_copied_as_ever(self):
        # Turns red when another load format no longer fills the table.
        table = self.table()
        table.weight.weight_loader(table.weight, self.values.view(torch.float8_e4m3fn))
        table.finish_load(label="layer 1")
        found = bytes(table.weight.data.view(torch.uint8).numpy())
        self.assertEqual(found, bytes(self.values.numpy()))


if __name__ == "__main__":
    unittest.main()
