"""A checkpoint's folder: which file is what, found from its index and its content.

Names are not trusted: a shard is what the index names, the head is where the index
says, and a draft's head or ids are known by the tensors in a file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from loadplan.core.header import FileHeader, LoadPlanError, TensorHeader, read_index
from loadplan.drafter import files, safetensors_file

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
QUANTIZATION_CONFIG = "quantization_config.json"
RECORD = "loadplan_variant.json"
"""Written into a variant: what it was made from."""

_BACKUP = re.compile(r"\.(bak|orig|backup|old)([-._][^/]*)?$", re.IGNORECASE)
_IDS = re.compile(r"(^|[._])(draft_ids|d2t|t2d|draft_id_to_target_id|hot_token_ids?)$")
_DRAFT_PART = re.compile(r"^(mtp|draft|eagle|nextn|spec)", re.IGNORECASE)
_HEAD_PART = re.compile(r"(^|_)head$")
# Of a version control system or a download: no part of a checkpoint.
_FOREIGN_FOLDERS = {".git", ".cache", "__pycache__"}


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """What lies in ``folder``; paths in it are relative, with ``/``.

    ``weight_map`` names the shard of each tensor as the index does, or as the headers
    do where there is no index. ``headers`` has those shards, ``backups`` theirs.
    """

    folder: Path
    config: dict[str, Any]
    weight_map: dict[str, str]
    has_index: bool
    headers: dict[str, FileHeader]
    names: tuple[str, ...]
    backups: dict[str, tuple[str, ...]]

    @property
    def vocabulary(self) -> int | None:
        """Rows of the head as config.json has it."""
        return _text_config(self.config).get("vocab_size")

    @property
    def width(self) -> int | None:
        """Elements of a hidden state as config.json has it."""
        return _text_config(self.config).get("hidden_size")

    def path(self, name: str) -> Path:
        return self.folder / name

    def tensor(self, name: str) -> TensorHeader:
        """The header of a tensor of the index.

        Raises:
            LoadPlanError: its shard does not hold it.
        """
        shard = self.weight_map[name]
        for tensor in self.headers[shard].tensors:
            if tensor.name == name:
                return tensor
        raise LoadPlanError(
            f"{self.path(shard)}: has no {name!r}, expected it there as the index "
            "says; download the checkpoint again"
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Find out what lies in ``folder``; only JSON and headers are read.

    Raises:
        LoadPlanError: no folder, no config, no weights or an index that does not hold.
    """
    if not folder.is_dir():
        raise LoadPlanError(f"{folder}: no folder, expected a checkpoint's")
    config = files.read_json(folder / CONFIG, what="a model's configuration")
    if not isinstance(config, dict):
        raise LoadPlanError(f"{folder / CONFIG}: no JSON object, expected one")
    names = tuple(list_files(folder))
    index = read_index(os.fspath(folder))
    if index is not None:
        weight_map = {
            name: os.path.relpath(path, folder).replace(os.sep, "/")
            for name, path in index.items()
        }
        shards = sorted(set(weight_map.values()))
        headers = {s: safetensors_file.read_header(folder / s) for s in shards}
    else:
        headers = {}
        for name in names:
            if not name.endswith(".safetensors") or is_backup(name):
                continue
            header = safetensors_file.read_header(folder / name)
            if not holds_ids(header):
                headers[name] = header
        weight_map = _map(folder, headers)
    if not weight_map:
        raise LoadPlanError(f"{folder}: no safetensors weights, expected a checkpoint")
    return Checkpoint(
        folder=folder,
        config=config,
        weight_map=weight_map,
        has_index=index is not None,
        headers=headers,
        names=names,
        backups={
            shard: tuple(n for n in names if n.startswith(f"{shard}.") and is_backup(n))
            for shard in headers
        },
    )


def list_files(folder: Path) -> list[str]:
    """The files below ``folder``, links to files included, those of tools left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _FOREIGN_FOLDERS)
        below = Path(parent).relative_to(folder)
        found += [(below / name).as_posix() for name in names]
    return sorted(name for name in found if not name.endswith(".partial"))


def is_backup(name: str) -> bool:
    """Whether a file's name says that another file was kept there."""
    return _BACKUP.search(name) is not None


def is_ids(tensor: TensorHeader) -> bool:
    """Whether a tensor maps a draft's vocabulary to the model's, or back."""
    return _IDS.search(tensor.name) is not None


def holds_ids(header: FileHeader) -> bool:
    return any(map(is_ids, header.tensors))


def is_draft_head(tensor: TensorHeader) -> bool:
    """Whether a tensor is (a part of) a draft's own output head."""
    module = tensor.name.split(".")[:-1]
    return any(map(_DRAFT_PART.search, module)) and any(map(_HEAD_PART.search, module))


def may_be_rewritten(header: FileHeader) -> bool:
    """Whether a later step may write a draft's head or ids to this file."""
    return any(is_ids(tensor) or is_draft_head(tensor) for tensor in header.tensors)


def in_draft(name: str) -> bool:
    """Whether a module belongs to a draft."""
    return any(map(_DRAFT_PART.search, name.split(".")))


def _map(folder: Path, headers: dict[str, FileHeader]) -> dict[str, str]:
    found: dict[str, str] = {}
    for shard, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in found:
                raise LoadPlanError(
                    f"{folder}: {tensor.name!r} is in {found[tensor.name]} and in "
                    f"{shard}, and there is no {INDEX} that says which one counts; "
                    "remove one of the files or write the index"
                )
            found[tensor.name] = shard
    return found


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Where a model that sees or hears keeps what its language model needs."""
    for key in ("text_config", "language_config", "llm_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, dict) and "vocab_size" not in config:
            return _text_config(inner)
    return config
