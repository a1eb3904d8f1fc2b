# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of Engram tables, read by the weight loaders straight into their memory."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_vllm_loads import SmallLoads, raw

from vllm.models.deepseek_v41.common import engram
from vllm.models.qwen4_exp.common.ple import PLEVocabParallelEmbedding

TABLE, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
SHARD = "layers.2.ple.ple_embedding.ngram_embedding.shard_1.weight"
BYTES = torch.arange(64, dtype=torch.uint8).view(16, 4)
DTYPES = {TABLE: torch.float8_e4m3fn, SCALE: torch.float8_e8m0fnu, SHARD: torch.int8}


class TestEngramRows(SmallLoads):
    def weight(self, name, *, rows=True):
        """A table as the loader yields it, or without a way to its rows.

        With one it holds zeros, so that what arrives somewhere came from the file.
        """
        self.write(a={name: BYTES.view(DTYPES[name])})
        weight = self.load(cpu_offload=True)[name]
        found = torch.zeros_like(weight) if rows else weight.clone()
        if rows:
            assert hasattr(weight, "row_source")
            found.row_source = weight.row_source
        return found

    def fill(self, name, **options):
        """Rows 4 to 10 through DeepSeek's loader, and how many bytes were read."""
        dtype = torch.uint8 if name == SCALE else DTYPES[name]
        param = torch.zeros(6, 4, dtype=torch.uint8).view(dtype)
        param.engram_vocab_start = 4
        weight = self.weight(name, **options)
        with self.reads() as reads:
            engram._engram_head_shard_weight_loader(param, weight)
        assert raw(param) == raw(BYTES[4:10].view(dtype))
        return sum(count for _, count in reads)

    @pytest.mark.feature
    @pytest.mark.parametrize("name", [TABLE, SCALE])
    def test_rank_reads_just_its_own_rows(self, name):
        # Turns red when rows are copied from a memory map, or those of others too.
        assert self.fill(name) == 24

    @pytest.mark.guard(mutation="every weight is taken for one with rows")
    def test_weight_without_rows_is_copied_as_ever(self):
        # Turns red when another load format no longer fills the table.
        assert self.fill(TABLE, rows=False) == 0

    @pytest.mark.feature
    def test_rows_of_a_ple_shard_come_from_the_file(self):
        # Turns red when the shard itself is copied, or to another place.
        table = object.__new__(PLEVocabParallelEmbedding)
        torch.nn.Module.__init__(table)
        table.shard_indices = SimpleNamespace(
            org_vocab_start_index=10, org_vocab_end_index=22
        )
        param = torch.zeros(12, 4, dtype=torch.int8)
        with self.reads() as reads:
            table.weight_loader(param, self.weight(SHARD), checkpoint_start=16)
        expected = torch.zeros(12, 4, dtype=torch.int8)
        expected[6:] = BYTES[:6]
        assert raw(param) == raw(expected)
        assert [count for _, count in reads] == [24]

    @pytest.mark.feature
    def test_rows_are_read_into_nothing_that_does_not_fit(self):
        # Turns red when bytes of one dtype land in memory of another.
        source = self.weight(TABLE).row_source
        for target in (torch.zeros(6, 4), torch.zeros(6, 3, dtype=DTYPES[TABLE])):
            with pytest.raises(ValueError, match="expected a contiguous CPU tensor"):
                source.read_rows_into(target, 0)

    @pytest.mark.feature
    def test_leader_that_fails_is_noticed_by_every_rank(self):
        # Turns red when the others wait in a barrier for a leader that is gone.
        storage = object.__new__(engram.DPSharedEngramStorage)
        group = SimpleNamespace(group_name="hosts")
        storage.group = SimpleNamespace(rank_in_group=1, cpu_group=group)

        def gather(answers, said, group):
            answers[:] = [(said[0], "ShortFileError: cut off", None), said]

        self.ranks()
        for name, value in (
            ("all_gather_object", gather),
            ("get_rank", lambda group=None: 1),
            ("barrier", lambda group=None: None),
        ):
            patch = mock.patch.object(torch.distributed, name, value)
            self.stack.enter_context(patch)
        with pytest.raises(ValueError, match="rank 0 of 2 failed: ShortFileError"):
            storage.load_weight(torch.zeros(6, 4), torch.zeros(16, 4))
