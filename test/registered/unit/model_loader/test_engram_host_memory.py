"""Host tables for which there is no memory, refused before one of them is built."""

import contextlib
import importlib
import os
import socket
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
from tiny_deepseek_v41 import host_table_env, run_ranks

from loadplan.standin.gpu import fake_gpu
from sglang.srt.layers import engram
from sglang.srt.runtime_context import (
    SpawnRanks,
    get_parallel,
    publish,
    reset_context,
)
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
PER_RANK, SHARED = host_table_env("per_rank"), host_table_env("shared")

# Two layers of 30 and 68 rows, 64 values and 2 scales each.
LAYOUT = engram.EngramLayout(
    max_ngram_size=2,
    layer_ids=(1, 3),
    num_embeddings=(30, 68),
    primes=(((13, 17),), ((31, 37),)),
    n_heads=2,
    head_dim=64,
)
ALL_BYTES = (30 + 68) * (64 + 2)
MODEL_CONFIG = SimpleNamespace(rms_norm_eps=1e-6, hidden_size=64, hc_mult=2)

# More than any address space: a table that is tried fails at once.
HUGE = engram.EngramLayout(
    max_ngram_size=2,
    layer_ids=(1,),
    num_embeddings=(1 << 50,),
    primes=(((1 << 49, 1 << 49),),),
    n_heads=2,
    head_dim=64,
)


def build(layout=LAYOUT):
    """Build every Engram layer; how many tables were registered, or the refusal."""
    with fake_gpu() as journal:
        try:
            for layer_id in layout.layer_ids:
                engram.Engram(MODEL_CONFIG, layer_id, layout)
        except ValueError as error:
            return f"{error} [{len(journal.host_registrations)} tables]"
    return len(journal.host_registrations)


def build_with(free_bytes):
    """`build`, on a machine of `free_bytes`."""
    try:
        module = importlib.import_module("sglang.srt.layers.engram_memory")
    except ImportError:
        return build()  # An engine that asks nobody.
    with mock.patch.object(module, "available_memory", lambda: free_bytes):
        return build()


def build_on_rank(rank, tp_size, free_bytes, nodes):
    """A target of `run_ranks`; each rank sees its own memory and host name."""
    with mock.patch.object(socket, "gethostname", lambda: nodes[rank]):
        return build_with(free_bytes[rank])


def on_two_ranks(env, free_bytes, nodes=("a", "a")):
    return run_ranks(2, build_on_rank, free_bytes, nodes, env=env)


class TestHostMemory(CustomTestCase):
    def setUp(self):
        super().setUp()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.addCleanup(reset_context)
        stack.enter_context(mock.patch.dict(os.environ, PER_RANK))
        self.publish()
        stack.enter_context(get_parallel().override(tp_group=None))

    def publish(self, pp_size=1):
        reset_context()
        arguments = ServerArgs(model_path="dummy", device="cpu", pp_size=pp_size)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))

    @pytest.mark.feature
    def test_real_machine_refuses_a_table_that_no_machine_holds(self):
        # Red when nobody asks the machine before the table is mapped.
        try:
            refusal = build(HUGE)
        except (OSError, OverflowError) as e:
            self.fail(f"the table was tried: {e}")
        self.assertIn("GiB can be had there", str(refusal))

    @pytest.mark.feature
    def test_refusal_says_need_have_and_way_out_before_anything_is_built(self):
        # Red when the second layer's table is not counted, or the first is built.
        refusal = str(build_with(ALL_BYTES - 1))
        self.assertIn("[0 tables]", refusal)
        for text in (
            "the host layout per_rank needs 0.00 GiB of host memory on ",
            "0.00 GiB can be had there",
            "raise the container's memory limit",
            '--engram-config \'{"placement": "gpu"}\'',
            "LOADPLAN_SKIP_HOST_MEMORY_CHECK=1",
        ):
            self.assertIn(text, refusal)

    @pytest.mark.guard(mutation="engram_memory.py: need >= have refuses")
    def test_tables_that_just_fit_are_built(self):
        # Red when a byte more than the tables is asked for.
        self.assertEqual(build_with(ALL_BYTES), 2)

    @pytest.mark.guard(mutation="engram_memory.py: the layout is not asked")
    def test_tables_on_the_gpu_need_no_host_memory(self):
        # Red when a table in device memory is refused for want of host memory.
        with mock.patch.dict(os.environ, {HOST_TABLE: "0"}):
            self.assertEqual(build_with(0), 0)

    @pytest.mark.guard(mutation="engram_memory.py: a variable is not asked")
    def test_check_can_be_turned_off(self):
        # Red when a variable no longer gives the stock behaviour.
        for name in ("LOADPLAN_DISABLE", "LOADPLAN_SKIP_HOST_MEMORY_CHECK"):
            with self.subTest(name), mock.patch.dict(os.environ, {name: "1"}):
                self.assertEqual(build_with(0), 2)

    @pytest.mark.feature
    def test_pipeline_stage_asks_for_the_layers_that_it_builds(self):
        # Red when a stage needs room for other stages' tables, or asks for none.
        self.publish(pp_size=2)
        with get_parallel().override(tp_group=None):
            self.assertEqual(build_with(68 * 66), 2)
            self.assertIn("[1 tables]", str(build_with(68 * 66 - 1)))

    @pytest.mark.feature
    def test_ranks_of_a_node_add_up_and_all_of_them_refuse(self):
        # Red when a rank sees only its own shard, or goes on while another refuses.
        for refusal in on_two_ranks(PER_RANK, (ALL_BYTES, ALL_BYTES - 1)):
            self.assertIn("on 'a'", str(refusal))
            self.assertIn("[0 tables]", str(refusal))

    @pytest.mark.feature
    def test_ranks_of_two_nodes_need_a_half_each(self):
        # Red when a node must hold the other's shards, or the poorer one is not named.
        half, nodes = ALL_BYTES // 2, ("a", "b")
        self.assertEqual(on_two_ranks(PER_RANK, (half, half), nodes), [2, 2])
        for refusal in on_two_ranks(PER_RANK, (half, half - 1), nodes):
            self.assertIn("on 'b'", str(refusal))

    @pytest.mark.feature
    def test_shared_table_counts_once(self):
        # Red when each rank's mapping of a shared table counts as a table.
        built = on_two_ranks(SHARED, (ALL_BYTES, ALL_BYTES))
        self.assertEqual(built, [2, 2])
        for refusal in on_two_ranks(SHARED, (ALL_BYTES - 1, ALL_BYTES)):
            self.assertIn("the host layout shared needs", str(refusal))


if __name__ == "__main__":
    unittest.main()
