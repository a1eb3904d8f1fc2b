"""The plan: which route each tensor takes, decided from headers alone."""

from __future__ import annotations

import itertools
import math

import pytest

from loadplan.core import FileHeader, LoadPlanError, Route, TensorHeader, make_plan

_INODES = itertools.count(1)


def header(
    path: str,
    *tensors: tuple[str, str, tuple[int, ...]],
    metadata: dict[str, str] | None = None,
    in_memory: bool = False,
    inode: int | None = None,
) -> FileHeader:
    """A shard with ``(name, dtype, shape)`` tensors packed one after the other."""
    begin, placed = 8, []
    for name, dtype, shape in tensors:
        bits = {"F4": 4, "F6_E2M3": 6, "U8": 8, "F32": 32}[dtype]
        end = begin + math.prod(shape) * bits // 8
        placed.append(TensorHeader(name, dtype, shape, begin, end))
        begin = end
    identity = (1, next(_INODES) if inode is None else inode)
    return FileHeader(path, begin, identity, in_memory, metadata, tuple(placed))


def routes(files: list[FileHeader], **kwargs: object) -> dict[tuple[str, str], Route]:
    plan = make_plan(files, **kwargs)
    return {(e.file.path, e.tensor.name): e.route for e in plan.entries}


@pytest.mark.parametrize(
    ("wanted", "host", "odd", "mixed", "expected"),
    [
        (False, False, False, False, Route.SKIP),
        (False, False, False, True, Route.SKIP),
        (False, False, True, False, Route.SKIP),
        (False, True, False, False, Route.SKIP),
        (False, True, True, True, Route.SKIP),
        (True, True, False, False, Route.HOST),
        (True, True, False, True, Route.HOST),
        (True, True, True, False, Route.HOST),
        (True, False, True, False, Route.READ),
        (True, False, False, True, Route.READ),
        (True, False, True, True, Route.READ),
        (True, False, False, False, Route.STREAM),
    ],
)
def test_routes_are_decided_in_order_skip_host_read_stream(
    wanted: bool, host: bool, odd: bool, mixed: bool, expected: Route
) -> None:
    """The truth table; red when the order of the routes changes."""
    name = "h.x" if host else "x"
    tensors = [(name, "F4" if odd else "U8", (64,))]
    if mixed:
        tensors.append(("h.other", "U8", (64,)))
    found = routes(
        [header("a", *tensors)],
        host_resident_weight_patterns=("h.",),
        wanted_weight=lambda n: n != name or wanted,
    )
    assert found["a", name] is expected


def test_clean_checkpoint_is_streamed_in_the_given_order() -> None:
    """Red when the plan sorts files or takes a clean one off the fast path."""
    plan = make_plan([header("b", ("y", "U8", (4,))), header("a", ("x", "U8", (4,)))])
    assert plan.stream_files == ["b", "a"]
    assert plan.departures() == {}
    assert plan.promised == {"x", "y"}


@pytest.mark.parametrize(
    ("unwanted_bytes", "expected"), [(1, Route.STREAM), (2, Route.READ)]
)
def test_file_is_streamed_whole_up_to_one_percent_unwanted(
    unwanted_bytes: int, expected: Route
) -> None:
    """99 + 1 bytes stream, 99 + 2 do not; red when the limit moves."""
    file = header("a", ("x", "U8", (99,)), ("no", "U8", (unwanted_bytes,)))
    found = routes([file], wanted_weight=lambda name: name == "x")
    assert found == {("a", "x"): expected, ("a", "no"): Route.SKIP}


@pytest.mark.parametrize(
    ("tensor", "metadata"),
    [
        (("odd", "F4", (2,)), None),
        (("odd", "U8", (0, 4)), None),
        (("odd", "U8", (4,)), {"format": "mlx"}),
    ],
    ids=["sub-byte", "zero-byte", "metadata"],
)
def test_odd_file_is_read_and_the_others_are_streamed(
    tensor: tuple[str, str, tuple[int, ...]], metadata: dict[str, str] | None
) -> None:
    """Red when a file that InstantTensor gets wrong is streamed."""
    odd = header("odd", tensor, ("x", "U8", (4,)), metadata=metadata)
    found = routes([odd, header("good", ("y", "U8", (4,)))])
    assert found["odd", "odd"] is found["odd", "x"] is Route.READ
    assert found["good", "y"] is Route.STREAM


def test_unwanted_odd_tensor_keeps_its_file_from_streaming_but_not_from_loading() -> (
    None
):
    """An F6 that nobody wants must not end the load; red when it is looked at."""
    file = header("a", ("x", "U8", (4000,)), ("no", "F6_E2M3", (4,)))
    found = routes([file], wanted_weight=lambda name: name == "x")
    assert found == {("a", "x"): Route.READ, ("a", "no"): Route.SKIP}


