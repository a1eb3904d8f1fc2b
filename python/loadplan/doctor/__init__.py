"""Will this machine carry the load? Every probe tries the thing itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadplan.checkpoint.files import read_checkpoint
from loadplan.doctor import gpu, host, storage
from loadplan.doctor.finding import Finding, Need, Verdict
from loadplan.inspection.loads import Hardware, inspect

__all__ = ["Finding", "Need", "Verdict", "examine", "need_of"]


def examine(need: Need) -> list[Finding]:
    """Run every probe, in the order in which a load meets what they try."""
    return [*gpu.probe(need), *storage.probe(need), *host.probe(need)]


def need_of(
    paths: Sequence[Path],
    *,
    machine: Hardware,
    engram_config: str,
    draft: str | None,
    pin: int,
) -> Need:
    """What loading a checkpoint asks of one host, by its headers.

    Raises:
        LoadPlanError: it cannot be loaded anywhere.
    """
    inspection = inspect(
        paths, machine=machine, engram_config=engram_config, draft=draft
    )
    headers = read_checkpoint(paths).headers
    return Need(
        shard=headers[0].path,
        in_memory=all(file.in_memory for file in headers),
        host_bytes=max(load.plan_host.total for load in inspection.loads),
        gpu_bytes=max(load.plan_gpu.total for load in inspection.loads),
        layout=inspection.placement.host_layout,
        pin=pin,
        ranks=machine.tp // machine.nodes,
    )
