"""Files that InstantTensor gets wrong, and what the device has no room for."""

import json
import struct
import unittest
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_loads import SmallLoads, raw, tensors_of

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


class TestOddFiles(SmallLoads):
    def assert_streams_only(self, stems, expected, **config):
        self.assert_exact(self.load(**config), expected)
        self.assertEqual(self.seen.streamed, [f"{stem}.safetensors" for stem in stems])

    def write_odd(self, form=None, **tensors):
        """A plain file `a` and an odd one `b`; the bytes of both by name."""
        expected = self.write(a=tensors_of("x"), b=tensors)
        path = Path(self.folder, "b.safetensors")
        save_file(tensors, path, metadata={"format": form} if form else None)
        return expected

    @pytest.mark.feature
    def test_file_of_another_framework_is_read_by_tensor(self):
        # Turns red when a format that the library refuses ends the load.
        expected = self.write_odd("flax", **tensors_of("yy"))
        self.assert_streams_only("a", expected)

    @pytest.mark.feature
    def test_file_with_a_zero_byte_tensor_is_read_by_tensor(self):
        # Turns red when the library, which may die on it, is given the file.
        expected = self.write_odd("pt", yy=torch.ones(3), zzz=torch.empty(0, 4))
        self.assert_streams_only("a", expected)

    @pytest.mark.feature
    def test_file_with_a_sub_byte_dtype_is_read_by_tensor(self):
        # Turns red when values of four bits come from the library, which gets them
        # wrong.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        entry = {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}
        header = json.dumps({"yy": entry}).encode()
        Path(self.folder, "b.safetensors").write_bytes(
            struct.pack("<Q", len(header)) + header + b"\x12\x34\x56\x78"
        )
        found = self.load()
        self.assertEqual(self.seen.streamed, ["a.safetensors"])
        self.assertEqual(raw(found["x"]), expected["x"])
        self.assertEqual(raw(found["yy"].view(torch.uint8))[2], b"\x12\x34\x56\x78")

    @pytest.mark.feature
    def test_shard_without_tensors_is_given_to_nobody(self):
        # Turns red when the library, which dies on it, is given the file.
        expected = self.write_odd("pt")
        # An index names no such shard; without one the whole folder counts.
        Path(self.folder, "model.safetensors.index.json").unlink()
        self.assert_streams_only("a", expected)

    @pytest.mark.feature
    def test_tensor_above_what_the_device_has_left_stays_on_the_host(self):
        # Turns red when a tensor that does not fit ends the load.
        expected = self.write(a=tensors_of("x"), b={"yy": torch.ones(64)})
        self.seen = self.gpu(free_memory=256)
        found = self.load()
        self.assert_exact(found, expected)
        on_device = [name for name, t in found.items() if self.seen.on_device(t)]
        self.assertEqual(on_device, ["x"])

    @pytest.mark.feature
    def test_small_load_asks_for_a_small_ring(self):
        # Turns red when a few bytes cost the default of 4 GiB of device memory.
        self.write(a=tensors_of("x"))
        self.load()
        (call,) = self.seen.calls
        self.assertEqual(call.options.get("io_depth"), 3)

    @pytest.mark.guard(mutation="the loader's depth replaces the operator's")
    def test_ring_that_the_operator_sizes_is_left_alone(self):
        # Turns red when an option of --model-loader-extra-config is overruled.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        options = {"io_depth": 7}
        self.assert_streams_only("ab", expected, model_loader_extra_config=options)
        (call,) = self.seen.calls
        self.assertEqual(call.options.get("io_depth"), 7)


if __name__ == "__main__":
    unittest.main()
