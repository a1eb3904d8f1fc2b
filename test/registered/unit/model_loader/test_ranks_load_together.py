"""Several ranks load one DeepSeek-V4.1: each byte once, and what fails on one on all.

The released model and loader in a process per rank, over gloo; InstantTensor's stub
shares its reads between the ranks as the library does, and misses a rank that stays
away.
"""

import os
import shutil
import tempfile
import unittest
from pathlib import Path

import pytest
from ranks_in_trouble import (
    load_rank_of_folder,
)
from tiny_deepseek_v41 import (
    host_table_env,
    load_rank,
    run_ranks,
    tiny_checkpoint,
    tiny_config,
)

from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=120, suite="base-a-test-cpu")


class TestRanksLoadTogether(CustomTestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def folders(self, tp_size, **options):
        """The checkpoint of each rank, as if on a node of its own."""
        first = Path(self.folder, "rank0")
        first.mkdir()
        self.config = tiny_config()
        self.content = tiny_checkpoint(str(first), self.config, **options)
        paths = [Path(self.folder, f"rank{rank}") for rank in range(tp_size)]
        for path in paths[1:]:
            shutil.copytree(first, path)
        return paths

    def load(self, tp_size, failing_rank=None, model=DeepseekV4ForCausalLM, **options):
        options = {"env": host_table_env("per_rank"), **options}
        try:
            return run_ranks(
                tp_size,
                load_rank_of_folder,
                self.folder,
                self.config,
                model,
                failing_rank,
                **options,
            )
        except (RuntimeError, TimeoutError) as error:
            self.fail(str(error))

    @pytest.mark.guard(mutation="the plan gets no group to read with")
    def test_all_ranks_together_read_each_byte_once(self):
        # Turns red when ranks read what another one reads too, or get other bytes.
        for tp_size, own_files in ((2, True), (4, False)):
            with self.subTest(tp=tp_size, own=own_files):
                paths = self.folders(tp_size, tables_in_own_files=own_files)
                ranks = self.load(tp_size)
                self.assertEqual([rank.error for rank in ranks], [None] * tp_size)
                plain = run_ranks(
                    tp_size,
                    load_rank,
                    str(paths[0]),
                    self.config,
                    DeepseekV4ForCausalLM,
                    "safetensors",
                    env=host_table_env("per_rank"),
                )
                for rank, expected in zip(ranks, plain, strict=True):
                    self.assertEqual(rank.digests, expected.digests)
                wanted = sum(map(len, self.content.values()))
                read = sum(rank.bytes_read for rank in ranks)
                self.assertLessEqual(read, 1.02 * wanted)
                shutil.rmtree(self.folder)
                os.mkdir(self.folder)

    @pytest.mark.feature
    def test_all_ranks_of_a_draft_together_read_only_its_bytes_once(self):
        # Turns red when a rank reads the target's weights, or each rank all of the draft.
        self.folders(2)
        for rank in (ranks := self.load(2, model=DeepseekV4ForCausalLMDSpark)):
            self.assertIsNone(rank.error)
        wanted, total = ranks[0].bytes_got, sum(map(len, self.content.values()))
        self.assertLess(wanted, total / 2)
        self.assertLessEqual(sum(rank.bytes_read for rank in ranks), 1.02 * wanted)

    def assert_all_fail(self, ranks, text):
        for number, rank in enumerate(ranks):
            self.assertIn(text, str(rank.error), f"rank {number}")

    @pytest.mark.feature
    def test_rank_that_cannot_read_a_header_ends_all(self):
        # Turns red when the healthy ranks wait for the broken one.
        broken = min(self.folders(2)[1].glob("*.safetensors"))
        os.truncate(broken, 100)
        ranks = self.load(2, group_timeout=20)
        self.assert_all_fail(ranks, broken.name)
        self.assertIn("rank 1 of 2 failed: LoadPlanError", ranks[0].error)

    @pytest.mark.feature
    def test_ranks_with_other_files_end_before_the_first_collective_read(self):
        # One node has another release of a shard; red when the ranks mix their bytes.
        shards = self.folders(4)[1].glob("*.safetensors")
        content = {shard: shard.read_bytes() for shard in shards}
        shard = min(s for s, text in content.items() if b'"F8_E8M0"' in text)
        shard.write_bytes(content[shard].replace(b'"F8_E8M0"', b'"U8"     ', 1))
        self.assert_all_fail(self.load(4), "rank 1 would load something else")

    @pytest.mark.guard(mutation="a plan that is given up waits for the other ranks")
    def test_consumer_that_raises_ends_its_rank_and_the_group_ends_the_others(self):
        # Turns red when the first cause is hidden, or the others wait for ever.
        self.folders(2)
        healthy, broken = self.load(2, failing_rank=1, group_timeout=20)
        self.assertIn("KeyError: 'a name that the model", broken.error)
        self.assertIn("timed out", str(healthy.error).lower())


if __name__ == "__main__":
    unittest.main()
