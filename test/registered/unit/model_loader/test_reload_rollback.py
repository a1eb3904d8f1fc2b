"""A reload from disk that fails goes back to the checkpoint that was served."""

import json
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

OPTIONS = {"chunk_size": 1 << 20, "io_depth": 8}


class Served(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.y = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


class TestReloadRollback(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack.enter_context(get_context().override_server_args())
        self.served = self.write("served", x=1.0, y=2.0)
        self.model = Served()
        self.config = SimpleNamespace(
            model_path=self.served,
            revision=None,
            hf_config=SimpleNamespace(architectures=["Any"]),
            dtype=torch.float32,
            quantization=None,
        )
        self.assertEqual(self.reload(self.served)[0], True)

    def write(self, name, size=4, **values):
        folder = self.folder / name
        folder.mkdir()
        for tensor, value in values.items():
            # Of another size in y alone, so that x is written before the load fails.
            shape = (size if tensor == "y" else 4,)
            save_file(
                {tensor: torch.full(shape, value)}, folder / f"{tensor}.safetensors"
            )
        return str(folder)

    def reload(self, folder, load_format="safetensors"):
        updater = weight_updater.WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=self.config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda *args, **kwargs: None,
            recapture_cuda_graph=None,
            get_model_runner=None,
        )
        try:
            return updater.update_weights_from_disk(folder, load_format)
        except Exception as error:
            self.fail(f"the way back failed: {error}")

    def options_of_reload(self, load_format):
        """What the loader of a reload is given, beside a server under instanttensor."""
        context = get_context().override_server_args(
            load_format="instanttensor", model_loader_extra_config=json.dumps(OPTIONS)
        )
        with context, mock.patch.object(weight_updater, "get_model_loader") as made:
            self.reload(self.served, load_format)
        options = made.call_args.args[0].model_loader_extra_config
        return json.loads(options) if isinstance(options, str) else options

    def assert_serves(self, x, y):
        found = [bytes(p.numpy()) for p in (self.model.x, self.model.y)]
        expected = [bytes(torch.full((4,), value).numpy()) for value in (x, y)]
        self.assertEqual(found, expected)

    @pytest.mark.feature
    def test_reload_that_fails_halfway_brings_the_served_bytes_back(self):
        # Turns red when the way back reads the new checkpoint once more.
        done, message = self.reload(self.write("new", size=5, x=3.0, y=4.0))
        self.assertFalse(done)
        self.assertIn("Rolling back", message)
        self.assert_serves(1.0, 2.0)
        self.assertEqual(self.config.model_path, self.served)

    @pytest.mark.feature
    def test_reload_that_is_refused_leaves_the_way_back_as_it_was(self):
        # Turns red when the next rollback leads to what was refused.
        for folder, load_format in (
            (str(self.folder / "none"), "safetensors"),
            (self.write("new", x=3.0, y=4.0), "dummy"),
        ):
            self.assertFalse(self.reload(folder, load_format)[0])
            self.assertEqual(self.config.model_path, self.served)
            self.assert_serves(1.0, 2.0)

    @pytest.mark.feature
    def test_options_of_instanttensor_hold_for_a_reload(self):
        # Turns red when the ring takes its default beside a running server.
        self.assertEqual(self.options_of_reload("instanttensor"), OPTIONS)

    @pytest.mark.guard(mutation="InstantTensor's options go to every load format")
    def test_other_formats_do_not_get_them(self):
        # Turns red when a format is given options that it refuses.
        self.assertFalse(self.options_of_reload("safetensors"))

    @pytest.mark.guard(mutation="the path is put back after every reload")
    def test_reload_that_succeeds_is_what_is_served_now(self):
        # Turns red when a later rollback goes back too far.
        new = self.write("new", x=3.0, y=4.0)
        self.assertTrue(self.reload(new)[0])
        self.assert_serves(3.0, 4.0)
        self.assertEqual(self.config.model_path, new)


if __name__ == "__main__":
    unittest.main()
