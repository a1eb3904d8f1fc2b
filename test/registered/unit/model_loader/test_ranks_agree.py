"""Ranks that load together agree on one plan, and fail together."""

import importlib.util
import shutil
import sys
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from small_loads import SmallLoads, raw, tensors_of
from two_ranks import load_group, on_two_ranks

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

GLUE = "sglang.srt.model_loader.planned_weights"


class TestRanksAgree(SmallLoads):
    def setUp(self):
        super().setUp()
        self.first = self.folder
        # As on a node of its own: what happens to one folder the other does not see.
        self.second = str(Path(self.folder, "other"))

    def copy(self):
        shutil.copytree(self.first, self.second)
        return Path(self.second, "a.safetensors")

    def loads(self, free_memory=(80 << 30, 80 << 30), patterns=None, lacking=None):
        def load(rank):
            self.folder = (self.first, self.second)[rank]
            self.seen = self.gpu(free_memory=free_memory[rank])
            if rank == lacking:
                sys.modules["instanttensor"] = None
            found = self.load(patterns, load_group=load_group())
            on_device = [name for name, t in found.items() if self.seen.on_device(t)]
            return {name: raw(t) for name, t in found.items()}, on_device

        return on_two_ranks(self, load)

    def assert_errors(self, ranks, *texts):
        for rank, text in zip(ranks, texts, strict=True):
            self.assertIn(text, str(rank.error))

    @pytest.mark.feature
    def test_ranks_that_see_other_checkpoints_stop_before_they_read(self):
        # Turns red when ranks mix the bytes of two checkpoints, or wait for each other.
        self.write(a=tensors_of("x"))
        path = self.copy()
        path.write_bytes(path.read_bytes().replace(b'"U8"', b'"I8"'))
        text = "rank 1 would load something else than rank 0: shard 'a.safetensors'"
        self.assert_errors(self.loads(), text, text)

    @pytest.mark.feature
    def test_rank_that_cannot_read_a_header_ends_both(self):
        # Turns red when the healthy rank goes on alone.
        self.write(a=tensors_of("x"))
        self.copy().write_bytes(b"")
        self.assert_errors(self.loads(), "rank 1 of 2 failed: ", "a.safetensors")

    @pytest.mark.feature
    def test_rank_without_the_library_ends_both(self):
        # Turns red when it raises by itself and leaves the other one waiting.
        self.write(a=tensors_of("x"))
        self.copy()
        text = "InstantTensor cannot be imported"
        self.assert_errors(self.loads(lacking=1), f"LoadPlanError: {text}", text)

    @pytest.mark.feature
    def test_least_room_of_all_devices_counts(self):
        # Turns red when a rank with more memory takes another route.
        expected = self.write(a=tensors_of("x"), b={"yy": tensors_of("x")["x"].tile(4)})
        self.copy()
        for rank in self.loads(free_memory=(80 << 30, 256)):
            self.assertEqual(rank.result, (expected, ["x"]), rank.error)

    @pytest.mark.feature
    def test_failure_of_one_rank_is_raised_on_both(self):
        # Turns red when a step that failed on one rank is taken for done on the other.
        ranks = self.core("ranks")

        def step(rank):
            return ranks.together(dist.group.WORLD, "a step", lambda: 1 // (1 - rank))

        told = "LoadPlanError: rank 1 of 2 failed: ZeroDivisionError"
        self.assert_errors(on_two_ranks(self, step), told, "ZeroDivisionError")

    @pytest.mark.feature
    def test_file_that_one_rank_loses_after_the_plan_ends_both(self):
        # Turns red when the healthy rank takes its load for a whole one.
        self.write(a=tensors_of("l.table.weight", "yy"))
        path = self.copy()
        if glue := importlib.util.find_spec(GLUE):
            glue = importlib.import_module(GLUE)
            cut = partial(self.cut_on_second, path, glue.log_plan)
            self.stack.enter_context(mock.patch.object(glue, "log_plan", cut))
        ranks = self.loads(patterns=(".table.",))
        self.assert_errors(ranks, "rank 1 of 2 failed: ShortFileError", "ends at byte")

    def cut_on_second(self, path, log_plan, plan, **options):
        log_plan(plan, **options)
        if dist.get_rank() == 1:
            path.write_bytes(b"")

    @pytest.mark.guard(mutation="the plans of two ranks are never equal")
    def test_ranks_that_agree_get_all_bytes(self):
        # Turns red when folders of two nodes, which differ in name, count as different.
        expected = self.write(a=tensors_of("x"), b=tensors_of("l.table.weight", "yy"))
        self.copy()
        for rank in self.loads(patterns=(".table.",)):
            self.assertIsNone(rank.error)
            self.assertEqual(rank.result[0], expected)


if __name__ == "__main__":
    unittest.main()
