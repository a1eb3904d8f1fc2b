"""Small checkpoints through the released DefaultModelLoader, for tests of loading."""

import importlib
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from loadplan.standin.simple import simple_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_context
from sglang.test.test_utils import CustomTestCase

CORE = "sglang.srt.model_loader.loadplan"


def tensors_of(*names):
    """A tensor of 64 bytes for each name, with other bytes each."""
    return {
        name: torch.arange(len(name), len(name) + 64, dtype=torch.uint8).view(8, 8)
        for name in names
    }


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


class SmallLoads(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.stack.enter_context(get_context().override_server_args())
        self.seen = self.gpu()

    def gpu(self, **options):
        device = torch.device("cuda", 0)
        patches = [
            (current_platform, "device_type", "cuda"),
            (current_platform, "get_device", lambda device_id=0: device),
        ]
        return self.stack.enter_context(simple_gpu(CORE, patches=patches, **options))

    def core(self, module):
        """A module of the core; that it is missing is a failure, not an error."""
        try:
            return importlib.import_module(f"{CORE}.{module}")
        except ModuleNotFoundError as error:
            self.fail(str(error))

    def write(self, **files):
        """Write a shard of tensors for each keyword, and an index; the bytes by name."""
        weight_map, content = {}, {}
        for stem, tensors in files.items():
            path = Path(self.folder, f"{stem}.safetensors")
            save_file(tensors, path, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, path.name)
            content |= {name: raw(tensor) for name, tensor in tensors.items()}
        index = Path(self.folder, "model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": weight_map}))
        return content

    def load(self, patterns=None, **config):
        """The tensors that arrive, by name; each name once."""
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor", **config))
        model_config = SimpleNamespace(
            model_path=self.folder,
            revision=None,
            hf_config=SimpleNamespace(architectures=["Any"]),
        )
        model = torch.nn.Module()
        model.host_resident_weight_patterns = patterns
        pairs = list(loader._get_all_weights(model_config, model))
        self.assertEqual(len(dict(pairs)), len(pairs))
        return dict(pairs)

    def assert_exact(self, found, expected):
        self.assertEqual({name: raw(t) for name, t in found.items()}, expected)
