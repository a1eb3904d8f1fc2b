"""`--engram-config`: where DeepSeek-V4.1's Engram tables live and how rows are read.

One set of rules serves the startup check, the model build and the log line. Nothing
is cached: one process may publish one engine's arguments after another's.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any, Literal, Optional

import msgspec

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_model, get_parallel, get_platform
from sglang.srt.utils import log_info_on_rank0

logger = logging.getLogger(__name__)


class EngramConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """The JSON object given as `--engram-config`."""

    placement: Literal["gpu", "cpu"] = "gpu"
    replication: Literal["none", "per_node"] = "none"
    lookup: Literal["collective", "peer_read"] = "collective"


class EngramTables(EngramConfig, frozen=True, kw_only=True):
    """A valid configuration and what the model builds for it."""

    # _HostTable's layout; None for tables in device memory.
    host_layout: Optional[str]
    peer_shards: bool

    def __str__(self) -> str:
        memory = "peer shards" if self.peer_shards else "device memory"
        if self.host_layout is not None:
            memory = f"host layout {self.host_layout}"
        return (
            f"placement={self.placement}, replication={self.replication}, "
            f"lookup={self.lookup} ({memory})"
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is given twice")
    return fields


def parse_engram_config(raw: str) -> EngramConfig:
    """Parse the argument; a ValueError shows what was given and what is accepted."""
    try:
        fields = json.loads(raw, object_pairs_hook=_unique_keys)
        return msgspec.convert(fields, EngramConfig)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise ValueError(
            f"--engram-config: cannot use {raw!r}: {e}; expected a JSON object with "
            'the optional keys "placement" ("gpu" or "cpu"), "replication" ("none" or '
            '"per_node") and "lookup" ("collective" or "peer_read")'
        ) from e


def tables_from_config(
    config: EngramConfig, *, tp_size: int, nnodes: int, pp_size: int, cuda: bool
) -> EngramTables:
    """Apply the rules for one engine; environment variables are not looked at."""
    on_host, per_node = config.placement == "cpu", config.replication == "per_node"
    peer_read = config.lookup == "peer_read"
    # A pipeline stage is one TP group; the nodes are dealt out to the stages.
    nodes = max(nnodes // pp_size, 1)
    rule = None
    if peer_read and (on_host or per_node):
        rule = (
            'lookup "peer_read" needs placement "gpu" and replication "none"; use '
            'lookup "collective"'
        )
    elif per_node and not on_host:
        rule = 'replication "per_node" needs placement "cpu"; use replication "none"'
    elif peer_read and not cuda:
        rule = 'lookup "peer_read" needs CUDA; use lookup "collective"'
    elif per_node and nodes > 1:
        rule = (
            'replication "per_node" needs each TP group on one node, here it lies on '
            f'{nodes} nodes; use replication "none"'
        )
    if rule is not None:
        given = msgspec.json.encode(config).decode()
        raise ValueError(f"--engram-config: cannot use {given}: {rule}")
    return EngramTables(
        **msgspec.structs.asdict(config),
        host_layout=("shared" if per_node else "per_rank") if on_host else None,
        peer_shards=peer_read and tp_size > 1,
    )


def _refuse_contradicting_env(tables: EngramTables) -> None:
    on_host, peer_read = tables.placement == "cpu", tables.lookup == "peer_read"
    checks = [
        ("placement", envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE, on_host),
        ("lookup", envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS, peer_read),
    ]
    if on_host:
        layout = envs.SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT
        checks.append(("replication", layout, tables.host_layout))
    for key, env, wanted in checks:
        if env.is_set() and env.get() != wanted:
            raise ValueError(
                f'--engram-config: {key} is "{getattr(tables, key)}" but '
                f"{env.name}={os.environ[env.name]!r} is set and contradicts it; "
                f"unset {env.name} or change {key}"
            )


def _tables_from_env() -> EngramTables:
    peer_shards = (
        envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS.get()
        and get_parallel().tp_size > 1
        and get_platform().is_cuda
    )
    host_layout = None
    if envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE.get() and not peer_shards:
        host_layout = envs.SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT.get()
    return EngramTables(
        placement="gpu" if host_layout is None else "cpu",
        replication="per_node" if host_layout == "shared" else "none",
        lookup="peer_read" if peer_shards else "collective",
        host_layout=host_layout,
        peer_shards=peer_shards,
    )


def _resolve(raw: Any, *, parallel: Any, cuda: bool) -> EngramTables:
    tables = tables_from_config(
        parse_engram_config(raw),
        tp_size=parallel.tp_size,
        nnodes=parallel.nnodes,
        pp_size=parallel.pp_size,
        cuda=cuda,
    )
    _refuse_contradicting_env(tables)
    return tables


def validate_engram_config(server_args: Any) -> None:
    """Resolution step: refuse a bad `--engram-config` before a worker is spawned."""
    cfg, platform = resolving_view(server_args), get_platform()
    if cfg.engram_config is not None:
        # A Ray driver may have no GPU; there the requested device decides.
        asked = str(cfg.device).startswith("cuda") and not platform.is_hip
        _resolve(cfg.engram_config, parallel=cfg, cuda=platform.is_cuda or asked)


def resolve_engram_tables() -> EngramTables:
    """Resolve from the published arguments, else from the environment variables."""
    try:
        raw = get_model().engram_config
    except (ValueError, AttributeError):
        raw = None  # No published runtime context (unit tests, offline tools).
    if raw is None:
        return _tables_from_env()
    return _resolve(raw, parallel=get_parallel(), cuda=get_platform().is_cuda)


def log_engram_tables() -> None:
    """Log the resolved configuration on TP rank 0; the first Engram layer calls it."""
    log_info_on_rank0(logger, f"DeepSeek-V4.1 Engram tables: {resolve_engram_tables()}")


def engram_host_resident_patterns() -> Optional[tuple[str, ...]]:
    """Checkpoint names of the tables while they are placed on the host, else None."""
    if resolve_engram_tables().host_layout is None:
        return None
    return (".engram.embed.",)
