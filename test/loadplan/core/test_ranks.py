"""Two ranks over gloo: one plan, and failures that all of them hear of."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from files import write_shard
from gloo_ranks import on_ranks

from loadplan.core import ranks
from loadplan.core import read as read  # the module, for its pool
from loadplan.core.header import LoadPlanError, read_header
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan, Route, make_plan
from loadplan.core.ranks import Machine, plan_together, together
from loadplan.core.read import reader_threads

RANKS = 2


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """One folder a rank, as if on two nodes, with the same checkpoint."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    folders[0].mkdir()
    write_shard(folders[0] / "a.safetensors", [("x", "U8", (1000,)), ("y", "U8", (4,))])
    write_shard(folders[0] / "b.safetensors", [("z", "U8", (8,))])
    shutil.copytree(*folders)
    return folders


def plan(nodes: list[Path], rank: int, **choices: object) -> LoadPlan:
    machine = choices.pop("machine", Machine())
    return plan_together(
        sorted(str(path) for path in nodes[rank].glob("*.safetensors")),
        folder=str(nodes[rank]),
        group=dist.group.WORLD,
        machine=lambda: machine,
        decide=functools.partial(decide_routes, **choices),
    )


def routes(nodes: list[Path], rank: int, **choices: object) -> dict[str, str]:
    entries = plan(nodes, rank, **choices).entries
    return {entry.tensor.name: entry.route.value for entry in entries}


