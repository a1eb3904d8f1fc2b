"""Offloaded n-gram tables of Qwen4-Exp, filled from rows of the files."""

import unittest
from types import SimpleNamespace

import pytest
import torch
from small_tokenspeed_loads import SmallLoads, raw

from tokenspeed.runtime.layers.ple_lookup import PLELookup
from tokenspeed.runtime.models.qwen4_exp import (
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
)

FP8 = torch.float8_e4m3fn
PART = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_1.weight"
# Rows 8 to 16 of a table of two parts.
BYTES = torch.arange(32, dtype=torch.uint8).view(8, 4)


def bare(cls):
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    return made


class TestPleRows(SmallLoads):
    def load_part(self, cls, *, offload):
        self.write(a={PART: BYTES.view(FP8), "scale": torch.ones(1)})
        model = bare(cls)
        model.config = SimpleNamespace(ple_offload_embedding=offload)
        return self.load(
            patterns=getattr(model, "host_resident_weight_patterns", ()),
        )

    def fill(self, weight):
        """Fill rows 6 to 12 of a table from the part; how many bytes were read."""
        lookup = bare(PLELookup)
        table = torch.zeros(6, 4, dtype=torch.uint8).view(FP8)
        lookup.ngram_embedding = SimpleNamespace(
            org_vocab_size=16,
            shard_indices=SimpleNamespace(
                org_vocab_start_index=6, org_vocab_end_index=12
            ),
            weight=torch.nn.Parameter(table, requires_grad=False),
        )
        lookup.ngram_embedding_scale = None
        with self.reads() as reads:
            lookup.load_shard(weight, 1, 2)
        expected = torch.zeros(6, 4, dtype=torch.uint8)
        expected[2:] = BYTES[:4]
        self.assertEqual(raw(table), raw(expected.view(FP8)))
        return sum(count for _, count in reads)

    @pytest.mark.feature
    def test_offloaded_table_never_crosses_the_device(self):
        # Turns red when parts of the table are streamed to be copied back.
        for cls in (Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration):
            found = self.load_part(cls, offload=True)
            self.assertEqual(self.on_device(found), {"scale"})
            self.assertEqual(raw(found[PART]), raw(BYTES.view(FP8)))

    @pytest.mark.feature
    def test_rank_reads_just_its_own_rows(self):
        # Turns red when rows are copied from a memory map, or those of others too.
        weight = self.load_part(Qwen4ExpForCausalLM, offload=True)[PART]
        self.assertEqual(self.fill(weight), 16)

    @pytest.mark.guard(mutation="every n-gram table is taken for a host table")
    def test_table_on_the_device_is_streamed_and_copied_as_ever(self):
        # Turns red when a table that is not offloaded loses the fast path.
        found = self.load_part(Qwen4ExpForCausalLM, offload=False)
        self.assertEqual(self.on_device(found), {PART, "scale"})
        self.assertEqual(self.seen.streamed, ["a.safetensors"])
        self.assertEqual(self.fill(found[PART]), 0)


if __name__ == "__main__":
    unittest.main()
