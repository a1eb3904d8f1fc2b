# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights under load_format instanttensor: who reads what, and with whom."""

import os
from unittest import mock

import pytest
from small_vllm_loads import SmallLoads, exact, tensors_of

TABLE, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
EXPERTS = [f"layers.0.ffn.experts.{i}.w1.weight" for i in range(2)]


class TestPlannedWeights(SmallLoads):
    @pytest.mark.feature
    def test_table_on_the_cpu_leaves_other_files_collective(self):
        # Turns red when one Engram tensor switches collective reading off.
        group = self.ranks()
        expected = self.write(
            a=tensors_of("x"), b=tensors_of(TABLE, "yy"), c=tensors_of("zzz")
        )
        found = self.load(cpu_offload=True)
        assert exact(found) == expected
        assert self.on_device(found) == {"x", "yy", "zzz"}
        (call,) = self.seen.calls
        assert call.group is group
        assert sorted(self.seen.streamed) == ["a.safetensors", "c.safetensors"]

    @pytest.mark.feature
    def test_expert_filter_leaves_other_files_collective(self):
        # Turns red when ranks with different experts meet in one collective read, or
        # the filter ends it for all files.
        group = self.ranks()
        expected = self.write(a=tensors_of("x"), e=tensors_of(*EXPERTS, "yy"))
        del expected[EXPERTS[1]]
        assert exact(self.load(experts={0})) == expected
        assert [call.group for call in self.seen.calls] == [group]
        assert self.seen.streamed == ["a.safetensors"]

    @pytest.mark.feature
    def test_draft_gets_only_its_own_tensors_of_a_shared_file(self):
        # Turns red when only whole shards are left out.
        expected = self.write(a=tensors_of("mtp.x", "yy"), b=tensors_of("zzz"))
        found = self.load(unused=lambda name: not name.startswith("mtp."))
        assert exact(found) == {"mtp.x": expected["mtp.x"]}
        assert self.on_device(found) == {"mtp.x"}

    @pytest.mark.guard(mutation="tables are yielded before the device's tensors")
    def test_tables_come_last(self):
        # Turns red when two streams of requests compete for one disk.
        self.write(a=tensors_of(TABLE, SCALE), b=tensors_of("x"))
        assert list(self.load(cpu_offload=True))[0] == "x"

    @pytest.mark.guard(mutation="a group of two is not passed on")
    def test_nothing_to_split_is_one_collective_call(self):
        # Turns red when a plain checkpoint loses its collective call.
        group = self.ranks()
        expected = self.write(a=tensors_of("x", *EXPERTS), b=tensors_of(TABLE))
        assert exact(self.load()) == expected
        (call,) = self.seen.calls
        assert (call.group, len(call.files)) == (group, 2)

    @pytest.mark.guard(mutation="the switch is not asked")
    def test_switch_gives_the_release_back(self):
        # Turns red when LOADPLAN_DISABLE=1 still splits the work.
        expected = self.write(a=tensors_of("x"), b=tensors_of(TABLE, *EXPERTS))
        del expected[EXPERTS[1]]
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"):
            found = self.load(cpu_offload=True, experts={0})
        assert exact(found) == expected
        assert len(self.seen.streamed) == 2
