"""Small checkpoints through the released DefaultModelLoader, for tests of loading."""

import importlib
import json
import os
import tempfile
import unittest
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import save_file

from loadplan.standin.simple import simple_gpu
from loadplan.standin.tokenspeed import Platform  # noqa: F401 (before TokenSpeed)
from tokenspeed.runtime.configs.load_config import LoadConfig
from tokenspeed.runtime.distributed.process_group_manager import process_group_manager
from tokenspeed.runtime.model_loader.loader import DefaultModelLoader

PACKAGE = "tokenspeed.runtime.model_loader"


def tensors_of(*names):
    """A tensor of 64 bytes for each name, with other bytes each."""
    return {
        name: torch.arange(len(name), len(name) + 64, dtype=torch.uint8).view(8, 8)
        for name in names
    }


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


class SmallLoads(unittest.TestCase):
    def setUp(self):
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.seen, self.group = self.gpu(), None

    def gpu(self, **options):
        core = f"{PACKAGE}.loadplan"
        return self.stack.enter_context(simple_gpu(core, **options))

    def ranks(self, hosts):
        """Be the first of two ranks; ``hosts`` is their group for Python objects."""
        ranks = self.group = (0, 1)
        device = SimpleNamespace(size=lambda: 2, group_name="device")
        for owner, name, value in (
            (
                process_group_manager,
                "_process_groups",
                {"nccl": {ranks: device}, "gloo": {ranks: hosts}},
            ),
            (torch.distributed, "get_process_group_ranks", lambda group: [*ranks]),
            (torch.distributed, "get_world_size", lambda group=None: 2),
        ):
            self.stack.enter_context(mock.patch.object(owner, name, value))
        return device

    def module(self, name):
        """A module of the loader; that it is missing is a failure, not an error."""
        try:
            return importlib.import_module(f"{PACKAGE}.{name}")
        except ModuleNotFoundError as error:
            self.fail(str(error))

    def write(self, metadata=("format", "pt"), **files):
        """Write a shard of tensors for each keyword, and an index; the bytes by name.

        What was written before stays in the index.
        """
        index = self.folder / "model.safetensors.index.json"
        weight_map, content = {}, {}
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
        for stem, tensors in files.items():
            path = self.folder / f"{stem}.safetensors"
            save_file(tensors, path, metadata=dict([metadata]))
            weight_map |= dict.fromkeys(tensors, path.name)
            content |= {name: raw(tensor) for name, tensor in tensors.items()}
        index.write_text(json.dumps({"weight_map": weight_map}))
        return content

    def load(self, *, wanted=None, patterns=(), load_format="instanttensor"):
        """The tensors that arrive, by name; each name once."""
        model = SimpleNamespace(
            checkpoint_weight_name_filter=wanted,
            checkpoint_load_group=self.group,
            host_resident_weight_patterns=patterns,
        )
        config = LoadConfig(
            load_format=load_format, weight_loader_prefetch_checkpoints=False
        )
        source = SimpleNamespace(model_path=str(self.folder), revision=None)
        pairs = list(DefaultModelLoader(config)._get_all_weights(source, model))
        self.assertEqual(len(dict(pairs)), len(pairs))
        return dict(pairs)

    def assert_exact(self, found, expected):
        self.assertEqual({name: raw(t) for name, t in found.items()}, expected)

    def on_device(self, found):
        return {name for name, tensor in found.items() if self.seen.on_device(tensor)}

    @contextmanager
    def reads(self):
        """The offset and the bytes of each positioned read, in the files' order."""
        found, preadv = [], os.preadv

        def counted(fd, buffers, offset):
            count = preadv(fd, buffers, offset)
            found.append((offset, count))
            return count

        with mock.patch.object(os, "preadv", counted):
            yield found
        found.sort()
