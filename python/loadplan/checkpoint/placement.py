"""``--engram-config`` without an engine: where the Engram tables will live.

The rules are those of the engine's own check, which a test compares with this one.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from loadplan.core.header import LoadPlanError

_CHOICES = {
    "placement": ("gpu", "cpu"),
    "replication": ("none", "per_node"),
    "lookup": ("collective", "peer_read"),
}
_SHOWN = 200
_TABLES = ".engram.embed."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the tables live and how often; the fields are the argument's keys."""

    placement: str = "gpu"
    replication: str = "none"
    lookup: str = "collective"

    @property
    def on_host(self) -> bool:
        return self.placement == "cpu"

    @property
    def host_layout(self) -> str | None:
        """What the engine calls the tables' layout in host memory, None on the GPU."""
        if not self.on_host:
            return None
        return "shared" if self.replication == "per_node" else "per_rank"

    @property
    def host_resident_weight_patterns(self) -> tuple[str, ...]:
        """What an engine declares for this placement."""
        return (_TABLES,) if self.on_host else ()

    def is_on_host(self, name: str) -> bool:
        return self.on_host and _TABLES in name

    def __str__(self) -> str:
        where = "on the GPUs, each holds its rows"
        if self.replication == "per_node":
            where = "in host memory, one whole table on each host"
        elif self.on_host:
            where = "in host memory, each rank holds its rows"
        return where + (", read by peers" if self.lookup == "peer_read" else "")


def parse_placement(text: str, *, nodes: int) -> Placement:
    """Read the JSON object of ``--engram-config`` for a group that spans ``nodes``.

    Raises:
        LoadPlanError: not such an object, or a combination that the engine refuses.
    """
    try:
        given = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _refusal(text, f"not JSON ({error})") from error
    if not isinstance(given, dict):
        raise _refusal(text, f"a {type(given).__name__}, no object")
    for key, value in given.items():
        if key not in _CHOICES:
            raise _refusal(text, f"unknown key {key!r}")
        if value not in _CHOICES[key]:
            raise _refusal(text, f"{key} is {value!r}")
    placement = Placement(**given)
    per_node = placement.replication == "per_node"
    if placement.lookup == "peer_read" and (placement.on_host or per_node):
        raise _refusal(text, 'lookup "peer_read" needs placement "gpu" and no copies')
    if per_node and not placement.on_host:
        raise _refusal(text, 'replication "per_node" needs placement "cpu"')
    if per_node and nodes > 1:
        raise _refusal(
            text, f'replication "per_node" needs the group on one node, not on {nodes}'
        )
    return placement


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) != len(pairs):
        raise ValueError("a key is given twice")
    return given


def _refusal(text: str, problem: str) -> LoadPlanError:
    choices = ", ".join(
        f'"{key}" ({" or ".join(values)})' for key, values in _CHOICES.items()
    )
    shown = repr(text)
    if len(shown) > _SHOWN:
        shown, problem = f"{shown[:_SHOWN]}...", problem[:_SHOWN]
    return LoadPlanError(
        f"--engram-config: {shown}: {problem}; expected a JSON object with the "
        f"optional keys {choices}"
    )
