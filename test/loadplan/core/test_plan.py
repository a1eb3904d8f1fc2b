"""The plan: which route each tensor takes, decided from headers alone."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from loadplan.core.header import FileHeader, LoadPlanError, TensorHeader
from loadplan.core.loading import decide_routes
from loadplan.core.plan import Route, UnloadableTensorError, make_plan
from loadplan.core.ranks import Machine, file_digests

_INODES = itertools.count(1)


def header(
    path: str,
    *tensors: tuple[str, str, tuple[int, ...]],
    metadata: dict[str, str] | None = None,
    in_memory: bool | None = False,
    inode: int | None = None,
) -> FileHeader:
    """A shard with ``(name, dtype, shape)`` tensors packed one after the other."""
    begin, placed = 8, []
    for name, dtype, shape in tensors:
        bits = {"F4": 4, "F6_E2M3": 6, "F32": 32}.get(dtype, 8)
        end = begin + math.prod(shape) * bits // 8
        placed.append(TensorHeader(name, dtype, shape, begin, end))
        begin = end
    identity = (1, next(_INODES) if inode is None else inode)
    return FileHeader(path, begin, identity, in_memory, metadata, tuple(placed))


def routes(files: list[FileHeader], **kwargs: object) -> dict[tuple[str, str], Route]:
    plan = decide_routes(files, **kwargs)
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
    message = r"a: tensor 'x' has dtype 'F6_E2M3'"
    with pytest.raises(UnloadableTensorError, match=message) as raised:
        make_plan(
            [header("a", ("x", "F6_E2M3", (4,)))],
            host_resident_weight_patterns=patterns,
        )
    assert raised.value.path == "a"


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
    files = [header("link", tensor, inode=77), header("a", tensor, inode=77)]
    # The same one on every rank, in whatever order the ranks have them.
    assert make_plan(files).stream_files == make_plan(files[::-1]).stream_files == ["a"]
    assert routes(files, weight_map={"x": "link"}) == {("a", "x"): Route.STREAM}
    stale = header("c", ("x", "F32", (4,)))
    found = routes([*files, stale], weight_map={"x": "link"})
    assert found == {("a", "x"): Route.STREAM, ("c", "x"): Route.SKIP}


def test_other_file_with_the_same_inode_is_not_lost() -> None:
    """Some network file systems invent inodes; red when the number alone decides."""
    files = [
        header("a", ("x", "U8", (4,)), inode=77),
        header("b", ("y", "U8", (4,)), inode=77),
    ]
    plan = make_plan(files)
    assert plan.promised == {"x", "y"}
    assert plan.stream_files == ["a", "b"]


def test_bare_string_as_patterns_is_refused() -> None:
    """Red when every letter of it becomes a pattern and all stays on the host."""
    with pytest.raises(LoadPlanError, match="expected a tuple of strings"):
        make_plan([header("a", ("x", "U8", (4,)))], host_resident_weight_patterns=".e.")


@pytest.mark.parametrize("patterns", [("",), ("x", ""), (None,), (b"x",), b"x", (1,)])
def test_pattern_that_is_none_is_refused(patterns: object) -> None:
    """Red when "" keeps everything on the host, or bytes end in an AttributeError."""
    with pytest.raises(LoadPlanError, match="host_resident_weight_patterns is"):
        make_plan(
            [header("a", ("x", "U8", (4,)))], host_resident_weight_patterns=patterns
        )


def test_unwanted_name_in_two_files_is_nobodys_concern() -> None:
    """Two drafts' files share a name that this model drops; red when it is an error."""
    files = [
        header("a", ("x", "U8", (4,)), ("same", "U8", (4,))),
        header("b", ("y", "U8", (4,)), ("same", "U8", (4,))),
    ]
    found = routes(files, wanted_weight=lambda name: name != "same")
    assert found["a", "same"] is found["b", "same"] is Route.SKIP


def test_pattern_is_a_substring_or_a_regular_expression() -> None:
    """Red when the letters of a substring count as an expression, or the reverse."""
    names = ["a.b", "axb", "t.1.weight", "t.x.weight", "t.1.weight_scale"]
    files = [header("f", *((name, "U8", (4,)) for name in names))]
    patterns = ("a.b", re.compile(r"t\.[0-9]+\.weight$"))
    found = routes(files, host_resident_weight_patterns=patterns)
    on_host = [name for (_, name), route in found.items() if route is Route.HOST]
    assert on_host == ["a.b", "t.1.weight"]


