"""Check a variant, whoever made it: one result a check, none stops the others."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import (
    checkpoint,
    draft,
    files,
    packing,
    quantize,
    record,
    safetensors_file,
    samples,
    scheme,
    vocab,
)
from loadplan.drafter.opened import Failed, Variant

# A variant may be broken in any way, and a library say so in any of these.
_BROKEN = (
    ValueError,
    OSError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One check: what it found, or what is wrong and what was expected."""

    name: str
    ok: bool
    detail: str


def verify(folder: Path, source: Path | None = None) -> list[Result]:
    """Every check of the variant ``folder``; some need its ``source``.

    Raises:
        LoadPlanError: there is no such folder.
    """
    for given in (folder, source):
        if given is not None and not given.is_dir():
            raise LoadPlanError(f"{given}: no folder, expected a checkpoint's")
    variant = Variant(folder, source)
    checks = {**_CHECKS, **({} if source is None else _SOURCE_CHECKS)}
    return [_run(name, check, variant) for name, check in checks.items()]


def _run(name: str, check: Callable[[Variant], str], variant: Variant) -> Result:
    try:
        return Result(name, True, check(variant))
    except _BROKEN as error:
        detail = str(error) if isinstance(error, ValueError) else repr(error)
        return Result(name, False, detail)


def _index(variant: Variant) -> str:
    path = variant.folder / checkpoint.INDEX
    weight_map = files.read_json(path, what="an index")["weight_map"]
    held: dict[str, set[str]] = {}
    for shard in sorted(set(weight_map.values())):
        header = safetensors_file.read_header(variant.folder / shard)
        held[shard] = {tensor.name for tensor in header.tensors}
    lost = [name for name, shard in weight_map.items() if name not in held[shard]]
    if lost:
        raise Failed(
            f"{len(lost)} of {len(weight_map)} entries name a shard without the "
            f"tensor, first {lost[0]!r} in {weight_map[lost[0]]}; expected none"
        )
    return f"{len(weight_map)} entries in {len(held)} shards resolve"


def _one_shard_each(variant: Variant) -> str:
    found: dict[str, str] = {}
    for name in checkpoint.list_files(variant.folder):
        if not name.endswith(".safetensors"):
            continue
        for tensor in safetensors_file.read_header(variant.folder / name).tensors:
            if tensor.name in found:
                raise Failed(
                    f"{tensor.name!r} is in {found[tensor.name]} and in {name}, "
                    "expected one of them"
                )
            found[tensor.name] = name
    return f"{len(found)} tensors, each in one file"


def _no_backup(variant: Variant) -> str:
    names = checkpoint.list_files(variant.folder)
    if backups := [name for name in names if checkpoint.is_backup(name)]:
        raise Failed(f"{backups}, expected no backup in a variant")
    return f"none among {len(names)} files"


def _head_format(variant: Variant) -> str:
    found, expected = variant.head.format, variant.scheme.format
    if found != expected:
        raise Failed(f"the head is {found}, expected {expected} as config.json says")
    beside = variant.folder / checkpoint.QUANTIZATION_CONFIG
    if beside.exists():
        other = files.read_json(beside, what="a quantisation")
        if scheme.of_head(other, variant.head.name) != variant.scheme:
            raise Failed(
                f"{beside.name} has another format for the head than config.json, "
                "expected the same"
            )
    return f"{variant.head.name}: {found}, as config.json says"


def _head_geometry(variant: Variant) -> str:
    found = variant.head
    expected = packing.geometry(variant.scheme, rows=found.rows, width=found.width)
    held = {name: t for name, t in found.tensors.items() if name != "bias"}
    if set(held) != set(expected):
        raise Failed(f"tensors {sorted(held)}, expected {sorted(expected)}")
    for name, (dtypes, shape) in expected.items():
        if held[name].dtype not in dtypes or held[name].shape != shape:
            raise Failed(
                f"{name} is {held[name].dtype} {list(held[name].shape)}, expected "
                f"{' or '.join(dtypes)} {list(shape)} for {found.rows} x {found.width}"
            )
    if "weight_shape" in held:
        shape = variant.read_head("weight_shape", None).tolist()
        if shape != [found.rows, found.width]:
            raise Failed(
                f"weight_shape says {shape}, expected {[found.rows, found.width]}"
            )
    return f"{found.rows} x {found.width} in groups of {variant.scheme.group_size}"


def _round_trip(variant: Variant) -> str:
    count = 0
    reader = variant.read_head
    for begin, end in samples.places(variant.head.rows):
        packed = samples.rows_of(reader, variant.scheme, begin, end, variant.head.width)
        weight = packing.unpack(packed, variant.scheme)
        if not torch.isfinite(weight).all():
            raise Failed(f"rows {begin} to {end} are not all finite, expected numbers")
        scales = packing.scales_of(packed, variant.scheme)
        again = packing.pack(weight, scales, variant.scheme, dtype=torch.float32)
        values = packed["weight_packed"]
        if not packing.same(variant.scheme, values, again["weight_packed"]):
            raise Failed(
                f"rows {begin} to {end} come back with other bits when they are "
                "unpacked and packed, expected the same"
            )
        count += _nonzero(weight, begin, end)
    return f"{count} rows unpacked and packed to the same bits"


def _nonzero(weight: torch.Tensor, begin: int, end: int) -> int:
    if not weight.any():
        raise Failed(f"rows {begin} to {end} are all zeros, expected a head")
    return end - begin


