# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of Engram tables, read by the released weight loaders into their storage.

A weight that carries a row source may hold zeros here, so that whatever arrives in the
table came from the file.
"""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_vllm_checkpoints import (
    SCALE,
    TABLE,
    counted_reads,
    raw,
    run_ranks,
    tensor_of,
    weights_of,
    write_checkpoint,
)

from loadplan.standin.gpu import fake_gpu
from vllm.distributed import parallel_state
from vllm.models.deepseek_v41.common.engram import (
    DPSharedEngramStorage,
    ParallelEngramEmbedding,
)
from vllm.models.qwen4_exp.common.ple import PLEVocabParallelEmbedding

ROWS, DIM = tensor_of(TABLE).shape
# Four hash heads of unequal length, two for each of two ranks.
HEADS = (10, 14, 11, 29)
SHARDS = [(0, 24), (24, 64)]


def forget(mapping, pointer):
    """Instead of taking back a registration that a fake device made."""


@contextlib.contextmanager
def device():
    """A device whose memory is the host's: pinned is what anybody asks about."""
    empty = torch.empty

    def pageable(*size, pin_memory=False, **options):
        return empty(*size, **options)

    properties = SimpleNamespace(multi_processor_count=1)
    with (
        fake_gpu(engine="vllm") as journal,
        mock.patch.object(torch, "empty", pageable),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor: True),
        mock.patch.object(
            torch.cuda, "get_device_properties", lambda device: properties
        ),
        mock.patch.object(torch.accelerator, "current_device_index", lambda: 0),
        # Tables may be collected when this device is gone.
        mock.patch.object(DPSharedEngramStorage, "_unregister", staticmethod(forget)),
    ):
        yield journal


def alone():
    """The groups of a rank that has the table to itself."""
    one = SimpleNamespace(world_size=1, rank_in_group=0)
    return mock.patch.object(parallel_state, "_TP", one)


def embedding(storage):
    return ParallelEngramEmbedding(
        ROWS,
        DIM,
        HEADS,
        cpu_offload=True,
        use_thp=storage == "huge pages",
        dp_shared_memory=storage == "shared memory",
    )


def fill(table, weights):
    for name, parameter in (
        (TABLE, table.weight),
        (SCALE, table.weight_scale_inv),
    ):
        parameter.weight_loader(parameter, weights[name])


def held(table):
    return {
        TABLE: raw(table.weight),
        SCALE: raw(table.weight_scale_inv.view(torch.float8_e8m0fnu)),
    }


def rows_of(start, end):
    return {name: raw(tensor_of(name)[start:end]) for name in (TABLE, SCALE)}


def sourced(folder):
    """Zeros in the shape of each tensor, with the file's rows behind them."""
    weights = {}
    for name, weight in weights_of(folder, cpu_offload=True).items():
        weights[name] = torch.zeros_like(weight)
        if hasattr(weight, "row_source"):
            weights[name].row_source = weight.row_source
    return weights


def table_of_rank(rank, ranks, folder, storage):
    """What a rank of a tensor-parallel or of a sharing group holds, and what it read.

    A target of ``run_ranks``.
    """
    world = parallel_state.get_world_group()
    one = SimpleNamespace(world_size=1, rank_in_group=0)
    shared = storage == "shared memory"
    with (
        device(),
        mock.patch.object(parallel_state, "_TP", one if shared else world),
        mock.patch.object(parallel_state, "_ENGRAM_DP", world if shared else None),
    ):
        table = embedding(storage)
        weights = weights_of(folder, cpu_offload=True)
        with counted_reads() as reads:
            fill(table, weights)
        return held(table), sum(count for _, count in reads)


def failure_of_rank(rank, ranks, folder):
    """How a shared table's load fails on a rank whose leader's file is too short."""
    world = parallel_state.get_world_group()
    one = SimpleNamespace(world_size=1, rank_in_group=0)
    # A folder of its own, as on a node of its own: only the leader's is damaged.
    own = Path(folder, str(rank))
    write_checkpoint(own, a=[TABLE, SCALE])
    with (
        device(),
        mock.patch.object(parallel_state, "_TP", one),
        mock.patch.object(parallel_state, "_ENGRAM_DP", world),
    ):
        table = embedding("shared memory")
        weights = sourced(own)
        if rank == 0:
            os.truncate(own / "a.safetensors", 16)
        try:
            fill(table, weights)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def two_ranks(target, *args):
    message = ""
    try:
        return run_ranks(2, target, *args)
    except (RuntimeError, TimeoutError) as error:
        message = str(error)
    pytest.fail(message[-2000:])


