"""Engram tables, filled by the model's own load_sharded from rows of the files."""

import os
import shutil
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_tokenspeed_v41 import (
    is_table,
    load,
    mapping_of,
    run_ranks,
    target,
    tiny_checkpoint,
    tiny_gpu,
)

from tokenspeed.runtime.models.deepseek_v41_engram import RowShardedEngramEmbedding
from tokenspeed.runtime.utils.env import global_server_args_dict

ALONE = mapping_of(0, 1)
TABLES = "model-engram-1.safetensors"


class Reads:
    """Which bytes of which file were read by position, and given back."""

    def __enter__(self):
        self.read, self.given_back = Counter(), Counter()
        preadv, fadvise = os.preadv, os.posix_fadvise

        def counted(fd, buffers, offset, *flags):
            count = preadv(fd, buffers, offset, *flags)
            self.read[self.name(fd)] += count
            return count

        def advised(fd, offset, nbytes, advice):
            self.given_back[self.name(fd)] += nbytes
            fadvise(fd, offset, nbytes, advice)

        self.patches = [
            mock.patch.object(os, "preadv", counted),
            mock.patch.object(os, "posix_fadvise", advised),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *exc_info):
        for patch in self.patches:
            patch.stop()

    @staticmethod
    def name(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))


def tables_of(parameters):
    return {
        name.removeprefix("model."): content
        for name, content in parameters.items()
        if is_table(name)
    }


def rows_of(content, begin, end, rows):
    width = len(content) // rows
    return content[begin * width : end * width]


