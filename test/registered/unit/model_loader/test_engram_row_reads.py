"""Rows of a host table, read by EngramEmbedding's own weight loader.

A weight that carries a row source holds zeros here, so that whatever arrives in the
table came from the file.
"""

import ctypes
import os
import tempfile
import unittest
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_deepseek_v41 import (
    host_table_env,
    run_ranks,
    tensor_bytes,
)

from loadplan.standin.gpu import DEFAULT_FREE_MEMORY, fake_gpu
from loadplan.standin.mapped import mapped_bytes
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers import engram
from sglang.srt.layers.engram import EngramEmbedding
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_context, get_parallel, override_platform
from sglang.srt.utils import cuda_vmm_utils
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

ROWS, DIM = 48, 64
PREFIX, PARTS = "layers.1.engram.embed.", ("weight", "scale")


def write_table(folder, prefix=""):
    generator = torch.Generator().manual_seed(1)
    path = Path(folder, "table.safetensors")
    values = torch.randint(256, (ROWS, DIM), generator=generator, dtype=torch.uint8)
    scales = torch.randint(256, (ROWS, 2), generator=generator, dtype=torch.uint8)
    tensors = {
        "weight": values.view(torch.float8_e4m3fn),
        "scale": scales.view(torch.float8_e8m0fnu),
    }
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, path)
    return path, tensors


