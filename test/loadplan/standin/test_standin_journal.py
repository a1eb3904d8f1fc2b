"""What the stand-ins write down of a load."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loadplan.standin import gpu
from loadplan.standin.journal import Call


def test_call_is_noted_as_it_came(good):
    """Red when the journal shows the sorted list, defaults, or hides a refused call."""
    journal = gpu.Journal()
    stub = gpu.make_module(journal=journal)
    before = tuple(good)
    assert list(before) != sorted(before)
    with stub.safe_open(good, "pt", 0, copy=True, io_depth=4) as opened:
        taken = [name for name, _ in opened.tensors()]
    with pytest.raises(ValueError, match="CUDA"):
        stub.safe_open(good[0], "pt", device="cpu")
    assert journal.calls == [
        Call(before, 0, None, {"copy": True, "io_depth": 4}),
        Call((good[0],), "cpu", None, {}),
    ]
    assert journal.names == taken == ["a", "b", "c"]


@pytest.mark.parametrize("copy", [True, False])
def test_yielded_tensors_and_their_views_are_on_the_device(copy, good):
    """Red when a view of a streamed tensor counts as host memory, or a host one not."""
    journal = gpu.Journal()
    stub = gpu.make_module(journal=journal)
    with stub.safe_open(good, "pt", 0, copy=copy) as opened:
        for _, tensor in opened.tensors():
            assert journal.on_device(tensor)
            assert journal.on_device(tensor.view(torch.uint8)[3:5])
            assert journal.on_device(torch.nn.Parameter(tensor, requires_grad=False))
            assert not journal.on_device(tensor.clone())


def test_zero_byte_tensor_is_on_the_device_only_if_placed():
    """Red when zero-byte tensors, which share one null address, are confused."""
    journal = gpu.Journal()
    placed, other = torch.empty(0, 4), torch.empty(0, 4)
    journal.place(placed)
    assert journal.on_device(placed.view(4, 0))
    assert not journal.on_device(other)


def test_memory_reused_after_a_free_is_not_on_the_device():
    """Red when addresses decide: the allocator hands freed ones out again."""
    journal = gpu.Journal()
    addresses = set()
    # Above 32 MiB each has a mapping of its own, and the next one gets its address.
    for _ in range(10):
        placed = journal.place(torch.empty(12 << 20))
        addresses.add(placed.data_ptr())
        del placed
    reused = [torch.empty(12 << 20) for _ in range(10)]
    assert addresses & {tensor.data_ptr() for tensor in reused}
    assert not any(journal.on_device(tensor) for tensor in reused)


def test_journal_keeps_no_bytes_alive_and_forgets_freed_storages():
    """Red when a load of many GiB grows by what it placed."""
    journal = gpu.Journal()
    kept = journal.place(torch.empty(8))
    gone = journal.place(torch.empty(8))
    weak = StorageWeakRef(gone.untyped_storage())
    del gone
    assert weak.expired()
    for _ in range(5000):
        journal.place(torch.empty(8))
    assert len(journal._placed) <= 1025
    assert journal.on_device(kept)
