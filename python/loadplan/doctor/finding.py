"""What one probe found, and what the load needs that it was tried for."""

from __future__ import annotations

import dataclasses
import enum


class Verdict(enum.Enum):
    """What a finding means for the load."""

    OK = "ok"
    SLOW = "slow"  # it works, worse than it could
    FAILS = "fails"  # it cannot work
    UNTRIED = "not tried"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``change`` is empty where nothing needs changing."""

    about: str
    tried: str
    result: str
    verdict: Verdict
    means: str
    change: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the load asks of a machine; sizes in bytes, None where nobody said.

    ``shard`` is a file of the checkpoint, ``in_memory`` tells whether all files lie
    there. ``host_bytes`` and ``gpu_bytes`` are the peak of a host and of a GPU.
    ``layout`` is how the tables lie in host memory (``per_rank``, ``shared``; None: on
    the GPU), ``pin`` what to register with CUDA as a trial, ``ranks`` the processes of
    a host.
    """

    shard: str | None = None
    in_memory: bool = False
    host_bytes: int | None = None
    gpu_bytes: int | None = None
    layout: str | None = "per_rank"
    pin: int = 1 << 30
    ranks: int = 1
