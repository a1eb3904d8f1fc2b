"""Quantise a head, by rounding and by GPTQ, and tell what each costs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import (
    checkpoint,
    figures,
    files,
    gptq,
    head,
    packing,
    rows,
    safetensors_file,
    scheme,
    vocab,
)

METADATA = "loadplan"
FORMAT = "format"
METHODS = ("gptq", "rtn")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to quantise and how; None is the checkpoint's own or the default.

    ``ids`` is a file of kept ids: the head becomes a draft's, of those rows.
    """

    source: Path
    capture: Path
    kind: str = "int4"
    method: str = "gptq"
    group_size: int | None = None
    symmetric: bool | None = None
    ids: Path | None = None
    held_out_rows: int | None = None
    head_name: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedHead:
    """A file that :func:`quantize` wrote; ``tensors`` are by the name in the head."""

    scheme: scheme.Scheme
    head: str
    rows: int
    width: int
    source_sha256: str
    ids: torch.Tensor | None
    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]


StartProgress = Callable[[str, int], files.Progress]
"""Given a step and how many rows it has, returns what is told of them."""


def quantize(
    options: Options,
    out: Path,
    *,
    start: StartProgress = lambda step, total: files.no_progress,
) -> dict[str, Any]:
    """Write the quantised head to the new file ``out``; return what is known of it.

    Raises:
        LoadPlanError: bad input, or figures that say the head is broken; nothing is
            written then.
    """
    files.check_new(out, what="the quantised head")
    gptq.find_python()
    found = checkpoint.read_checkpoint(options.source)
    where = head.find_head(found, options.head_name)
    chosen = scheme.choose(
        scheme.quantization_config(found.config),
        where.name,
        kind=options.kind,
        group_size=options.group_size,
        symmetric=options.symmetric,
    )
    chosen.check(width=where.width)
    capture = rows.read_capture(options.capture)
    if capture.width != where.width:
        raise LoadPlanError(
            f"{options.capture}: rows of {capture.width}, expected {where.width}, the "
            "head's width; it is another model's capture"
        )
    first = rows.split(capture, options.held_out_rows)
    whole, origin = head.read_float_head(found, where)
    ids = None if options.ids is None else vocab.read(options.ids, where.rows)
    weight = whole if ids is None else whole[ids].contiguous()
    _check_float(weight, origin)
    results = _both(weight, chosen, capture, first, out, start)
    unpacked = {name: packing.unpack(held, chosen) for name, held in results.items()}
    for name in unpacked:
        figures.check_weight(name, weight, unpacked[name])
    told = start("Comparing", capture.rows - first)
    compared = figures.compare(
        capture.blocks(first, capture.rows, size=_block(weight)),
        weight,
        unpacked,
        progress=told,
    )
    figures.check(compared)
    about = {
        "head": where.name,
        "kind": chosen.kind,
        "group_size": chosen.group_size,
        "symmetric": chosen.symmetric,
        "method": options.method,
        "rows": weight.shape[0],
        "width": weight.shape[1],
        "calibration_rows": first,
        "figures": {name: dataclasses.asdict(f) for name, f in compared.items()},
        "origin": origin.name,
        "source_sha256": head.digest(whole),
        "capture": capture.manifest["model"],
    }
    _write(out, results[options.method], ids, about)
    return about


def read(path: Path) -> QuantizedHead:
    """Read what :func:`quantize` wrote and check its geometry.

    Raises:
        LoadPlanError: it is no such file, or its tensors do not fit together.
    """
    tensors, metadata = safetensors_file.read_all(path)
    try:
        about = json.loads(metadata[METADATA])
        chosen = scheme.Scheme(about["kind"], about["group_size"], about["symmetric"])
        size, width = about["rows"], about["width"]
        name, source = about["head"], about["source_sha256"]
        expected = packing.geometry(chosen, rows=size, width=width)
    except (KeyError, TypeError, ValueError) as error:
        raise LoadPlanError(
            f"{path}: no head that 'loadplan drafter quantize' wrote "
            f"({type(error).__name__}: {error}); quantise again"
        ) from error
    ids = tensors.pop(vocab.IDS, None)
    tensors.pop("d2t", None)
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
    problem = problem_of(tensors, expected)
    if not problem and ids is not None and ids.shape != (size,):
        problem = f"{size} rows and ids of shape {list(ids.shape)}"
    if problem:
        raise LoadPlanError(f"{path}: {problem}; quantise again")
    return QuantizedHead(chosen, name, size, width, source, ids, tensors, about)


def problem_of(
    tensors: dict[str, torch.Tensor],
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]],
) -> str:
    """What differs from the expected dtypes and shapes, "" if nothing does."""
    if set(tensors) != set(expected):
        return f"has {sorted(tensors)}, expected {sorted(expected)}"
    for name, (dtypes, shape) in expected.items():
        dtype = safetensors_file.DTYPES.get(tensors[name].dtype, "?")
        if dtype not in dtypes or tuple(tensors[name].shape) != shape:
            return (
                f"{name} is {dtype} of shape {list(tensors[name].shape)}, expected "
                f"{' or '.join(dtypes)} of shape {list(shape)}"
            )
    return ""


def offsets(ids: torch.Tensor) -> torch.Tensor:
    """vLLM's ``d2t`` of kept ids: the model's id is the row plus ``d2t[row]``."""
    return ids - torch.arange(ids.numel(), dtype=torch.int64)


def _both(
    weight: torch.Tensor,
    chosen: scheme.Scheme,
    capture: rows.Capture,
    first: int,
    out: Path,
    start: StartProgress,
) -> dict[str, dict[str, torch.Tensor]]:
    """The packed heads by method; both, so that each can be judged by the other."""
    scales = packing.find_scales(weight, chosen)
    results = {"rtn": packing.pack(weight, scales, chosen, dtype=weight.dtype)}
    told = start("Calibrating", first)
    hessian = gptq.hessian(capture.blocks(0, first), capture.width, progress=told)
    moved = gptq.quantize(
        weight,
        hessian,
        scales,
        chosen,
        folder=files.partial(out).with_suffix(".gptq"),
        progress=start("GPTQ", weight.shape[0]),
    )
    figures.check_weight("gptq", weight, moved)
    results["gptq"] = packing.pack(moved, scales, chosen, dtype=weight.dtype)
    return results


def _write(
    out: Path,
    packed: dict[str, torch.Tensor],
    ids: torch.Tensor | None,
    about: dict[str, Any],
) -> None:
    prefix = about["head"] if ids is None else "draft_head"
    tensors = {f"{prefix}.{name}": tensor for name, tensor in packed.items()}
    if ids is not None:
        # With the rows that they name: one cannot be replaced without the other.
        tensors |= {vocab.IDS: ids, "d2t": offsets(ids)}
    pieces = [safetensors_file.tensor_piece(*item) for item in tensors.items()]
    metadata = {FORMAT: "pt", METADATA: json.dumps(about, sort_keys=True)}
    safetensors_file.write(out, pieces, metadata=metadata)


def _check_float(weight: torch.Tensor, origin: Path) -> None:
    if not torch.isfinite(weight).all() or not weight.any():
        raise LoadPlanError(
            f"{origin}: the unquantised head is all zeros or not finite, expected a "
            "trained one; put the original there"
        )


def _block(weight: torch.Tensor) -> int:
    """Rows whose logits are held at once, three times in FP64 at most."""
    return max(1, min(1024, (64 << 20) // weight.shape[0]))