class TestDeepseekV41:
    @pytest.mark.feature
    @pytest.mark.parametrize("storage", ["pinned", "huge pages"])
    def test_each_rank_reads_just_its_rows_into_its_table(self, tmp_path, storage):
        """Red when a rank reads, maps or copies rows of another rank."""
        write_checkpoint(tmp_path, a=[TABLE, SCALE])
        found = two_ranks(table_of_rank, str(tmp_path), storage)
        for (start, end), (tables, read) in zip(SHARDS, found, strict=True):
            assert tables == rows_of(start, end)
            assert read == sum(len(content) for _, _, content in tables.values())

    @pytest.mark.feature
    def test_leader_reads_a_shared_table_for_all(self, tmp_path):
        """Red when a shared table is read twice, or left to a copy."""
        write_checkpoint(tmp_path, a=[TABLE, SCALE])
        found = two_ranks(table_of_rank, str(tmp_path), "shared memory")
        whole = rows_of(0, ROWS)
        assert [tables for tables, _ in found] == [whole, whole]
        size = sum(len(content) for _, _, content in whole.values())
        assert [read for _, read in found] == [size, 0]

    @pytest.mark.feature
    def test_leaders_failed_read_is_raised_on_every_rank(self, tmp_path):
        """Red when the other ranks wait in the barrier for a leader that is gone."""
        leader, other = two_ranks(failure_of_rank, str(tmp_path))
        assert "ShortFileError" in leader
        assert "rank 0 of 2 failed: ShortFileError" in other

    @pytest.mark.feature
    def test_rows_come_from_the_file(self, tmp_path):
        """Red when the weight itself is copied, which maps the whole table."""
        write_checkpoint(tmp_path, a=[TABLE, SCALE])
        with device(), alone():
            table = embedding("huge pages")
            fill(table, sourced(tmp_path))
        assert held(table) == rows_of(0, ROWS)

    @pytest.mark.guard(mutation="every weight is taken for one with a row source")
    @pytest.mark.parametrize("storage", ["pinned", "huge pages"])
    def test_weight_without_row_source_is_copied_as_ever(self, storage):
        """Red when another load format no longer fills the table."""
        with device(), alone():
            table = embedding(storage)
            fill(table, {name: tensor_of(name) for name in (TABLE, SCALE)})
        assert held(table) == rows_of(0, ROWS)

    @pytest.mark.guard(mutation="rows are read whatever their dtype")
    def test_weight_of_another_dtype_is_converted_as_ever(self, tmp_path):
        """Red when a checkpoint that stores wider values is refused."""
        wide = torch.full((ROWS, DIM), 2.0, dtype=torch.bfloat16)
        save_file({TABLE: wide}, tmp_path / "a.safetensors", {"format": "pt"})
        with device(), alone():
            table = embedding("pinned")
            (weight,) = weights_of(tmp_path, cpu_offload=True).values()
            table.weight.weight_loader(table.weight, weight)
        assert held(table)[TABLE] == raw(wide.to(torch.float8_e4m3fn))


def ple_embedding(start, end):
    """Qwen4Exp's table of one rank's vocabulary range, without the layers around."""
    made = object.__new__(PLEVocabParallelEmbedding)
    torch.nn.Module.__init__(made)
    made.shard_indices = SimpleNamespace(
        org_vocab_start_index=start, org_vocab_end_index=end
    )
    return made


SHARD = "model.layers.2.ple.ple_embedding.ngram_embedding.shard_1.weight"


class TestQwen4Exp:
    """Checkpoint shard 1 holds rows 8 to 16 of the table."""

    def load(self, weight, parameter):
        table = ple_embedding(5, 11)
        table.weight_loader(parameter, weight, checkpoint_start=8)

    @pytest.mark.feature
    def test_rows_of_a_checkpoint_shard_come_from_the_file(self, tmp_path):
        """Red when the shard itself is copied, or to another place."""
        write_checkpoint(tmp_path, a=[SHARD])
        parameter = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16))
        with device(), counted_reads() as reads:
            self.load(sourced(tmp_path)[SHARD], parameter)
        expected = torch.zeros(6, 8, dtype=torch.bfloat16)
        expected[3:] = tensor_of(SHARD)[:3]
        assert raw(parameter) == raw(expected)
        assert sum(count for _, count in reads) == expected[3:].nbytes

    @pytest.mark.guard(mutation="every weight is taken for one with a row source")
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_other_weights_are_copied_and_converted_as_ever(self, tmp_path, dtype):
        """Red when another load format, or dtype, no longer fills the table."""
        weight = torch.arange(64.0).reshape(8, 8).to(torch.bfloat16)
        save_file({SHARD: weight}, tmp_path / "a.safetensors", {"format": "pt"})
        expected = torch.zeros(6, 8, dtype=dtype)
        expected[3:] = weight[:3]
        for load_format in ("safetensors", "instanttensor"):
            parameter = torch.nn.Parameter(torch.zeros(6, 8, dtype=dtype))
            weights = weights_of(tmp_path, cpu_offload=True, load_format=load_format)
            with device():
                self.load(weights[SHARD], parameter)
            assert raw(parameter) == raw(expected)
