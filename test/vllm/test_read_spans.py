# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Selected tensors are read in spans, and nothing beside them."""

import os
from unittest import mock

import pytest
from small_vllm_loads import SmallLoads, exact, tensors_of

TABLE = "layers.1.engram.embed.weight"


class TestReadSpans(SmallLoads):
    @pytest.mark.feature
    def test_neighbours_are_one_read_and_the_table_beside_them_is_none(self):
        # Turns red when tensors are read one by one, or what stays on the host too.
        expected = self.write(a=tensors_of("x", "yy", "zzz", TABLE))
        with self.reads() as reads:
            found = self.load(cpu_offload=True)
        assert exact(found) == expected
        assert self.on_device(found) == {"x", "yy", "zzz"}
        assert sum(count for _, count in reads) == 3 * 64
        # A table between two of them parts their reads.
        assert len(reads) <= 2

    @pytest.mark.feature
    def test_unwanted_tensors_are_not_read(self):
        # Turns red when a draft reads its target's tensors of a shared file.
        names = [f"{kind}.{i}" for i in range(3) for kind in ("a_no", "b_mtp")]
        expected = self.write(a=tensors_of(*sorted(names)))
        with self.reads() as reads:
            found = self.load(unused=lambda name: "mtp" not in name)
        assert exact(found) == {n: t for n, t in expected.items() if "mtp" in n}
        assert [count for _, count in reads] == [3 * 64]

    @pytest.mark.feature
    def test_operator_may_do_without_instanttensor(self):
        # Turns red when LOADPLAN_STREAM_READER=read still streams a file.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        with mock.patch.dict(os.environ, LOADPLAN_STREAM_READER="read"):
            found = self.load()
        assert exact(found) == expected
        assert self.on_device(found) == {"x", "yy"}
        assert self.seen.calls == []

    @pytest.mark.guard(mutation="whole files are read by position")
    def test_whole_files_are_not_read_by_position(self):
        # Turns red when InstantTensor loses a file that it can stream.
        self.write(a=tensors_of("x", "yy"))
        with self.reads() as reads:
            self.load()
        assert reads == []
