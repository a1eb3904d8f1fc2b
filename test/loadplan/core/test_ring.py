"""InstantTensor's ring, against the stub that was compared with the library."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadplan.core.header import FileHeader, LoadPlanError, TensorHeader
from loadplan.core.ring import ring_budget, ring_bytes, small_io_depth
from loadplan.standin import ring as stub

GIB = 1 << 30


# Time says nothing here: other tests run beside this one.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=40))
def test_ring_is_what_the_library_chooses(sizes: list[int]) -> None:
    """Red when our rule and the library's part ways."""
    assert ring_bytes(sizes) == stub.ring_for_tensors(sizes)


def test_no_tensors_need_no_ring() -> None:
    """Red when a plan without a stream is held against the budget."""
    assert ring_bytes([]) == 0


def files(*sizes: int, in_memory: bool = False) -> list[FileHeader]:
    """Shards of one tensor of ``sizes`` bytes each."""
    return [
        FileHeader(
            f"{i}",
            size,
            (0, i),
            in_memory,
            None,
            (TensorHeader("x", "U8", (), 0, size),),
        )
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "world", "depth"),
    [
        ([24], 1, 3),
        ([24], 8, 3),
        ([1 << 30], 1, 129),
        ([1 << 30], 4, 33),
        ([8 << 20] * 10, 1, 20),
        ([4 << 30], 1, None),
        ([4 << 30], 2, None),
        ([5 << 29], 4, 81),
    ],
)
def test_depth_has_room_for_every_read_or_keeps_the_default(
    sizes: list[int], world: int, depth: int | None
) -> None:
    """Red when a small load takes gigabytes, or a large one loses depth."""
    assert small_io_depth(files(*sizes), world_size=world, options={}) == depth


def test_ring_of_files_in_memory_is_never_made_larger() -> None:
    """Its default is small and follows from the cores; red when ours is above it."""
    for sizes, depth in (([24], 3), ([3 << 20], 3), ([1 << 30], None)):
        found = small_io_depth(files(*sizes, in_memory=True), world_size=1, options={})
        assert found == depth


@pytest.mark.parametrize("option", ["io_depth", "buffer_size", "chunk_size", "backend"])
def test_options_and_variables_of_the_user_win(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a size that the user chose is replaced."""
    assert small_io_depth(files(24), world_size=1, options={option: 1}) is None
    assert small_io_depth(files(24), world_size=1, options={option: None}) == 3
    monkeypatch.setenv(f"INSTANTTENSOR_{option.upper()}", "1")
    assert small_io_depth(files(24), world_size=1, options={}) is None


def test_budget_is_half_of_the_free_memory_unless_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when the share that the user gave the library is not ours."""
    assert ring_budget(80 * GIB, {}) == 40 * GIB
    monkeypatch.setenv("INSTANTTENSOR_MAX_FREE_MEM_USAGE", "0.25")
    assert ring_budget(80 * GIB, {}) == 20 * GIB
    assert ring_budget(80 * GIB, {"max_free_mem_usage": 1}) == 80 * GIB


def test_share_that_is_no_number_is_refused_by_its_name() -> None:
    """Red when a typing error ends in a bare ValueError."""
    with pytest.raises(LoadPlanError, match="max_free_mem_usage .* is 'half'"):
        ring_budget(GIB, {"max_free_mem_usage": "half"})
    for share in (-1, 0, 2, math.nan, math.inf, "nan", "-0.5", [], True - 1):
        with pytest.raises(LoadPlanError, match="above 0 and not above 1"):
            ring_budget(GIB, {"max_free_mem_usage": share})
