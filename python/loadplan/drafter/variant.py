"""Put a variant together: the checkpoint with another head, and a draft's own.

Shards that nobody rewrites are hard links to the source's. Everything else is a file of
its own, so that no later step can reach the source through it. The variant is made
beside its place and renamed when it is whole and verified.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loadplan.core import VERSION
from loadplan.core.header import LoadPlanError
from loadplan.drafter import (
    checkpoint,
    draft,
    files,
    head,
    quantize,
    record,
    safetensors_file,
    scheme,
    verify,
)

# Of the JSON and the draft's files that are written anew, at most.
_SMALL = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of each file of the source, by name; see :func:`make_plan`.

    ``copies`` also has the shards that cannot be linked. ``copied_bytes`` is what the
    variant takes on disk beside its links.
    """

    source: checkpoint.Checkpoint
    head: head.Head
    new_head: quantize.QuantizedHead
    draft_head: tuple[Path, quantize.QuantizedHead] | None
    links: tuple[str, ...]
    copies: tuple[str, ...]
    rewritten: tuple[str, ...]
    left_out: tuple[str, ...]
    copied_bytes: int


def make_plan(
    source: Path,
    out: Path,
    new_head: Path,
    *,
    draft_head: Path | None = None,
    copy_links: bool = False,
    head_name: str | None = None,
) -> Plan:
    """Decide and check everything; nothing is written.

    ``copy_links`` allows to copy shards that lie on another file system.

    Raises:
        LoadPlanError: the paths, the heads or the space are not fit.
    """
    files.check_new(out, what="the variant")
    _check_apart(source, out)
    found = checkpoint.read_checkpoint(source)
    where = head.find_head(found, head_name)
    unquantised, _ = head.read_float_head(found, where)
    own = _read_head(new_head, where, unquantised, is_draft=False)
    drafts = None
    if draft_head is not None:
        held = _read_head(draft_head, where, unquantised, is_draft=True)
        drafts = (draft_head, held)
    left_out = {name for name in found.names if checkpoint.is_backup(name)}
    if drafts is not None:
        if inside := draft.indexed_ids(found):
            raise LoadPlanError(
                f"{source}: the index has a draft's ids already, {inside}, expected "
                "none: an engine would use them with the new rows; leave out "
                "--draft-head or take them from the index"
            )
        left_out |= set(draft.draft_files(found))
    written = {checkpoint.CONFIG, checkpoint.QUANTIZATION_CONFIG, checkpoint.INDEX}
    links, copies = [], []
    for name in sorted(set(found.names) | set(found.headers)):
        header = found.headers.get(name)
        if name in left_out or name in written or name == checkpoint.RECORD:
            continue
        if name in where.shards:
            continue
        if header is None or checkpoint.may_be_rewritten(header):
            copies.append(name)
        else:
            links.append(name)
    device = os.stat(out.absolute().parent).st_dev
    apart = [name for name in links if os.stat(found.path(name)).st_dev != device]
    if apart:
        size = sum(found.headers[name].size for name in apart)
        if not copy_links:
            raise LoadPlanError(
                f"{out}: on another file system than {len(apart)} shards of {source}, "
                f"{size} B, which can only be linked on their own; name a folder "
                "there, or copy them by --copy"
            )
        links = [name for name in links if name not in apart]
        copies += apart
    copied = sum(os.stat(found.path(n)).st_size for n in (*copies, *where.shards))
    if draft_head is not None:
        copied += draft_head.stat().st_size
    plan = Plan(
        source=found,
        head=where,
        new_head=own,
        draft_head=drafts,
        links=tuple(links),
        copies=tuple(sorted(copies)),
        rewritten=where.shards,
        left_out=tuple(sorted(left_out)),
        copied_bytes=copied + new_head.stat().st_size,
    )
    what = f"the variant's own files ({plan.copied_bytes} B)"
    files.check_space(out.absolute().parent, plan.copied_bytes + _SMALL, what=what)
    return plan


