"""What one rank can do wrong while several load a tiny DeepSeek-V4.1 together.

Each rank reads a folder of its own, ``rank0``, ``rank1``, ...; rank 1 may be in trouble.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

from tiny_deepseek_v41 import (
    model_config_of,
    parameter_digests,
    tiny_model,
)

from loadplan.standin.gpu import fake_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader


def load_rank_of_folder(rank, tp_size, folder, config, model_class, failing_rank):
    """Load one rank's model: what it holds, or what ended it, the bytes read and got.

    A target of ``run_ranks``. On failing_rank load_weights raises in mid-stream.
    """
    read, got = [], []
    preadv = os.preadv

    def counting(*args):
        read.append(preadv(*args))
        return read[-1]

    error = digests = None
    with ExitStack() as stack:
        journal = stack.enter_context(fake_gpu())
        stack.enter_context(mock.patch.object(os, "preadv", counting))
        try:
            if importlib.util.find_spec("sglang.srt.model_loader.loadplan"):
                # However little a tiny checkpoint selects, the ranks read it together.
                least = "sglang.srt.model_loader.loadplan.broadcast.LEAST_SHARED_BYTES"
                stack.enter_context(mock.patch(least, 1))
            model = tiny_model(config, model_class)
            loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
            weights = loader._get_all_weights(
                model_config_of(f"{folder}/rank{rank}"), model
            )
            if rank == failing_rank:
                weights = _ending(weights)
            model.load_weights(_counted(weights, got))
            digests = parameter_digests(model)
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
    return SimpleNamespace(
        digests=digests,
        error=error,
        bytes_read=sum(read) + journal.bytes_read,
        bytes_got=sum(got),
    )


def _counted(weights, got):
    for name, tensor in weights:
        got.append(tensor.nbytes)
        yield name, tensor


def _ending(weights):
    for number, pair in enumerate(weights):
        if number == 3:
            raise KeyError("a name that the model does not know")
        yield pair
