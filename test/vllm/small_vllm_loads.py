# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Small checkpoints through the released DefaultModelLoader, for tests of loading."""

import contextlib
import importlib
import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from loadplan.standin.simple import simple_gpu
from vllm.config import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import default_loader
from vllm.platforms import current_platform

CORE = "vllm.model_executor.model_loader.loadplan"


def tensors_of(*names):
    """A tensor of 64 bytes for each name, with other bytes each."""
    return {
        name: torch.arange(len(name), len(name) + 64, dtype=torch.uint8).view(8, 8)
        for name in names
    }


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


class SmallLoads:
    @pytest.fixture(autouse=True)
    def device(self, tmp_path):
        self.folder = tmp_path
        with contextlib.ExitStack() as self.stack:
            self.seen = self.gpu()
            yield

    def gpu(self, **options):
        patches = [
            (current_platform, "is_cuda", lambda: True),
            (current_platform, "current_device", lambda: 0),
        ]
        return self.stack.enter_context(simple_gpu(CORE, patches=patches, **options))

    def ranks(self, cpu_group=None):
        """Be the first of two ranks, whose group for tensors is returned.

        Without a ``cpu_group`` they exchange nothing.
        """
        group = SimpleNamespace(group_name="device")
        world = SimpleNamespace(world_size=2, cpu_group=cpu_group, device_group=group)
        for owner, name, value in (
            (parallel_state, "_WORLD", world),
            (torch.distributed, "get_world_size", lambda group=None: 2),
        ):
            self.stack.enter_context(mock.patch.object(owner, name, value))
        return group

    def core(self, module):
        """A module of the core; that it is missing is a failure, not an error."""
        try:
            return importlib.import_module(f"{CORE}.{module}")
        except ModuleNotFoundError as error:
            raise AssertionError(str(error)) from None

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

    def load(self, *, unused=None, model=None, experts=None, cpu_offload=False):
        """The tensors that arrive, by name; each name once."""
        model = model or SimpleNamespace(is_unused_checkpoint_weight=unused)
        config = SimpleNamespace(engram_config=SimpleNamespace(cpu_offload=cpu_offload))
        loader = default_loader.DefaultModelLoader(
            LoadConfig(load_format="instanttensor", use_tqdm_on_load=False)
        )
        loader.local_expert_ids = experts
        source = SimpleNamespace(model=str(self.folder), revision=None)
        with mock.patch.object(
            default_loader, "get_current_vllm_config_or_none", lambda: config
        ):
            pairs = list(loader.get_all_weights(source, model))
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def on_device(self, found):
        return {name for name, tensor in found.items() if self.seen.on_device(tensor)}

    @contextlib.contextmanager
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


def exact(found):
    return {name: raw(tensor) for name, tensor in found.items()}