def _draft_head(variant: Variant) -> str:
    if variant.has_no_draft and not variant.drafts:
        return "none, the draft uses the model's head"
    if draft.HEAD_FILE not in variant.drafts:
        raise Failed(
            f"no {draft.HEAD_FILE}, found {variant.drafts or 'no draft'}; expected the "
            "draft's head with its ids"
        )
    found = variant.draft
    if found.ids is None:
        raise Failed(f"{draft.HEAD_FILE} has no ids, expected them with its rows")
    if found.width != variant.head.width:
        raise Failed(f"rows of {found.width}, expected {variant.head.width}")
    weight = packing.unpack(found.tensors, found.scheme)
    if not torch.isfinite(weight).all() or not weight.any():
        raise Failed("the draft's head is all zeros or not finite, expected a head")
    return f"{found.rows} x {found.width}, {found.scheme.format}"


def _draft_ids(variant: Variant) -> str:
    if variant.has_no_draft and not variant.drafts:
        return "none, the draft knows every token"
    tensors, metadata = safetensors_file.read_all(variant.folder / draft.HEAD_FILE)
    ids = tensors.get(vocab.IDS)
    if ids is None:
        raise Failed(f"{draft.HEAD_FILE} has no {vocab.IDS!r}, expected the ids")
    if problem := vocab.problem_of(ids, variant.head.rows):
        raise Failed(f"{vocab.IDS} {problem}")
    size = json.loads(metadata[quantize.METADATA])["rows"]
    rows = {t.shape[0] for name, t in tensors.items() if name.endswith("_packed")}
    if rows != {ids.numel()} or size != ids.numel():
        raise Failed(
            f"{ids.numel()} ids for {sorted(rows)} head rows, expected as many"
        )
    if not torch.equal(tensors.get("d2t", ids), quantize.offsets(ids)):
        raise Failed("d2t is not the ids less their row, expected the same mapping")
    for name in variant.drafts:
        if name == draft.HEAD_FILE:
            continue
        alone = draft.read_token_map(variant.folder / name)
        if alone is None or not torch.equal(alone.long(), ids):
            raise Failed(
                f"{name} has other ids than {draft.HEAD_FILE}, expected the same"
            )
    return f"{ids.numel()} of {variant.head.rows} ids, sorted, each once"


def _draft_rows(variant: Variant) -> str:
    if variant.has_no_draft and not variant.drafts:
        return "none"
    found = variant.draft
    if found.ids is None:
        raise Failed("no ids, expected them with the rows")
    rows = packing.unpack(found.tensors, found.scheme)
    reader = variant.read_head
    count = 0
    for row in samples.spread(found.rows):
        token = int(found.ids[row])
        begin = token - token % samples.BLOCK
        end = min(begin + samples.BLOCK, variant.head.rows)
        packed = samples.rows_of(reader, variant.scheme, begin, end, variant.head.width)
        whole = packing.unpack(packed, variant.scheme)[token - begin]
        samples.check_close(f"draft row {row} (token {token})", rows[row], whole)
        count += 1
    return f"{count} rows are those of the head that their ids name"


def _own_files(variant: Variant) -> str:
    names = checkpoint.list_files(variant.folder)
    headers = variant.checkpoint.headers
    own = [
        name
        for name in names
        if name not in headers
        or name in variant.head.shards
        or checkpoint.may_be_rewritten(headers[name])
    ]
    for name in own:
        path = variant.folder / name
        if path.is_symlink() or path.stat().st_nlink != 1:
            raise Failed(
                f"{name} is a link, expected a file of its own: a later step that "
                "rewrites it would write to the source"
            )
    return f"{len(own)} files that may be rewritten are no links"


def _linked(variant: Variant) -> str:
    count = 0
    for name in variant.checkpoint.headers:
        if name in variant.head.shards:
            continue
        mine, theirs = variant.folder / name, variant.source.path(name)
        if os.path.samefile(mine, theirs):
            count += 1
        elif files.digest(mine) != files.digest(theirs):
            raise Failed(f"{name} has other bytes than the source's, expected those")
    return f"{count} shards are the source's own, the others have its bytes"


def _head_rows(variant: Variant) -> str:
    reader = variant.read_head
    count = 0
    for begin, end in samples.places(variant.head.rows):
        packed = samples.rows_of(reader, variant.scheme, begin, end, variant.head.width)
        weight = packing.unpack(packed, variant.scheme)
        for row in range(begin, end):
            held = variant.float_head[row].float()
            samples.check_close(f"head row {row}", weight[row - begin], held)
            count += 1
    return f"{count} rows are close to the unquantised head's"


def _source_unchanged(variant: Variant) -> str:
    if variant.record is None:
        raise Failed(
            f"no {checkpoint.RECORD}, expected what the source was when the variant "
            "was made"
        )
    assert variant.source_folder is not None
    now = record.snapshot(variant.source_folder)
    if lines := record.differences(variant.record["source"], now):
        raise Failed(f"{'; '.join(lines)}, expected the source as it was")
    return f"{len(now)} files have size, mtime, inode and hash as before"


_CHECKS: dict[str, Callable[[Variant], str]] = {
    "index": _index,
    "one shard each": _one_shard_each,
    "no backup": _no_backup,
    "head format": _head_format,
    "head geometry": _head_geometry,
    "round trip": _round_trip,
    "draft head": _draft_head,
    "draft ids": _draft_ids,
    "draft rows": _draft_rows,
    "own files": _own_files,
}
_SOURCE_CHECKS: dict[str, Callable[[Variant], str]] = {
    "linked shards": _linked,
    "head rows": _head_rows,
    "source unchanged": _source_unchanged,
}
