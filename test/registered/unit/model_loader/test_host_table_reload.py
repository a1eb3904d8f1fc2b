"""Reload from disk, with Engram tables on the host, and the way back.

The released WeightUpdater reloads the released DeepSeek-V4 model, built whole and tiny,
one process per TP rank; InstantTensor and the device are fakes.
"""

import errno
import json
import os
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny_deepseek_v41 import (
    host_table_env,
    model_config_of,
    parameter_digests,
    run_ranks,
    tiny_checkpoint,
    tiny_config,
    tiny_model,
)

from loadplan.standin.gpu import fake_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    WeightUpdater,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

TABLE_FILE = "model-engram-2.safetensors"


def reload_on_rank(rank, tp_size, served, reloads, config, damaged):
    """Serve one checkpoint, then reload (folder, format); what each left behind.

    ``damaged`` is a file that rank 1 cannot read.
    """
    model = tiny_model(config)
    model_config = model_config_of(served)
    updater = WeightUpdater(
        tp_rank=rank,
        device="cpu",
        gpu_id=0,
        model_config=model_config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    preadv = os.preadv

    def failing(fd, buffers, offset):
        if rank == 1 and os.readlink(f"/proc/self/fd/{fd}") == damaged:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    def state():
        parameters = model.named_parameters(remove_duplicate=False)
        addresses = {name: p.data_ptr() for name, p in parameters}
        return SimpleNamespace(digests=parameter_digests(model), addresses=addresses)

    with fake_gpu() as journal, mock.patch.object(os, "preadv", failing):
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        weights = loader._get_all_weights(model_config, model)
        loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
        states = [state()]
        journal.calls.clear()
        for folder, load_format in reloads:
            done, message = updater.update_weights_from_disk(folder, load_format)
            states.append(state())
            states[-1].done, states[-1].message = done, message
            states[-1].path = model_config.model_path
    return SimpleNamespace(states=states, calls=[call.kwargs for call in journal.calls])


class TestReload(CustomTestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.config = tiny_config()
        self.served = self.checkpoint(folder.name, seed=0)
        self.other = self.checkpoint(folder.name, seed=1)

    def checkpoint(self, parent, *, seed):
        folder = os.path.join(parent, str(seed))
        os.mkdir(folder)
        tiny_checkpoint(folder, self.config, seed=seed)
        return folder

    def reload(
        self, tp_size, *folders, load_format="instanttensor", damaged=None, **kwargs
    ):
        reloads = [(folder, load_format) for folder in folders]
        arguments = (self.served, reloads, self.config, damaged)
        try:
            return run_ranks(tp_size, reload_on_rank, *arguments, **kwargs)
        except (RuntimeError, TimeoutError) as error:
            self.fail(str(error))

    @pytest.mark.guard(mutation="a reload leaves out rows, or gives a table new memory")
    def test_new_bytes_arrive_in_the_registered_memory(self):
        # The second reload brings the first bytes back; red when a table moves.
        for layout in ("per_rank", "shared"):
            with self.subTest(layout=layout):
                for rank in self.reload(
                    2, self.other, self.served, env=host_table_env(layout)
                ):
                    first, changed, restored = rank.states
                    self.assertTrue(changed.done, changed.message)
                    self.assertTrue(restored.done, restored.message)
                    same = {
                        n for n, d in first.digests.items() if d == changed.digests[n]
                    }
                    # What no checkpoint holds.
                    same = {n for n in same if not n.endswith(("k_scale", "v_scale"))}
                    self.assertEqual(same, set())
                    self.assertEqual(restored.digests, first.digests)
                    self.assertEqual(changed.addresses, first.addresses)
                    self.assertEqual(restored.addresses, first.addresses)

    @pytest.mark.feature
    def test_reload_that_fails_on_one_rank_is_rolled_back_on_all(self):
        # Turns red when the way back reads the new checkpoint again, or when a rank is
        # left with new rows in its table.
        for layout in ("per_rank", "shared"):
            with self.subTest(layout=layout):
                for rank in self.reload(
                    2,
                    self.other,
                    damaged=f"{self.other}/{TABLE_FILE}",
                    env=host_table_env(layout),
                ):
                    first, after = rank.states
                    self.assertFalse(after.done)
                    self.assertIn("Input/output error", after.message)
                    self.assertEqual(after.digests, first.digests)
                    self.assertEqual(after.addresses, first.addresses)
                    self.assertEqual(after.path, self.served)

    @pytest.mark.feature
    def test_reload_that_is_refused_changes_nothing(self):
        # The next reload may need the way back; red when it leads to what was refused.
        for folder, load_format in (
            (f"{self.other}/none", "instanttensor"),
            (self.other, "dummy"),
        ):
            (rank,) = self.reload(1, folder, load_format=load_format)
            first, after = rank.states
            self.assertFalse(after.done)
            self.assertEqual(after.digests, first.digests)
            self.assertEqual(after.path, self.served)

    @pytest.mark.feature
    def test_options_of_instanttensor_hold_for_a_reload(self):
        # Device memory is scarce once the server runs; red when they are dropped.
        options = {"chunk_size": 1 << 20, "io_depth": 8}
        arguments = {
            "load_format": "instanttensor",
            "model_loader_extra_config": json.dumps(options),
        }
        (rank,) = self.reload(1, self.other, server_args=arguments)
        self.assertTrue(rank.states[1].done, rank.states[1].message)
        self.assertEqual([call.get("io_depth") for call in rank.calls], [8])

    @pytest.mark.guard(mutation="InstantTensor's options go to every load format")
    def test_other_formats_reload_without_the_options(self):
        # They are refused there; red when a reload in another format gets them.
        arguments = {
            "load_format": "instanttensor",
            "model_loader_extra_config": json.dumps({"chunk_size": 1 << 20}),
        }
        (rank,) = self.reload(
            1, self.other, load_format="safetensors", server_args=arguments
        )
        self.assertTrue(rank.states[1].done, rank.states[1].message)


if __name__ == "__main__":
    unittest.main()
