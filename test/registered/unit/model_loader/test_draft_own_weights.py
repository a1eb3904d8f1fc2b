"""A draft that shares its target's checkpoint reads only its own weights."""

import json
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from small_loads import SmallLoads, raw, tensors_of

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

OWN = tensors_of("draft.a", "draft.bb")


class Draft(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("a", "bb", "shared"):
            parameter = torch.nn.Parameter(
                torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False
            )
            self.register_parameter(name, parameter)

    def wanted_weight(self, name):
        return name.startswith("draft.")

    def load_weights(self, weights):
        for name, tensor in weights:
            if Draft.wanted_weight(self, name):
                getattr(self, name.removeprefix("draft.")).data.copy_(tensor)


class Undeclared(Draft):
    wanted_weight = None


class TestDraftOwnWeights(SmallLoads):
    def weights(self, model):
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        config = SimpleNamespace(
            model_path=self.folder,
            revision=None,
            hf_config=SimpleNamespace(architectures=["Any"]),
        )
        return loader, loader._get_all_weights(config, model)

    def arrived(self, model):
        return dict(self.weights(model)[1])

    def assert_refused(self, text):
        try:
            self.arrived(Draft())
        except ValueError as error:
            self.assertIn(text, str(error))
        else:
            self.fail(f"the draft was loaded, expected: {text}")
        self.assertEqual(self.seen.calls, [])

    @pytest.mark.feature
    def test_only_what_the_draft_wants_is_read(self):
        # Turns red when a file of the target is opened, or read for a tensor of it.
        expected = self.write(a=OWN, b=tensors_of("x"), c=tensors_of("draft.ccc", "yy"))
        found = self.arrived(Draft())
        self.assert_exact(found, {n: b for n, b in expected.items() if "draft" in n})
        self.assertEqual(self.seen.streamed, ["a.safetensors"])

    @pytest.mark.feature
    def test_draft_that_the_index_forgot_is_found(self):
        # Turns red when a draft is not loaded because the index leaves its file out.
        self.write(a=tensors_of("x"))
        save_file(OWN, Path(self.folder, "mtp.safetensors"))
        found = self.arrived(Draft())
        self.assert_exact(found, {name: raw(tensor) for name, tensor in OWN.items()})

    @pytest.mark.guard(mutation="unindexed files are added for every model")
    def test_model_that_declares_nothing_gets_what_the_index_says(self):
        # Turns red when a target loads a file that is not its own.
        expected = self.write(a=tensors_of("x"), b=OWN)
        save_file(tensors_of("draft.ccc"), Path(self.folder, "mtp.safetensors"))
        self.assert_exact(self.arrived(Undeclared()), expected)

    @pytest.mark.feature
    def test_draft_that_would_lack_weights_is_refused(self):
        # Turns red when a draft starts with nothing loaded, or less than is promised.
        self.write(a=tensors_of("x"))
        self.assert_refused("Draft.wanted_weight accepts none of 1 tensors")
        self.write(a=OWN)
        # The engine lists no subfolder, and takes such a file for one that is there.
        Path(self.folder, "sub").mkdir()
        save_file(tensors_of("draft.zz"), Path(self.folder, "sub", "b.safetensors"))
        index = Path(self.folder, "model.safetensors.index.json")
        promised = json.loads(index.read_text())
        promised["weight_map"]["draft.zz"] = "sub/b.safetensors"
        index.write_text(json.dumps(promised))
        self.assert_refused("['draft.zz']")

    @pytest.mark.feature
    def test_parameter_that_nothing_wrote_is_named_in_the_log(self):
        # Turns red when a draft lacks weights and nobody says so.
        self.write(a=OWN)
        model = Draft()
        loader, weights = self.weights(model)
        with self.assertLogs("sglang", "WARNING") as logs:
            loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
        self.assertIn("['shared']", "".join(logs.output))


if __name__ == "__main__":
    unittest.main()
