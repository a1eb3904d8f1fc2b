"""What the stand-ins write down of a load."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadplan.standin import gpu, records


def test_call_is_recorded_as_it_came(good):
    """Red when the record shows the sorted list, defaults, or hides a refused call."""
    record = gpu.Record()
    stub = gpu.make_module(record=record)
    before = tuple(good)
    assert list(before) != sorted(before)
    with stub.safe_open(good, "pt", 0, copy=True, io_depth=4) as opened:
        taken = [name for name, _ in opened.tensors()]
    with pytest.raises(ValueError, match="CUDA"):
        stub.safe_open(good[0], "pt", device="cpu")
    assert record.calls == [
        records.Call(before, 0, None, {"copy": True, "io_depth": 4}),
        records.Call((good[0],), "cpu", None, {}),
    ]
    assert record.names == taken == ["a", "b", "c"]


@pytest.mark.parametrize("copy", [True, False])
def test_yielded_tensors_and_their_views_are_on_the_device(copy, good):
    """Red when a view of a streamed tensor counts as host memory, or a host one not."""
    record = gpu.Record()
    stub = gpu.make_module(record=record)
    with stub.safe_open(good, "pt", 0, copy=copy) as opened:
        for _, tensor in opened.tensors():
            assert record.on_device(tensor)
            assert record.on_device(tensor.view(torch.uint8)[3:5])
            assert record.on_device(torch.nn.Parameter(tensor, requires_grad=False))
            assert not record.on_device(tensor.clone())


def test_zero_byte_tensor_is_on_the_device_only_if_placed():
    """Red when zero-byte tensors, which share one null address, are confused."""
    record = gpu.Record()
    placed, other = torch.empty(0, 4), torch.empty(0, 4)
    record.place(placed)
    assert record.on_device(placed.view(4, 0))
    assert not record.on_device(other)


def test_memory_reused_after_a_free_is_not_on_the_device():
    """Red when addresses decide: the allocator hands freed ones out again."""
    record = gpu.Record()
    addresses = set()
    for _ in range(50):
        placed = record.place(torch.empty(4096))
        addresses.add(placed.data_ptr())
        del placed
    reused = [torch.empty(4096) for _ in range(50)]
    assert addresses & {tensor.data_ptr() for tensor in reused}
    assert not any(record.on_device(tensor) for tensor in reused)


def test_record_keeps_no_bytes_alive_and_forgets_freed_storages():
    """Red when a load of many GiB grows by what it placed."""
    record = gpu.Record()
    kept = record.place(torch.empty(8))
    gone = record.place(torch.empty(8))
    weak = StorageWeakRef(gone.untyped_storage())
    del gone
    assert weak.expired()
    for _ in range(5000):
        record.place(torch.empty(8))
    assert len(record._placed) <= 1025
    assert record.on_device(kept)
