"""The ids that a draft's smaller vocabulary keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import files, rows, safetensors_file, tokens

IDS = "draft_ids"
"""The tensor of kept ids: I64 ``[rows]``, sorted, row to id of the model."""

_METADATA = "loadplan"


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """``ids`` I64 ``[rows]``; ``coverage`` is the share of ``held_out`` tokens kept.

    ``always`` of them are special or added tokens, ``unseen`` were never counted.
    """

    ids: torch.Tensor
    coverage: float
    held_out: int
    always: int
    unseen: int


def always_kept(tokenizer: Any) -> set[int]:
    """The ids of a tokenizer's special and added tokens."""
    return set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)


def choose(
    counts: Sequence[int],
    held_out: Sequence[int],
    *,
    always: set[int],
    number: int,
) -> Kept:
    """The ``number`` ids to keep of ``len(counts)``: the most frequent, and ``always``.

    ``held_out`` are counts of text that was not counted. Of ids as frequent as each
    other the lower ones are kept.

    Raises:
        LoadPlanError: they do not fit, lie outside, or nothing is held out.
    """
    size = len(counts)
    outside = sorted(token for token in always if not 0 <= token < size)
    if outside:
        raise LoadPlanError(
            f"the tokenizer has special or added tokens {outside[:8]}, expected ids "
            f"from 0 to {size - 1}, the head's rows; is it this model's tokenizer?"
        )
    if not len(always) <= number <= size:
        raise LoadPlanError(
            f"{number} rows, expected {len(always)} (the special and added tokens) to "
            f"{size} (the vocabulary); change --rows"
        )
    if not any(counts):
        raise LoadPlanError("no token was counted, expected some; take other text")
    if not any(held_out):
        raise LoadPlanError(
            "no held-out token, expected some to tell the coverage by; take more text"
        )
    ranked = sorted(set(range(size)) - always, key=lambda t: (-counts[t], t))
    kept = sorted(always | set(ranked[: number - len(always)]))
    return Kept(
        ids=torch.tensor(kept, dtype=torch.int64),
        coverage=sum(held_out[token] for token in kept) / sum(held_out),
        held_out=sum(held_out),
        always=len(always),
        unseen=sum(not counts[token] and token not in always for token in kept),
    )


def read_counts(path: Path, vocabulary: int) -> list[int]:
    """Counts from JSON: one per id, or an object from id to count.

    Raises:
        LoadPlanError: no counts, or an id outside of the vocabulary.
    """
    found = files.read_json(path, what="token counts as JSON")
    if isinstance(found, list):
        found = dict(enumerate(found))
    counts = [0] * vocabulary
    try:
        for key, count in found.items():
            token = int(key)
            if type(count) is not int or count < 0 or not 0 <= token < vocabulary:
                raise ValueError(f"{key!r}: {count!r}")
            counts[token] = count
    except (AttributeError, ValueError, TypeError) as error:
        raise LoadPlanError(
            f"{path}: {error}, expected counts of at least 0 for ids from 0 to "
            f"{vocabulary - 1}: a list, or an object from id to count"
        ) from error
    return counts


def capture_counts(
    capture: rows.Capture, vocabulary: int, held_out_rows: int | None
) -> tuple[list[int], list[int]]:
    """Counts of the tokens that came next in a capture: counted and held out."""
    first = rows.split(capture, held_out_rows)
    following = capture.next_tokens()
    if int(following.min()) < 0 or int(following.max()) >= vocabulary:
        raise LoadPlanError(
            f"{capture.folder}: tokens up to {int(following.max())}, expected below "
            f"{vocabulary}; it is another model's capture"
        )
    counts = [
        torch.bincount(part, minlength=vocabulary).tolist()
        for part in (following[:first], following[first:])
    ]
    return counts[0], counts[1]


def write(path: Path, kept: Kept, *, vocabulary: int, tokenizer: Path) -> None:
    """Put the ids into a new safetensors file."""
    files.check_new(path, what="the ids")
    about = {
        "vocabulary": vocabulary,
        "tokenizer_sha256": tokens.tokenizer_identity(tokenizer),
        "coverage": kept.coverage,
        "held_out": kept.held_out,
    }
    pieces = [safetensors_file.tensor_piece(IDS, kept.ids)]
    metadata = {_METADATA: json.dumps(about, sort_keys=True)}
    safetensors_file.write(path, pieces, metadata=metadata)


def read(path: Path, vocabulary: int) -> torch.Tensor:
    """The kept ids of a file.

    Raises:
        LoadPlanError: none, or they do not fit the vocabulary.
    """
    tensors, _ = safetensors_file.read_all(path)
    if IDS not in tensors:
        raise LoadPlanError(
            f"{path}: holds {sorted(tensors)}, expected {IDS!r} as 'loadplan drafter "
            "vocab' writes it"
        )
    problem = problem_of(tensors[IDS], vocabulary)
    if problem:
        raise LoadPlanError(f"{path}: {IDS} {problem}; choose the vocabulary again")
    return tensors[IDS]


def problem_of(ids: torch.Tensor, vocabulary: int) -> str:
    """What is wrong with kept ids, "" if nothing is."""
    if ids.ndim != 1 or ids.dtype != torch.int64 or not ids.numel():
        return f"is {ids.dtype} of shape {list(ids.shape)}, expected int64 in one row"
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        return (
            f"has ids from {int(ids.min())} to {int(ids.max())}, expected 0 to "
            f"{vocabulary - 1}"
        )
    if ids.unique().numel() != ids.numel():
        return f"has {ids.numel() - ids.unique().numel()} ids twice, expected each once"
    if (ids.diff() < 0).any():
        return "is not sorted, expected it to be"
    return ""
