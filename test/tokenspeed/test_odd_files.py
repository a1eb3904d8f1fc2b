"""Files that InstantTensor gets wrong, and tensors that the device has no room for."""

import unittest

import pytest
import torch
from small_tokenspeed_loads import SmallLoads, tensors_of

SUB_BYTE = torch.arange(64, dtype=torch.uint8).view(2, 32)
ODD = (
    {"odd": SUB_BYTE.view(torch.float4_e2m1fn_x2)},
    {"odd": torch.empty(0, 4), "beside": torch.ones(4)},
)


class TestOddFiles(SmallLoads):
    @pytest.mark.feature
    def test_odd_tensor_keeps_its_file_from_being_streamed(self):
        # Turns red when the library gets a file of which it would return wrong
        # bytes, or die, or when such a checkpoint is turned away whole.
        for odd in ODD:
            self.seen.calls.clear()
            expected = self.write(a=tensors_of("x"), b=odd)
            try:
                found = self.load()
            except ValueError as error:
                self.fail(str(error))
            self.assert_exact(found, expected)
            self.assertEqual(self.seen.streamed, ["a.safetensors"])
            self.assertEqual(self.on_device(found), set(found))

    @pytest.mark.feature
    def test_foreign_metadata_keeps_its_file_from_being_streamed(self):
        # Turns red when the library gets a file that it refuses.
        expected = self.write(a=tensors_of("x"))
        expected |= self.write(metadata=("format", "mlx"), b=tensors_of("yy"))
        self.assert_exact(self.load(), expected)
        self.assertEqual(self.seen.streamed, ["a.safetensors"])

    @pytest.mark.feature
    def test_buffer_is_as_deep_as_the_files_need(self):
        # Turns red when a few bytes take the default buffer of 4 GiB.
        self.write(a=tensors_of("x"))
        self.load()
        (call,) = self.seen.calls
        self.assertEqual(call.options, {"io_depth": 3})

    @pytest.mark.feature
    def test_tensor_larger_than_the_device_has_room_for_stays_on_the_host(self):
        # Turns red when a buffer is asked for that the device cannot hold.
        small = {"small": torch.arange(8, dtype=torch.uint8)}
        expected = self.write(a=tensors_of("large"), b=small)
        self.seen = self.gpu(free_memory=2 * 64 - 2)
        found = self.load()
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"small"})

    @pytest.mark.guard(mutation="every file is taken for an odd one")
    def test_plain_files_are_streamed(self):
        # Turns red when a clean checkpoint loses the fast path.
        self.write(a=tensors_of("x"), b=tensors_of("yy"))
        self.load()
        self.assertEqual(len(self.seen.streamed), 2)


if __name__ == "__main__":
    unittest.main()
