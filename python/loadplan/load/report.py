"""What a load tells of itself. Sizes are in bytes, times in seconds."""

from __future__ import annotations

import dataclasses

from loadplan.load.peaks import Peaks


@dataclasses.dataclass(frozen=True, slots=True)
class RouteReport:
    """What one route moved; ``seconds`` is the time its tensors took to arrive."""

    files: int
    tensors: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class DefaultReport:
    """The same load through the engine's default loader, tensors to the GPU included.

    ``seconds`` and ``peaks`` are of a load that checks nothing, ``loadplan_seconds`` of
    one like it through loadplan. ``same`` tells whether every byte is the same.
    """

    seconds: float
    peaks: Peaks
    same: bool
    loadplan_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load. ``stock_device_bytes`` is what whole files would put there.

    ``loading_seconds`` is the time until the last tensor had arrived, without checking;
    ``seconds`` is with it. ``table_bytes`` were in host memory before. ``digest`` is
    over every tensor that arrived, ``wrong`` names those whose bytes differ from
    ``reference``, those missing, those that nobody expected, and files of a synthetic
    checkpoint whose header or text is not what was written.
    """

    engine: str
    reader: str
    routes: dict[str, RouteReport]
    stock_device_bytes: int
    table_bytes: int
    loading_seconds: float
    seconds: float
    peaks: Peaks
    default: DefaultReport | None
    digest: str
    reference: str
    wrong: tuple[str, ...]