def load_tables(rank, world_size, folders, layout, shared, env):
    """Load on one rank: its rows, its tables, bytes read; or how the load failed."""
    mapping = mapping_of(rank, world_size)
    arguments = mock.patch.dict(global_server_args_dict, engram_host_table_dir=shared)
    environment = mock.patch.dict(os.environ, {k: v(rank) for k, v in env.items()})
    with tiny_gpu(), Reads() as reads, arguments, environment:
        model = target(mapping, layout)
        try:
            tables = tables_of(load(model, folders[rank]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    table = model.model.layers[1].engram.embed
    return (table.row_start, table.row_end), tables, reads.read[TABLES]


def local_rank(rank):
    return str(rank)


def two(rank):
    return "2"


class TestEngramTables(unittest.TestCase):
    """Needs no GPU."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "checkpoint")
        os.mkdir(self.folder)
        self.shared = os.path.join(folder.name, "shared")
        os.mkdir(self.shared)
        self.content = tiny_checkpoint(self.folder, tables_alone=True, draft_alone=True)
        self.tables = {n: c for n, c in self.content.items() if is_table(n)}
        self.first = [n for n in self.tables if n.startswith("layers.1.")]
        self.rows = len(self.tables["layers.1.engram.embed.scale"]) // 2

    def load(self, layout):
        with tiny_gpu():
            return tables_of(load(target(ALONE, layout), self.folder))

    def load_ranks(self, layout, env=None, folders=None, timeout=60.0):
        folders = folders or [self.folder] * 2
        arguments = (folders, layout, self.shared, env or {})
        try:
            return run_ranks(2, load_tables, *arguments, timeout=timeout)
        except (RuntimeError, TimeoutError) as error:
            self.fail(str(error))

    @pytest.mark.feature
    def test_host_tables_are_read_into_their_memory_and_not_copied(self):
        # Turns red when rows pass through another buffer, one thread at a time.
        for layout in ("shared", "sharded"):
            with self.subTest(layout=layout), Reads() as reads:
                copy = mock.patch.object(RowShardedEngramEmbedding, "_copy_rows")
                with copy as copied:
                    self.load(layout)
                self.assertEqual(copied.call_count, 0)
                size = sum(len(self.tables[name]) for name in self.first)
                self.assertEqual(reads.read[TABLES], size)
                self.assertEqual(self.load(layout), self.tables)

    @pytest.mark.feature
    def test_page_cache_of_host_tables_is_given_back(self):
        # Turns red when cached pages keep huge pages from the tables.
        with Reads() as reads:
            self.load("sharded")
        size = sum(len(self.tables[name]) for name in self.first)
        self.assertEqual(reads.given_back[TABLES], size)

    @pytest.mark.feature
    def test_scales_that_are_stored_as_bytes_are_read_too(self):
        # Turns red when only one spelling of the scales' dtype is read by rows.
        path = Path(self.folder, TABLES)
        tensors = load_file(path)
        name = "layers.1.engram.embed.scale"
        save_file(tensors | {name: tensors[name].view(torch.uint8)}, path)
        copy = mock.patch.object(RowShardedEngramEmbedding, "_copy_rows")
        with copy as copied:
            self.load("sharded")
        self.assertEqual(copied.call_count, 0)
        self.assertEqual(self.load("sharded"), self.tables)

    @pytest.mark.feature
    def test_ranks_of_a_node_split_the_rows_of_a_shared_table(self):
        # Turns red when one rank fills the table alone, or rows are left out.
        size = sum(len(self.tables[name]) for name in self.first)
        for env in ({}, {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": two}):
            with self.subTest(env=[*env]):
                results = self.load_ranks("shared", env)
                read = [nbytes for _, _, nbytes in results]
                self.assertEqual(sum(read), size)
                # A table has an odd number of rows, of 66 bytes each.
                self.assertEqual(abs(read[0] - read[1]), 66)
                for _, tables, _ in results:
                    self.assertEqual(tables, self.tables)

    @pytest.mark.feature
    def test_each_rank_reads_its_own_rows_of_a_sharded_table(self):
        # Turns red when a rank reads what another one serves.
        for (begin, end), tables, read in self.load_ranks("sharded"):
            expected = 0
            for name in self.first:
                own = rows_of(self.tables[name], begin, end, self.rows)
                self.assertEqual(tables[name][: len(own)], own)
                expected += len(own)
            self.assertEqual(read, expected)

    @pytest.mark.guard(mutation="ranks share rows by a number that nobody told")
    def test_writer_fills_a_shared_table_alone_where_nobody_tells_the_ranks(self):
        # Turns red when rows are missing under a launcher that sets LOCAL_RANK only.
        for _, tables, _ in self.load_ranks("shared", {"LOCAL_RANK": local_rank}):
            self.assertEqual(tables, self.tables)

    @pytest.mark.feature
    def test_failed_read_is_raised_on_all_ranks_before_the_barrier(self):
        # Turns red when a healthy rank waits for the broken one.
        broken = f"{self.folder}-of-rank-1"
        shutil.copytree(self.folder, broken)
        os.truncate(Path(broken, TABLES), 4096)
        for layout in ("shared", "sharded"):
            with self.subTest(layout=layout):
                folders = [self.folder, broken]
                results = self.load_ranks(layout, folders=folders, timeout=30.0)
                healthy, failed = map(str, results)
                self.assertIn("rank 1 of 2 failed", healthy)
                self.assertIn(TABLES, failed)

    @pytest.mark.guard(mutation="tables on the device are taken for host tables")
    def test_tables_on_the_device_are_copied_in_bounded_chunks(self):
        # Turns red when a table on the device is filled as host memory.
        real = RowShardedEngramEmbedding._copy_rows
        copy = mock.patch.object(
            RowShardedEngramEmbedding, "_copy_rows", autospec=True, side_effect=real
        )
        with copy as copied:
            self.assertEqual(self.load("gpu"), self.tables)
        self.assertEqual(copied.call_count, len(self.tables))

    @pytest.mark.guard(mutation="rows are read although LOADPLAN_DISABLE is set")
    def test_way_back_copies_as_the_release_does(self):
        # Turns red when LOADPLAN_DISABLE=1 still reads rows.
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"), Reads() as reads:
            self.assertEqual(self.load("sharded"), self.tables)
        self.assertEqual(reads.read, Counter())

    @pytest.mark.guard(mutation="rows are read whatever their dtype and shape")
    def test_table_that_does_not_fit_is_refused_as_ever(self):
        # Turns red when a wrong table is loaded, or refused in other words.
        path = Path(self.folder, TABLES)
        tensors = load_file(path)
        weight, scale = self.first
        if not weight.endswith("weight"):
            weight, scale = scale, weight
        for name, tensor, error, message in (
            (weight, tensors[weight].float(), TypeError, "must stay FP8 E4M3"),
            (scale, tensors[scale].float(), TypeError, "must be E8M0 or raw uint8"),
            (weight, tensors[weight][1:].clone(), ValueError, "shape does not match"),
        ):
            save_file(tensors | {name: tensor}, path)
            for layout in ("shared", "sharded", "gpu"):
                with self.subTest(message=message, layout=layout):
                    with self.assertRaisesRegex(error, message):
                        self.load(layout)


if __name__ == "__main__":
    unittest.main()