def test_file_with_a_weight_that_some_ranks_leave_out_is_read() -> None:
    """Red when ranks that want different tensors meet in one collective read."""
    files = [
        header("mixed", ("expert.1", "U8", (4,)), ("dense", "U8", (4,))),
        header("clean", ("other", "U8", (4,))),
    ]
    plan = decide_routes(
        files, obstacles=lambda files: {"mixed": "some ranks leave a part out"}
    )
    assert plan.stream_files == ["clean"]
    assert [e.tensor.name for e in plan.of(Route.READ)] == ["expert.1", "dense"]
    # Each rank drops its own part later: the plan is the same on all of them.
    assert plan.promised == {"expert.1", "dense", "other"}


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
        (Route.READ, "shares its file with tensors that stay on the host"): (1, 4),
    }


def test_tensor_larger_than_the_budget_stays_on_the_host() -> None:
    """A 91.5 GiB table for a 96 GB device; red when it is streamed or read whole."""
    files = [
        header("a", ("table", "U8", (1000,)), ("x", "U8", (4,))),
        header("b", ("y", "U8", (4,))),
    ]
    assert set(routes(files).values()) == {Route.STREAM}
    found = routes(files, allowed=Machine(device_budget=999))
    assert found["a", "table"] is Route.HOST
    assert found["a", "x"] is Route.READ
    assert found["b", "y"] is Route.STREAM
    assert (
        routes(files, allowed=Machine(device_budget=10**6))["a", "table"]
        is Route.STREAM
    )


def test_tensor_larger_than_the_budget_is_not_read_from_an_odd_file_either() -> None:
    """Red when only the stream is held against the budget."""
    file = header("a", ("table", "U8", (1000,)), ("odd", "F4", (2,)))
    assert (
        routes([file], allowed=Machine(device_budget=999))["a", "table"] is Route.HOST
    )


def test_ring_for_the_whole_sequence_decides_not_the_largest_tensor() -> None:
    """Three of 400 B need a ring of 1200 B; red when 1000 B seem enough for them."""
    files = [header(name, (name, "U8", (400,))) for name in ("c", "a", "b")]
    files.append(header("d", ("small", "U8", (4,))))
    assert set(routes(files, allowed=Machine(device_budget=1200)).values()) == {
        Route.STREAM
    }
    found = routes(files, allowed=Machine(device_budget=1000))
    assert found.pop(("d", "small")) is Route.STREAM
    assert set(found.values()) == {Route.HOST}


def test_many_tensors_that_are_too_large_are_planned_at_once() -> None:
    """A device that is nearly full; red when each of 20,000 costs its own round."""
    tensors = [(f"expert{i}", "U8", (400,)) for i in range(20_000)]
    found = routes([header("a", *tensors)], allowed=Machine(device_budget=1000))
    assert set(found.values()) == {Route.HOST}


def test_old_instanttensor_gets_no_file_that_it_refuses() -> None:
    """0.1.9 refuses unaligned and FNUZ tensors; red when it is given them."""
    files = [
        header("unaligned", ("byte", "U8", (1,)), ("x", "F32", (1,))),
        header("fnuz", ("y", "F8_E4M3FNUZ", (8,))),
        header("good", ("z", "F32", (2,))),
    ]
    assert set(routes(files).values()) == {Route.STREAM}
    found = routes(files, allowed=Machine(old_reader=True))
    assert found["unaligned", "x"] is found["fnuz", "y"] is Route.READ
    assert found["good", "z"] is Route.STREAM


def test_file_on_media_that_differ_by_rank_is_read() -> None:
    """Ranks would choose different backends; red when they stream it together."""
    files = [
        header("a", ("x", "U8", (4,)), in_memory=None),
        header("b", ("y", "U8", (4,))),
    ]
    assert routes(files) == {("a", "x"): Route.READ, ("b", "y"): Route.STREAM}


def test_digest_tells_size_header_and_route() -> None:
    """What ranks compare; red when a difference in one of them does not show."""
    plain = ("x", "U8", (4,))
    digests = [
        file_digests(make_plan(files, **choices))["a"]
        for files, choices in (
            ([header("a", plain)], {}),
            ([header("a", plain)], {"host_resident_weight_patterns": ("x",)}),
            ([header("a", ("x", "U8", (2, 2)))], {}),
            ([header("a", ("x", "F8_E4M3", (4,)))], {}),
            ([header("a", ("y", "U8", (4,)))], {}),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert file_digests(make_plan([header("a", plain)]))["a"] == digests[0]