def test_least_budget_and_oldest_reader_decide_for_all(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """Red when ranks with different memory make different plans."""
    machines = [Machine(device_budget=10**6), Machine(device_budget=500)]
    found = on_ranks(tmp_path, lambda r: routes(nodes, r, machine=machines[r]))
    expected = {"x": "host", "y": "read", "z": "stream"}
    assert found == [("result", expected)] * RANKS


def test_medium_that_differs_by_rank_is_known_to_both(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """One node has a shard in memory; red when only that rank routes around it."""
    memory = Path("/dev/shm", f"loadplan-{os.getpid()}")
    shutil.copytree(nodes[1], memory)
    try:
        (memory / "a.safetensors").unlink()
        (memory / "a.safetensors").symlink_to(nodes[1] / "a.safetensors")
        found = on_ranks(tmp_path, lambda rank: routes([nodes[0], memory], rank))
    finally:
        shutil.rmtree(memory)
    assert found == [("result", {"x": "stream", "y": "stream", "z": "read"})] * RANKS


def test_failure_in_one_ranks_header_pass_raises_on_all(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """Red when the healthy rank goes on alone into a collective read."""
    (nodes[1] / "b.safetensors").write_bytes(b"broken")
    healthy, broken = on_ranks(tmp_path, lambda rank: routes(nodes, rank))
    assert broken[0] == "LoadPlanError" and "refused by safetensors" in broken[1]
    assert healthy[0] == "LoadPlanError"
    assert healthy[1].startswith("rank 1 of 2 failed: LoadPlanError: ")
    assert "b.safetensors: refused by safetensors" in healthy[1]


def test_broken_index_on_one_node_raises_on_all(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """Red when what one rank reads before the exchange leaves the other waiting."""
    (nodes[1] / "model.safetensors.index.json").write_text("{")
    healthy, broken = on_ranks(tmp_path, lambda rank: routes(nodes, rank))
    assert broken[0] == "LoadPlanError" and "weight_map" in broken[1]
    assert healthy[1].startswith("rank 1 of 2 failed: LoadPlanError: ")


@pytest.mark.parametrize("change", ["name", "list", "size", "patterns"])
def test_difference_between_ranks_is_an_error_that_names_it(
    tmp_path: Path, nodes: list[Path], change: str
) -> None:
    """Red when ranks read different tensors together, which hangs or mixes bytes."""
    b = nodes[1] / "b.safetensors"
    if change == "name":
        write_shard(b, [("w", "U8", (8,))])
    elif change == "list":
        b.unlink()
    elif change == "size":
        write_shard(b, [("z", "U8", (9,))])
    patterns = [(), ("z",) if change == "patterns" else ()]
    found = on_ranks(
        tmp_path,
        lambda rank: routes(nodes, rank, host_resident_weight_patterns=patterns[rank]),
    )
    assert found[0] == found[1]
    kind, text = found[0]
    assert kind == "LoadPlanError"
    assert "rank 1 would load something else than rank 0" in text
    assert "'b.safetensors'" in text


def stream_nothing(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        for tensor in read_header(path).tensors:
            yield tensor.name, torch.empty(0)


def load(nodes: list[Path], rank: int, *, broken: int | None) -> list[str]:
    made = plan(nodes, rank, host_resident_weight_patterns=("x",))
    assert {entry.route for entry in made.entries} >= {Route.READ, Route.STREAM}
    if rank == broken:
        os.truncate(nodes[rank] / "a.safetensors", 200)
    weights = run_load(
        made,
        stream_files=stream_nothing,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
    )
    return sorted(name for name, _ in weights)


def test_read_that_fails_on_one_rank_raises_on_all_after_the_last(
    tmp_path: Path, nodes: list[Path]
) -> None:
    """Red when the healthy rank ends its load as if all were well."""
    healthy, broken = on_ranks(tmp_path, functools.partial(load, nodes, broken=1))
    assert broken[0] == "ShortFileError"
    assert healthy[0] == "LoadPlanError"
    assert "rank 1 of 2 failed: ShortFileError" in healthy[1]


def test_ranks_that_agree_load_the_same(tmp_path: Path, nodes: list[Path]) -> None:
    """Red when the exchange itself gets in the way."""
    found = on_ranks(tmp_path, functools.partial(load, nodes, broken=None))
    assert found == [("result", ["x", "y", "z"])] * RANKS


def test_rank_that_began_anew_is_not_taken_for_a_peer(tmp_path: Path) -> None:
    """A rollback beside the end of a load; red when both believe that all is well."""
    steps = ["the end of the load", "the headers"]
    found = on_ranks(tmp_path, lambda r: together(dist.group.WORLD, steps[r], dict))
    for kind, text in found:
        assert kind == "LoadPlanError"
        assert "one of them ended its load early" in text


def test_own_failure_is_told_when_a_peer_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange itself ends with an error; red when that hides the first cause."""

    def lost(*args: object, **kwargs: object) -> None:
        raise RuntimeError("timed out")

    def meet(rank: int) -> None:
        monkeypatch.setattr(dist, "all_gather_object", lost)
        missing = str(tmp_path / "gone.safetensors")
        together(dist.group.WORLD, "the headers", lambda: rank or read_header(missing))

    (own, text), (other, _) = on_ranks(tmp_path, meet)
    assert (own, other) == ("LoadPlanError", "RuntimeError")
    assert "no such file" in text


def test_threads_are_shared_between_ranks_unless_each_has_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when 8 ranks start 16 threads each, or a rank with its own cores has few."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    threads = []
    for cores, count in ((128, 1), (128, 8), (16, 8), (128, 64)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        threads.append(reader_threads(count))
    assert threads == [16, 16, 16, 4]


def test_alone_there_is_no_step(
    nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a single process needs torch.distributed."""
    monkeypatch.setattr(dist, "all_gather_object", None)
    made = plan_together(
        [str(nodes[0] / "b.safetensors")],
        folder=str(nodes[0]),
        group=None,
        machine=Machine,
        decide=decide_routes,
    )
    assert made == make_plan([read_header(str(nodes[0] / "b.safetensors"))])
    with pytest.raises(LoadPlanError, match="no such file"):
        plan_together(
            ["gone"], folder=".", group=None, machine=Machine, decide=decide_routes
        )


def test_reader_of_whole_files_is_the_same_on_all_ranks(
    tmp_path: Path, nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOADPLAN_STREAM_READER=read on one; red when ranks go different ways."""

    def choose(rank: int) -> object:
        if rank == 1:
            os.environ["LOADPLAN_STREAM_READER"] = "read"
        return routes(nodes, rank)

    monkeypatch.delenv("LOADPLAN_STREAM_READER", raising=False)
    for kind, text in on_ranks(tmp_path, choose):
        assert kind == "LoadPlanError"
        assert "rank 1 would load something else than rank 0" in text


def test_unknown_reader_of_whole_files_is_refused(
    nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a typing error silently keeps the default."""
    monkeypatch.setenv("LOADPLAN_STREAM_READER", "mmap")
    with pytest.raises(LoadPlanError, match="'mmap', expected 'instanttensor' or"):
        plan_together(
            [str(nodes[0] / "b.safetensors")],
            folder=str(nodes[0]),
            group=None,
            machine=Machine,
            decide=decide_routes,
        )


def test_absent_rank_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes late; red when rank 0 waits without a word, or names another."""
    monkeypatch.setattr(ranks, "_PATIENCE_S", 0.2)

    def meet(rank: int) -> list[str]:
        said: list[str] = []
        monkeypatch.setattr(ranks.logger, "warning", lambda t, *a: said.append(t % a))
        group = dist.group.WORLD
        together(group, "the headers", lambda: None)
        if rank == 1:
            time.sleep(1.0)
        together(group, "the plan", lambda: None)
        return said

    (_, waiting), (_, late) = on_ranks(tmp_path, meet)
    assert len(waiting) == 1 and late == []
    assert "at 'the plan' for rank 1 of 2" in waiting[0]
