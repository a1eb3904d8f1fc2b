"""Qwen4-Exp's n-gram tables, offloaded to the host and filled from rows of the files.

The tables, their load_shard and load_qwen4_exp_weights are the engine's own; page
locking and one kernel that prepares divisors are stubbed.
"""

import itertools
import os
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_tokenspeed_v41 import (
    mapping_of,
    tensor_bytes,
    tiny_gpu,
    weights_of,
)
from torch import nn

from tokenspeed.runtime.configs.qwen4_exp_config import Qwen4ExpTextConfig
from tokenspeed.runtime.layers import qwen4_exp_ple
from tokenspeed.runtime.layers.qwen4_exp_ple import Qwen4ExpNGramEmbedding
from tokenspeed.runtime.models.qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
)

PLE = "model.layers.0.ple.ple_embedding"
PARTS, ROWS, DIM = 4, 168, 16
FP8 = torch.float8_e4m3fn


def ple_config(*, offload, dtype):
    with warnings.catch_warnings():
        # The release's configuration calls what its transformers deprecates.
        warnings.simplefilter("ignore", FutureWarning)
        return Qwen4ExpTextConfig(
            vocab_size=64,
            num_experts=None,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=32,
            make_ngram_vocab_size_divisible_by=PARTS,
            split_ngram_parts=PARTS,
            eos_token_id=0,
            ple_embed_dtype=dtype,
            ple_offload_embedding=offload,
        )


def model_with_table(model_class, config, rank, tp_size):
    """A model of nothing but one n-gram table."""
    model = object.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    model.mapping = mapping_of(rank, tp_size)
    model.is_multimodal_active = False
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    ple = model.model.layers[0].ple = nn.Module()
    empty = torch.empty

    def unlocked(*args, pin_memory=False, **options):
        return empty(*args, **options)

    def reciprocals(sizes, device):
        return torch.zeros(len(sizes))

    offload = config.ple_offload_embedding
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=offload),
        mock.patch.object(torch, "empty", unlocked),
        mock.patch.object(qwen4_exp_ple, "prepare_ngram_reciprocals", reciprocals),
    ):
        ple.ple_embedding = Qwen4ExpNGramEmbedding(
            config, model.mapping, embedding_dim=64, ple_layer_index=0, prefix=PLE
        )
    return model


def write_table(folder, *, dtype, whole=False):
    """A table of 168 rows in parts, in one file with other tensors; parts by name."""
    generator = torch.Generator().manual_seed(1)
    if dtype is FP8:
        values = torch.randint(256, (ROWS, DIM), generator=generator, dtype=torch.uint8)
        table = values.view(FP8)
    else:
        table = torch.randn((ROWS, DIM), generator=generator).to(dtype)
    step = ROWS // PARTS
    parts = {
        f"{PLE}.ngram_embedding.shard_{i}.weight": table[i * step : (i + 1) * step]
        for i in range(PARTS)
    }
    if whole:
        parts = {f"{PLE}.ngram_embedding.weight": table}
    others = {"model.layers.0.rotary_emb.inv_freq": torch.ones(8)}
    if dtype is FP8:
        others[f"{PLE}.ngram_embedding.weight_scale"] = torch.tensor([0.5])
    tensors = {name: part.clone() for name, part in parts.items()} | others
    save_file(tensors, Path(folder, "model.safetensors"))
    return tensor_bytes(table)


class TestPleTables(unittest.TestCase):
    """Needs no GPU."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def load(
        self,
        config,
        *,
        load_format="instanttensor",
        model_class=Qwen4ExpForCausalLM,
        rank=0,
        tp_size=1,
    ):
        """The table's bytes and scales, which names were on the device, bytes read."""
        on_device, self.read, self.given_back = set(), 0, 0
        preadv, fadvise = os.preadv, os.posix_fadvise

        def counted(*arguments):
            count = preadv(*arguments)
            self.read += count
            return count

        def advised(fd, offset, nbytes, advice):
            self.given_back += nbytes
            fadvise(fd, offset, nbytes, advice)

        with tiny_gpu() as journal:
            model = model_with_table(model_class, config, rank, tp_size)

            def noted():
                for name, tensor in weights_of(model, self.folder, load_format):
                    if journal.on_device(tensor):
                        on_device.add(name)
                    yield name, tensor

            weights = noted()
            first = next(weights)
            counting = mock.patch.object(os, "preadv", counted)
            advising = mock.patch.object(os, "posix_fadvise", advised)
            with counting, advising:
                model.load_weights(itertools.chain([first], weights))
        lookup = model.model.layers[0].ple.ple_embedding.lookup
        shard = lookup.ngram_embedding.shard_indices
        own = shard.org_vocab_end_index - shard.org_vocab_start_index
        state = [tensor_bytes(lookup.ngram_embedding.weight[:own])]
        state.append(lookup._checkpoint_weight_scale)
        if lookup.ngram_embedding_scale is not None:
            state.append(tensor_bytes(lookup.ngram_embedding_scale[:own]))
        return state, on_device

    @pytest.mark.feature
    def test_offloaded_table_never_crosses_the_device(self):
        # Turns red when parts of the table are streamed to be copied back.
        for model_class in (Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration):
            for whole in (False, True):
                with self.subTest(model=model_class.__name__, whole=whole):
                    table = write_table(self.folder, dtype=FP8, whole=whole)
                    config = ple_config(offload=True, dtype="float8_e4m3fn")
                    state, on_device = self.load(config, model_class=model_class)
                    self.assertEqual(state, [table, 0.5])
                    names = {n for n in on_device if n.endswith(".weight")}
                    self.assertEqual(names, set())

    @pytest.mark.feature
    def test_each_rank_reads_just_its_own_rows(self):
        # Turns red when rows are copied from a memory map, or those of others too.
        table = write_table(self.folder, dtype=FP8)
        config = ple_config(offload=True, dtype="float8_e4m3fn")
        for rank, (begin, end) in enumerate(((0, 96), (96, ROWS))):
            with self.subTest(rank=rank):
                (found, _), _ = self.load(config, rank=rank, tp_size=2)
                own = table[begin * DIM : end * DIM]
                self.assertEqual(found, own)
                self.assertEqual(self.read, len(own))
                self.assertEqual(self.given_back, len(own))

    @pytest.mark.guard(mutation="rows are read whatever their dtype")
    def test_table_of_another_dtype_is_converted_as_ever(self):
        # Turns red when a checkpoint that is quantized while it loads is refused.
        write_table(self.folder, dtype=torch.bfloat16)
        for offload in (False, True):
            with self.subTest(offload=offload):
                config = ple_config(offload=offload, dtype="float8_e4m3fn")
                with mock.patch.object(torch, "ones", ones_on_host):
                    expected, _ = self.load(config, load_format="safetensors")
                    found, _ = self.load(config)
                self.assertEqual(found, expected)
                self.assertEqual(len(found), 3)

    @pytest.mark.guard(mutation="every n-gram table is taken for a host table")
    def test_table_on_the_device_is_streamed_as_ever(self):
        # Turns red when a table that is not offloaded loses the fast path.
        table = write_table(self.folder, dtype=FP8)
        config = ple_config(offload=False, dtype="float8_e4m3fn")
        (found, *_), on_device = self.load(config)
        self.assertEqual(found, table)
        self.assertEqual(len(on_device), PARTS + 2)


def ones_on_host(*args, device=None, **options):
    return torch.full(args[:1], 1.0, **options)


if __name__ == "__main__":
    unittest.main()