def sourced(path, tensors):
    """Zeros in the shape of each tensor, with the file's rows behind them."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    try:
        from sglang.srt.model_loader.loadplan.header import read_header
        from sglang.srt.model_loader.loadplan.read import OpenFile, SafetensorsRowSource
    except ImportError:
        return weights  # An engine without row sources copies the zeros.
    file = read_header(str(path))
    for tensor in file.tensors:
        source = SafetensorsRowSource(OpenFile(file), tensor)
        weights[tensor.name].row_source = source
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


class _PeerMemory:
    """Ordinary memory in the place of a reservation of device memory."""

    def __init__(self, size, *args, **kwargs):
        self._memory = ctypes.create_string_buffer(size)
        self.base = ctypes.addressof(self._memory)

    def map(self, *args, **kwargs):
        return None


def peer_memory(pointer, nbytes, *, device_id):
    return torch.frombuffer(
        (ctypes.c_char * nbytes).from_address(pointer), dtype=torch.uint8
    )


@contextmanager
def fake_peer_shards():
    """Let peer shards take ordinary memory that no peer maps."""
    with (
        override_platform(is_cuda=True),
        mock.patch.multiple(
            cuda_vmm_utils,
            VmmReservation=_PeerMemory,
            make_device_allocation_prop=lambda device: None,
            get_device_granularity=lambda device: 1,
            tensor_from_pointer=peer_memory,
        ),
        mock.patch.object(engram._PeerShards, "connect", lambda *args: None),
    ):
        yield


def stream_on_rank(rank, tp_size, folder, free_memory):
    """Load a table by --load-format instanttensor on one rank."""
    read = []
    preadv = os.preadv

    def counted(fd, buffers, offset):
        read.append(preadv(fd, buffers, offset))
        return read[-1]

    with (
        fake_gpu(free_memory=free_memory) as journal,
        fake_peer_shards(),
        mock.patch.object(os, "preadv", counted),
    ):
        table = embedding()
        source = DefaultModelLoader.Source(folder, None)
        declared = (".engram.embed.",) if table.host_table is not None else None
        source.host_resident_weight_patterns = declared
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        weights = dict(loader._get_weights_iterator(source))
        for name, weight in weights.items():
            parameter = getattr(table, name.removeprefix(PREFIX))
            parameter.weight_loader(parameter, weight)
        table.finish_load(label="layer 1")
    return SimpleNamespace(
        rows=(table.row_start, table.rows),
        peer=table.peer is not None,
        on_device=[name for name, t in weights.items() if journal.on_device(t)],
        mapped=mapped_bytes(folder),
        read=sum(read),
        content={name: tensor_bytes(getattr(table, name)) for name in PARTS},
    )


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


class TestWholeWay(CustomTestCase):
    """From the checkpoint through the released loader into the table."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        _, tensors = write_table(self.folder, PREFIX)
        self.whole = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}

    def load(self, free_memory=DEFAULT_FREE_MEMORY, **environment):
        arguments = {"weight_loader_disable_mmap": True}
        try:
            return run_ranks(
                2,
                stream_on_rank,
                self.folder,
                free_memory,
                env=environment,
                server_args=arguments,
            )
        except RuntimeError as error:
            self.fail(str(error))

    def assert_own_rows(self, rank):
        start, rows = rank.rows
        for name, whole in self.whole.items():
            row = len(whole) // ROWS
            expected = whole[start * row : (start + rows) * row]
            self.assertEqual(rank.content[name], expected)

    @pytest.mark.feature
    def test_table_without_room_on_the_device_comes_there_row_by_row(self):
        # The weight is larger than half of the free memory, the scale is not; red when
        # a rank reads other rows than its own, or uses the mapped file.
        for peer in ("0", "1"):
            with self.subTest(peer=peer):
                ranks = self.load(4096, SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS=peer)
                for rank in ranks:
                    self.assertEqual(rank.on_device, [PREFIX + "scale"])
                    self.assertEqual(rank.peer, peer == "1")
                    self.assert_own_rows(rank)
                    scales = len(self.whole["scale"])
                    self.assertEqual(rank.read, rank.rows[1] * DIM + scales)
                    self.assertEqual(rank.mapped, {"table.safetensors": 0})

    @pytest.mark.feature
    def test_host_table_without_mmap_is_read_and_not_copied(self):
        # Turns red when --weight-loader-disable-mmap costs each rank the whole table.
        for rank in self.load(**host_table_env("per_rank")):
            self.assertEqual(rank.on_device, [])
            self.assert_own_rows(rank)
            self.assertEqual(rank.read, rank.rows[1] * (DIM + DIM // 32))
            self.assertEqual(rank.mapped, {"table.safetensors": 0})


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

    @pytest.mark.feature
    def test_rows_of_another_dtype_are_converted_part_by_part(self):
        # Turns red when wider values are refused, or a part lands at another's rows.
        try:
            from sglang.srt.layers import row_reads
        except ImportError as error:
            self.fail(str(error))
        values = torch.arange(ROWS, dtype=torch.bfloat16).repeat(DIM, 1).t()
        wide = {"weight": values.contiguous()}
        save_file(wide, self.path)
        expected = {"weight": tensor_bytes(values.to(torch.float8_e4m3fn))}
        for nbytes in (row_reads._BUFFER_BYTES, 7 * 2 * DIM, 1):
            with mock.patch.object(row_reads, "_BUFFER_BYTES", nbytes):
                self.assertEqual(self.load(sourced(self.path, wide)), expected)

    @pytest.mark.feature
    def test_rows_for_a_device_go_through_host_memory(self):
        # A row source fills host memory only; red when it is given a device's.
        table = embedding()
        on_device = torch.empty_like(table.weight, device="meta")
        weight = sourced(self.path, self.tensors)["weight"]
        with mock.patch.object(os, "preadv", side_effect=os.preadv) as preadv:
            table.weight.weight_loader(torch.nn.Parameter(on_device, False), weight)
            table.finish_load(label="layer 1")
        self.assertEqual(preadv.call_count, 1)

    @pytest.mark.feature
    def test_table_of_another_width_is_refused_in_finish_load(self):
        # Copied, a scale of one value a row would be spread over all; red when it is.
        for target in (torch.float8_e8m0fnu, torch.bfloat16):
            narrow = {"scale": self.tensors["scale"][:, :1].contiguous()}
            save_file(narrow, self.path)
            table = embedding()
            table.scale.data = table.scale.data.to(target)
            message = ""
            try:
                table.scale.weight_loader(
                    table.scale, sourced(self.path, narrow)["scale"]
                )
                table.finish_load(label="layer 1")
            except ValueError as error:
                message = str(error)
            self.assertIn("rows of 'scale' cannot be read", message)


if __name__ == "__main__":
    unittest.main()
