"""What a safetensors file holds, told by its header alone."""

import json
import os
import unittest

import pytest
import torch
from safetensors.torch import save_file
from small_tokenspeed_loads import SmallLoads

TENSORS = {
    "x": torch.arange(6, dtype=torch.int16).view(2, 3),
    "empty": torch.zeros(0, 4),
    "scalar": torch.ones(()),
}


class TestSafetensorsHeaders(SmallLoads):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "a.safetensors"
        save_file(TENSORS, self.path)

    def read(self):
        return self.module("loadplan.header").read_header(str(self.path))

    @pytest.mark.feature
    def test_ranges_are_the_bytes_of_official_safetensors(self):
        # Turns red when a range, a dtype or a shape is another than the file's.
        whole = self.path.read_bytes()
        found = {
            t.name: (t.torch_dtype, t.torch_shape, whole[t.begin : t.end])
            for t in self.read().tensors
        }
        expected = {
            name: (t.dtype, tuple(t.shape), t.numpy().tobytes())
            for name, t in TENSORS.items()
        }
        self.assertEqual(found, expected)

    @pytest.mark.feature
    def test_damaged_files_get_the_verdict_of_official_safetensors(self):
        # Turns red when a short file, or one of something else, passes.
        whole = self.path.read_bytes()
        for damaged in (whole[:-1], whole[:5], b"\0\x05\x16\x07" * 20):
            self.path.write_bytes(damaged)
            with self.assertRaisesRegex(ValueError, "refused by safetensors"):
                self.read()

    @pytest.mark.feature
    def test_file_that_changed_since_is_told_by_its_header(self):
        # Turns red when one of the same size may take a planned file's place.
        header = self.read()
        header.check_unchanged(os.stat(self.path))
        other = self.folder / "other"
        other.write_bytes(self.path.read_bytes())
        os.replace(other, self.path)
        with self.assertRaisesRegex(ValueError, "changed while loading"):
            header.check_unchanged(os.stat(self.path))

    @pytest.mark.feature
    def test_index_opens_nothing_outside_the_checkpoint(self):
        # Turns red when an index that was downloaded chooses what is read, or a FIFO
        # in its place holds the load for ever.
        header = self.module("loadplan.header")
        index = self.folder / header.INDEX_NAME
        for shard in ("../a.safetensors", "/etc/passwd"):
            index.write_text(json.dumps({"weight_map": {"x": shard}}))
            with self.assertRaisesRegex(ValueError, "inside the checkpoint's folder"):
                header.read_index(str(self.folder))
        index.unlink()
        os.mkfifo(index)
        with self.assertRaisesRegex(ValueError, "a FIFO"):
            header.read_index(str(self.folder))


if __name__ == "__main__":
    unittest.main()