@pytest.mark.parametrize("patterns", [(), ("x",)], ids=["device", "host"])
def test_wanted_tensor_that_torch_cannot_hold_is_refused_by_name(
    patterns: tuple[str, ...],
) -> None:
    """Red when an F6 is found out only after the first read."""
    with pytest.raises(LoadPlanError, match=r"a: tensor 'x' has dtype 'F6_E2M3'"):
        make_plan(
            [header("a", ("x", "F6_E2M3", (4,)))],
            host_resident_weight_patterns=patterns,
        )


def test_files_in_memory_beside_disk_go_by_read_where_they_are_fewer_bytes() -> None:
    """Red when both kinds are given to one InstantTensor call, which refuses that."""
    small = header("memory", ("x", "U8", (4,)), in_memory=True)
    large = header("disk", ("y", "U8", (8,)))
    assert routes([small, large])["memory", "x"] is Route.READ
    assert routes([small, large])["disk", "y"] is Route.STREAM
    large = header("memory", ("x", "U8", (16,)), in_memory=True)
    disk = header("disk", ("y", "U8", (8,)))
    assert routes([large, disk])["memory", "x"] is Route.STREAM
    assert routes([large, disk])["disk", "y"] is Route.READ


def test_index_decides_which_copy_counts() -> None:
    """Red when the stale copy wins, or when its file is streamed beside it."""
    stale = header("a", ("x", "U8", (4,)), ("y", "U8", (4000,)))
    owner = header("b", ("x", "F32", (4,)))
    found = routes([stale, owner], weight_map={"x": "b", "y": "a"})
    assert found == {
        ("a", "x"): Route.SKIP,
        # 0.1 % unwanted, but InstantTensor would yield two tensors called x.
        ("a", "y"): Route.READ,
        ("b", "x"): Route.STREAM,
    }


def test_name_without_index_entry_comes_from_the_one_file_that_has_it() -> None:
    """A draft file left out of the index; red when unindexed names are lost."""
    files = [header("a", ("x", "U8", (4,))), header("mtp", ("m", "U8", (4,)))]
    found = routes(files, weight_map={"x": "a"})
    assert found == {("a", "x"): Route.STREAM, ("mtp", "m"): Route.STREAM}


def test_index_entry_for_a_file_that_was_not_selected_is_ignored() -> None:
    """A subfolder is loaded alone; red when the whole index must fit the selection."""
    found = routes([header("a", ("x", "U8", (4,)))], weight_map={"x": "b", "z": "b"})
    assert found == {("a", "x"): Route.STREAM}


def test_same_name_in_two_files_without_index_is_refused_with_both_files() -> None:
    """Red when one of two owners is taken silently."""
    files = [header("a", ("x", "U8", (4,))), header("b", ("x", "U8", (8,)))]
    with pytest.raises(LoadPlanError, match="'x' is in a and in b"):
        make_plan(files)


def test_stale_index_is_refused_with_file_and_tensor() -> None:
    """Red when a promised tensor that its shard lacks passes silently."""
    with pytest.raises(LoadPlanError, match="a: the index promises tensor 'gone'"):
        make_plan([header("a", ("x", "U8", (4,)))], weight_map={"gone": "a"})


def test_two_links_to_one_file_are_read_once() -> None:
    """Red when identity is the path."""
    tensor = ("x", "U8", (4,))
    files = [header("a", tensor, inode=77), header("link", tensor, inode=77)]
    assert make_plan(files).stream_files == ["a"]
    assert routes(files, weight_map={"x": "link"}) == {("a", "x"): Route.STREAM}


def test_checkpoint_without_tensors_is_refused() -> None:
    """Red when an empty checkpoint loads as if it were one."""
    with pytest.raises(LoadPlanError, match="no tensor in 1 file"):
        make_plan([header("empty")])


def test_empty_shard_is_not_given_to_instanttensor() -> None:
    """Red when an empty shard, which ends the library's load, is streamed."""
    plan = make_plan([header("empty"), header("a", ("x", "U8", (4,)))])
    assert plan.stream_files == ["a"]


def test_departures_name_route_reason_tensors_and_bytes() -> None:
    """Red when what leaves the fast path is no longer told."""
    plan = make_plan(
        [header("a", ("h.x", "U8", (8,)), ("y", "U8", (4,)))],
        host_resident_weight_patterns=("h.",),
    )
    totals = {key: (t.tensors, t.nbytes) for key, t in plan.departures().items()}
    assert totals == {
        (Route.HOST, "host-resident"): (1, 8),
        (Route.READ, "shares its file with host-resident tensors"): (1, 4),
    }