def build(
    plan: Plan,
    out: Path,
    *,
    start: Callable[[str, int], files.Progress] = lambda step, total: files.no_progress,
) -> list[verify.Result]:
    """Make the variant ``out`` as planned; return what verified it.

    Raises:
        LoadPlanError: a check failed or the source changed meanwhile; nothing is left.
    """
    source = plan.source.folder
    size = sum(plan.source.path(name).stat().st_size for name in plan.source.names)
    before = record.snapshot(source, progress=start("Hashing the source", size))
    folder = files.fresh_folder(files.partial(out))
    try:
        _fill(plan, folder, start("Writing", plan.copied_bytes))
        _write_record(plan, folder, before)
        results = verify.verify(folder, source)
        if failed := [result for result in results if not result.ok]:
            said = "; ".join(f"{result.name}: {result.detail}" for result in failed)
            raise LoadPlanError(
                f"{out}: the variant would fail {len(failed)} of {len(results)} checks "
                f"and was not kept: {said}"
            )
        for parent, _, _ in os.walk(folder):
            files.sync_folder(Path(parent))
        # An empty folder would be replaced silently.
        files.check_new(out, what="the variant")
        os.rename(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    files.sync_folder(out.absolute().parent)
    return results


def _fill(plan: Plan, folder: Path, progress: files.Progress) -> None:
    source = plan.source
    for name in (*plan.links, *plan.copies, *plan.rewritten):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in plan.links:
        # What a cache's link points to: the link itself breaks when the cache moves.
        os.link(os.path.realpath(source.path(name)), folder / name)
    for name in plan.copies:
        files.copy(source.path(name), folder / name, progress=progress)
    for shard in plan.rewritten:
        _rewrite(plan, shard, folder / shard, progress)
    _write_index(plan, folder)
    _write_configs(plan, folder)
    if plan.draft_head is not None:
        path, held = plan.draft_head
        assert held.ids is not None
        draft.write(folder, path, held.ids)


def _rewrite(plan: Plan, shard: str, out: Path, progress: files.Progress) -> None:
    """The shard with the new head in place of the old one, all else byte for byte."""
    header = plan.source.headers[shard]
    path = plan.source.path(shard)
    old = {tensor.name for tensor in plan.head.tensors.values()}
    kept = [t for t in header.tensors if t.name not in old]
    pieces = [safetensors_file.file_piece(path, tensor) for tensor in kept]
    if shard == plan.head.shards[0]:
        pieces += [
            safetensors_file.tensor_piece(f"{plan.head.name}.{name}", tensor)
            for name, tensor in plan.new_head.tensors.items()
        ]
        if "bias" in plan.head.tensors:
            bias = plan.head.tensors["bias"]
            home = plan.source.path(plan.source.weight_map[bias.name])
            pieces.append(safetensors_file.file_piece(home, bias))
    metadata = header.metadata or {}
    mode = path.stat().st_mode & 0o7777
    safetensors_file.write(out, pieces, metadata=metadata, mode=mode, progress=progress)


def _write_index(plan: Plan, folder: Path) -> None:
    """The source's index with the new head; one is made where there was none.

    Without an index an engine would read every safetensors file, a draft's too.
    """
    path = plan.source.path(checkpoint.INDEX)
    index: dict[str, Any] = {"metadata": {}}
    if plan.source.has_index:
        index = files.read_json(path, what="an index")
    old = {tensor.name for tensor in plan.head.tensors.values()}
    weight_map = {
        name: shard for name, shard in plan.source.weight_map.items() if name not in old
    }
    sizes = {
        tensor.name: tensor.end - tensor.begin
        for header in plan.source.headers.values()
        for tensor in header.tensors
    }
    home = plan.head.shards[0]
    total = sum(sizes[name] for name in weight_map)
    for name, tensor in plan.new_head.tensors.items():
        weight_map[f"{plan.head.name}.{name}"] = home
        total += tensor.numel() * tensor.element_size()
    if "bias" in plan.head.tensors:
        name = plan.head.tensors["bias"].name
        weight_map[name] = home
        total += sizes[name]
    index.setdefault("metadata", {})
    index["metadata"] = {**index["metadata"], "total_size": total}
    index["weight_map"] = dict(sorted(weight_map.items()))
    mode = path.stat().st_mode & 0o7777 if plan.source.has_index else None
    files.write_json(folder / checkpoint.INDEX, index, mode=mode)


def _write_configs(plan: Plan, folder: Path) -> None:
    source = plan.source
    own = scheme.quantization_config(source.config)
    new = scheme.with_head(own, plan.head.name, plan.new_head.scheme)
    config = {k: v for k, v in source.config.items() if k != "compression_config"}
    config["quantization_config"] = new
    path = source.path(checkpoint.CONFIG)
    mode = path.stat().st_mode & 0o7777
    files.write_json(folder / checkpoint.CONFIG, config, mode=mode)
    beside = source.path(checkpoint.QUANTIZATION_CONFIG)
    if beside.is_file():
        mode = beside.stat().st_mode & 0o7777
        name = folder / checkpoint.QUANTIZATION_CONFIG
        files.write_json(name, new, mode=mode)


def _write_record(plan: Plan, folder: Path, before: dict[str, dict[str, Any]]) -> None:
    about = {
        "loadplan": VERSION,
        "head": plan.head.name,
        "quantized": plan.new_head.about,
        "draft": None if plan.draft_head is None else plan.draft_head[1].about,
        "linked": list(plan.links),
        "source": before,
    }
    files.write_json(folder / checkpoint.RECORD, about)


def _read_head(
    path: Path, where: head.Head, unquantised: torch.Tensor, *, is_draft: bool
) -> quantize.QuantizedHead:
    held = quantize.read(path)
    if is_draft != (held.ids is not None):
        ids = "without draft ids" if is_draft else "with draft ids"
        raise LoadPlanError(
            f"{path}: a head {ids}, expected the other kind; the model's head goes to "
            "--head, one that was quantised with --ids to --draft-head"
        )
    same = held.head == where.name and held.width == where.width
    if not same or held.source_sha256 != head.digest(unquantised):
        raise LoadPlanError(
            f"{path}: quantised from another head ({held.head!r}), expected this "
            f"checkpoint's {where.name!r}; quantise this one"
        )
    if held.ids is None and held.rows != where.rows:
        raise LoadPlanError(
            f"{path}: {held.rows} rows, expected {where.rows}; quantise again"
        )
    return held


def _check_apart(source: Path, out: Path) -> None:
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents:
        raise LoadPlanError(
            f"{out}: inside {source}, expected a folder beside it: a source is not "
            "written to; name another one"
        )
