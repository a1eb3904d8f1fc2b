# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files that InstantTensor gets wrong, and tensors that the device has no room for."""

import pytest
import torch
from small_vllm_loads import SmallLoads, exact, tensors_of

ODD = {
    "sub-byte": {"odd": torch.arange(64, dtype=torch.uint8).view(2, 32)},
    "zero bytes": {"odd": torch.empty(0, 4), "beside": torch.ones(4)},
}
ODD["sub-byte"]["odd"] = ODD["sub-byte"]["odd"].view(torch.float4_e2m1fn_x2)


class TestOddFiles(SmallLoads):
    @pytest.mark.feature
    @pytest.mark.parametrize("kind", ODD)
    def test_odd_tensor_keeps_its_file_from_being_streamed(self, kind):
        # Turns red when the library gets a file of which it would return wrong
        # bytes, or die.
        expected = self.write(a=tensors_of("x"), b=ODD[kind])
        found = self.load()
        assert exact(found) == expected | exact(tensors_of("x"))
        assert self.seen.streamed == ["a.safetensors"]
        assert self.on_device(found) == set(found)

    @pytest.mark.feature
    def test_foreign_metadata_keeps_its_file_from_being_streamed(self):
        # Turns red when the library gets a file that it refuses.
        expected = self.write(a=tensors_of("x"))
        expected |= self.write(metadata=("format", "mlx"), b=tensors_of("yy"))
        assert exact(self.load()) == expected
        assert self.seen.streamed == ["a.safetensors"]

    @pytest.mark.feature
    def test_ring_is_as_deep_as_the_files_need(self):
        # Turns red when a few bytes take the default ring of 4 GiB.
        self.write(a=tensors_of("x"))
        self.load()
        (call,) = self.seen.calls
        assert call.options.get("io_depth") == 3

    @pytest.mark.feature
    def test_tensor_larger_than_the_device_has_room_for_stays_on_the_host(self):
        # Turns red when a ring is asked for that the device cannot hold.
        small = {"small": torch.arange(8, dtype=torch.uint8)}
        expected = self.write(a=tensors_of("large"), b=small)
        self.seen = self.gpu(free_memory=2 * 64 - 2)
        found = self.load()
        assert exact(found) == expected
        assert self.on_device(found) == {"small"}

    @pytest.mark.guard(mutation="every file is taken for an odd one")
    def test_plain_files_are_streamed(self):
        # Turns red when a clean checkpoint loses the fast path.
        self.write(a=tensors_of("x"), b=tensors_of("yy"))
        self.load()
        assert len(self.seen.streamed) == 2
