"""Host tables for which there is no memory are refused before one is built."""

import importlib
import os
import unittest
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang.srt.layers import engram
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"

# Two layers of 30 and 68 rows, 64 values and 2 scales each.
TABLES = engram.EngramLayout(
    max_ngram_size=2,
    layer_ids=(1, 3),
    num_embeddings=(30, 68),
    primes=(((13, 17),), ((31, 37),)),
    n_heads=2,
    head_dim=64,
)
ALL_BYTES = (30 + 68) * (64 + 2)
CONFIG = SimpleNamespace(rms_norm_eps=1e-6, hidden_size=64, hc_mult=2)


class TestHostTableRoom(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        variables = {HOST_TABLE: "1", LAYOUT: "per_rank"}
        self.registered = []
        cudart = SimpleNamespace(cudaHostRegister=self.register)
        for context in (
            mock.patch.dict(os.environ, variables),
            get_context().override_server_args(),
            get_parallel().override(tp_size=1, tp_rank=0, pp_size=1, tp_group=None),
            mock.patch.object(torch.cuda, "cudart", lambda: cudart),
            mock.patch.object(torch.cuda, "current_device", lambda: 0),
            mock.patch.object(engram, "_sorted_host_reads", lambda device: False),
        ):
            self.stack.enter_context(context)

    def register(self, pointer, nbytes, flags):
        self.registered.append(nbytes)
        return 0

    def build(self, free_bytes):
        """Build all layers on a machine of `free_bytes`; the refusal, if any."""
        try:
            module = importlib.import_module("sglang.srt.layers.engram_memory")
        except ModuleNotFoundError:
            module = SimpleNamespace(available_memory=None)  # Nobody is asked.
        with mock.patch.object(module, "available_memory", lambda: free_bytes):
            try:
                for layer_id in TABLES.layer_ids:
                    engram.Engram(CONFIG, layer_id, TABLES)
            except ValueError as error:
                return str(error)
        return ""

    @pytest.mark.feature
    def test_all_tables_are_refused_before_the_first_is_built(self):
        # Turns red when the second layer's table is not counted, or the first built.
        refusal = self.build(ALL_BYTES - 1)
        self.assertIn("the host layout per_rank needs 0.00 GiB", refusal)
        self.assertIn("raise the container's memory limit", refusal)
        self.assertEqual(self.registered, [])

    @pytest.mark.feature
    def test_ranks_of_a_node_add_up_their_shards(self):
        # Turns red when a rank compares its own shard with what the node has.
        group = SimpleNamespace(cpu_group="the group")
        sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), 2)
        asked = []

        def gathered(group, step, look):
            asked.append(group)
            node, nbytes, free = look()
            return [(node, nbytes, free), (node, nbytes, free + 1)]

        try:
            module = importlib.import_module("sglang.srt.layers.engram_memory")
        except ModuleNotFoundError as error:
            self.fail(str(error))
        with (
            get_parallel().override(tp_group=group, **sizes),
            mock.patch.object(module, "together", gathered),
        ):
            self.assertEqual(self.build(ALL_BYTES), "")
            self.assertIn("can be had there", self.build(ALL_BYTES - 1))
        self.assertEqual(set(asked), {"the group"})

    @pytest.mark.guard(mutation="engram_memory.py: need >= have refuses")
    def test_tables_that_just_fit_are_built(self):
        # Turns red when a byte more than the tables is asked for.
        self.assertEqual(self.build(ALL_BYTES), "")
        self.assertEqual(len(self.registered), 2)

    @pytest.mark.guard(mutation="engram_memory.py: the layout is not asked")
    def test_tables_on_the_device_need_no_host_memory(self):
        # Turns red when a table in device memory is refused for want of host memory.
        with mock.patch.dict(os.environ, {HOST_TABLE: "0"}):
            self.assertEqual(self.build(0), "")

    @pytest.mark.guard(mutation="engram_memory.py: a variable is not asked")
    def test_check_can_be_turned_off(self):
        # Turns red when a variable no longer gives the stock behaviour.
        for name in ("LOADPLAN_DISABLE", "LOADPLAN_SKIP_HOST_MEMORY_CHECK"):
            with self.subTest(name), mock.patch.dict(os.environ, {name: "1"}):
                self.assertEqual(self.build(0), "")


if __name__ == "__main__":
    unittest.main()
