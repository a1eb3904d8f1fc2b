"""Rows of a host table, read by EngramEmbedding's own weight loader.

A weight that carries a row source holds zeros here, so that whatever arrives in the
table came from the file.
"""

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_deepseek_v41 import (
    host_table_env,
    run_ranks,
    tensor_bytes,
)

from loadplan.fake import fake_gpu
from sglang.srt.layers.engram import EngramEmbedding
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROWS, DIM = 48, 64


def write_table(folder):
    generator = torch.Generator().manual_seed(1)
    path = Path(folder, "table.safetensors")
    values = torch.randint(256, (ROWS, DIM), generator=generator, dtype=torch.uint8)
    scales = torch.randint(256, (ROWS, 2), generator=generator, dtype=torch.uint8)
    tensors = {
        "weight": values.view(torch.float8_e4m3fn),
        "scale": scales.view(torch.float8_e8m0fnu),
    }
    save_file(tensors, path)
    return path, tensors


def sourced(path, tensors):
    """Zeros in the shape of each tensor, with the file's rows behind them."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    try:
        from sglang.srt.model_loader.loadplan import SafetensorsRowSource, read_header
        from sglang.srt.model_loader.loadplan.read import OpenFile
    except ImportError:
        return weights  # An engine without row sources copies the zeros.
    for header in read_header(str(path)).tensors:
        source = SafetensorsRowSource(OpenFile(str(path)), header)
        weights[header.name].row_source = source
    return weights


def embedding():
    # Four hash columns of unequal length: shards follow them for tp 1, 2 and 4.
    return EngramEmbedding(ROWS, DIM, 1, column_bounds=(0, 10, 24, 35, ROWS))


def load_on_rank(rank, tp_size, folder, failing_rank):
    """Load a table on one rank; its bytes, or how finish_load failed."""
    # A file of its own, as on a node of its own: only one rank's is damaged.
    path, tensors = write_table(tempfile.mkdtemp(dir=folder))
    with fake_gpu():
        table = embedding()
    for name, weight in sourced(path, tensors).items():
        if rank == failing_rank and name == "scale":
            os.truncate(path, 16)
        parameter = getattr(table, name)
        parameter.weight_loader(parameter, weight)
    try:
        table.finish_load(label="layer 1")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = {name: tensor_bytes(getattr(table, name)) for name in tensors}
    return table.row_start, table.rows, found


class TestRowReads(CustomTestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        _, self.tensors = write_table(self.folder)

    def load(self, tp_size, layout, failing_rank=None):
        return run_ranks(
            tp_size,
            load_on_rank,
            self.folder,
            failing_rank,
            env=host_table_env(layout),
        )

    @pytest.mark.feature
    def test_each_rank_reads_its_own_rows_from_the_file(self):
        # Turns red when the weight itself is copied, or other rows are read.
        whole = {name: tensor_bytes(tensor) for name, tensor in self.tensors.items()}
        for layout in ("per_rank", "shared"):
            for tp_size in (1, 2, 4):
                with self.subTest(layout=layout, tp=tp_size):
                    for start, rows, found in self.load(tp_size, layout):
                        for name, content in found.items():
                            row = len(whole[name]) // ROWS
                            expected = whole[name]
                            if layout == "per_rank":
                                expected = expected[start * row : (start + rows) * row]
                            self.assertEqual(content, expected)

    @pytest.mark.feature
    def test_read_that_fails_on_one_rank_is_raised_on_all_before_the_barrier(self):
        # Turns red when the healthy rank waits in finish_load for the broken one.
        for layout in ("per_rank", "shared"):
            with self.subTest(layout=layout):
                try:
                    healthy, broken = self.load(2, layout, failing_rank=1)
                except (RuntimeError, TimeoutError) as error:
                    self.fail(str(error))
                self.assertIn("ShortFileError", str(broken)[:500])
                self.assertIn("rank 1 of 2 failed: ShortFileError", str(healthy)[:500])


class TestOneRank(CustomTestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path, self.tensors = write_table(folder.name)
        for context in (
            get_context().override_server_args(),
            get_parallel().override(tp_size=1, tp_rank=0, tp_group=mock.Mock()),
            mock.patch.dict(os.environ, host_table_env("per_rank")),
            fake_gpu(),
        ):
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

    def load(self, weights):
        table = embedding()
        for name, weight in weights.items():
            parameter = getattr(table, name)
            parameter.weight_loader(parameter, weight)
        table.finish_load(label="layer 1")
        return {name: tensor_bytes(getattr(table, name)) for name in weights}

    @pytest.mark.feature
    def test_page_cache_of_the_rows_is_given_back_once_all_are_read(self):
        # Turns red when cached pages keep huge pages from the table.
        with mock.patch.object(os, "posix_fadvise") as advise:
            self.load(sourced(self.path, self.tensors))
        ranges = sorted(call.args[1:3] for call in advise.call_args_list)
        sizes = sorted(tensor.nbytes for tensor in self.tensors.values())
        self.assertEqual(sorted(nbytes for _, nbytes in ranges), sizes)
        (first, nbytes), (second, rest) = ranges
        end = os.path.getsize(self.path)
        self.assertEqual((first + nbytes, second + rest), (second, end))

    @pytest.mark.feature
    def test_failed_load_does_not_spoil_the_next_one(self):
        # A rollback reads other files; red when it raises the first load's error.
        tables = [embedding(), embedding()]

        def load(path):
            for table in tables:
                for name, weight in sourced(path, self.tensors).items():
                    parameter = getattr(table, name)
                    parameter.weight_loader(parameter, weight)
            for table in tables:
                table.finish_load(label="layer")

        with tempfile.TemporaryDirectory() as folder:
            whole, _ = write_table(folder)
            sources = sourced(self.path, self.tensors)
            os.truncate(self.path, 16)
            with mock.patch(f"{__name__}.sourced", lambda path, tensors: sources):
                with self.assertRaises(EOFError):
                    load(self.path)
            load(whole)
        expected = {n: tensor_bytes(t) for n, t in self.tensors.items()}
        for table in tables:
            found = {name: tensor_bytes(getattr(table, name)) for name in expected}
            self.assertEqual(found, expected)

    @pytest.mark.guard(mutation="every weight is taken for one with a row source")
    def test_weight_without_row_source_is_copied_as_ever(self):
        # Turns red when another load format no longer fills the table.
        expected = {n: tensor_bytes(t) for n, t in self.tensors.items()}
        self.assertEqual(self.load(self.tensors), expected)

    @pytest.mark.guard(mutation="rows are read whatever their dtype")
    def test_weight_of_another_dtype_is_converted_as_ever(self):
        # Turns red when a checkpoint that stores wider values is refused.
        wide = {"weight": torch.ones(ROWS, DIM, dtype=torch.bfloat16)}
        save_file(wide, self.path)
        weights = sourced(self.path, wide)
        weights["weight"].fill_(1)
        ones = torch.ones(ROWS, DIM).to(torch.float8_e4m3fn)
        self.assertEqual(self.load(weights), {"weight": tensor_bytes(ones)})


if __name__ == "__main__":
    unittest.main()
