"""Which files of a checkpoint an engine loads, without the engine: headers and index.

SGLang's choice, where the checkpoint is a folder: every ``*.safetensors`` that the
index names, or every one where there is no index.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from loadplan.checkpoint import strangers
from loadplan.checkpoint.config import hidden_layers
from loadplan.core.header import FileHeader, LoadPlanError, read_headers, read_index

_CONSOLIDATED = ("consolidated.safetensors", "model.safetensors")
_DRAFT_FILE = "mtp.safetensors"

# DeepSeek, Qwen and others put the draft below one of these; DeepSeek-V3 and GLM
# number its layers after the model's own.
_DRAFT_NAME = re.compile(r"(model\.)?mtp(\.|_layers\.)")
_LAYER_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files that will be loaded, and names of those that lie beside them.

    ``headers`` are the model's, ``draft_headers`` those of a draft: the same and a
    draft's file that the index leaves out. ``layers`` is ``num_hidden_layers`` of
    config.json, None if it does not say.
    """

    folder: Path
    headers: list[FileHeader]
    draft_headers: list[FileHeader]
    weight_map: dict[str, str] | None
    unindexed: tuple[str, ...]
    hidden: tuple[str, ...]
    layers: int | None

    def relative(self, path: str) -> str:
        return os.path.relpath(path, self.folder)

    def is_draft_name(self, name: str, kind: str = "mtp") -> bool:
        """Whether the checkpoint's format names ``name`` as a part of its draft.

        ``kind`` is ``dspark``, which only ``mtp.`` names, or ``mtp``.
        """
        if kind == "dspark":
            return name.startswith("mtp.")
        if _DRAFT_NAME.match(name):
            return True
        layer = _LAYER_NAME.match(name)
        return (
            layer is not None
            and self.layers is not None
            and int(layer[1]) >= self.layers
        )


def read_checkpoint(paths: Sequence[Path]) -> Checkpoint:
    """Read the headers of one folder, or of files that lie in one folder.

    What is given twice counts once.

    Raises:
        LoadPlanError: no such folder, nothing to load in it, files that are missing,
            or a file that cannot be loaded.
    """
    paths = list({os.path.abspath(path): path for path in paths}.values())
    if len(paths) == 1 and paths[0].is_dir():
        return _read_folder(paths[0])
    for path in paths:
        if path.suffix == ".json" and path.is_file():
            raise LoadPlanError(
                f"{path}: a JSON file, expected safetensors files or the folder of a "
                f"checkpoint; name '{path.parent}'"
            )
        if len(paths) == 1 and not path.is_file():
            raise strangers.refusal(path)
    folders = {os.path.abspath(path.parent): path.parent for path in paths}
    if len(folders) > 1 or any(path.is_dir() for path in paths):
        raise LoadPlanError(
            f"{paths[0]}: given with {len(paths) - 1} other path(s) that lie elsewhere "
            "or are folders, expected one folder or files of one folder; name one"
        )
    (folder,) = folders.values()
    headers = _headers(folder, [path.name for path in paths])
    return Checkpoint(
        folder=folder,
        headers=headers,
        draft_headers=headers,
        weight_map=read_index(str(folder)),
        unindexed=(),
        hidden=(),
        layers=hidden_layers(folder),
    )


def _read_folder(folder: Path) -> Checkpoint:
    names = sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors")
    hidden = tuple(name for name in names if name.startswith("."))
    present = [name for name in names if not name.startswith(".")]
    weight_map = read_index(str(folder))
    wanted = present
    if weight_map is not None:
        indexed = _indexed(folder, weight_map, present)
        wanted = [name for name in present if name in indexed]
    elif present == list(_CONSOLIDATED):
        wanted = present[1:]
    if not present:
        raise strangers.nothing_in(folder)
    if not wanted:
        raise LoadPlanError(
            f"{folder}: the index names no file, expected some of the {len(present)} "
            "safetensors file(s) beside it; download it again or remove it"
        )
    headers = _headers(folder, wanted)
    draft_headers = headers
    if _DRAFT_FILE in present and _DRAFT_FILE not in wanted:
        draft_headers = [*headers, *_headers(folder, [_DRAFT_FILE])]
    return Checkpoint(
        folder=folder,
        headers=headers,
        draft_headers=draft_headers,
        weight_map=weight_map,
        unindexed=tuple(name for name in present if name not in wanted),
        hidden=hidden,
        layers=hidden_layers(folder),
    )


def _headers(folder: Path, names: Sequence[str]) -> list[FileHeader]:
    # The index's paths begin with the folder as it is given, "." too, and so do an
    # engine's.
    return read_headers([os.path.join(str(folder), name) for name in names])


def _indexed(folder: Path, weight_map: dict[str, str], present: list[str]) -> set[str]:
    """The files, by name in ``folder``, that the index names.

    Raises:
        LoadPlanError: one is not there, or no engine finds it: they all list
            ``*.safetensors`` of the folder itself and leave the index's others out.
    """
    indexed = {os.path.relpath(path, folder) for path in set(weight_map.values())}
    missing = sorted(name for name in indexed if not (folder / name).exists())
    if missing:
        raise LoadPlanError(
            f"{folder}: the index names {len(missing)} file(s) that are not there, "
            f"{missing[0]!r} first, expected all of {len(indexed)}; is the "
            "download complete?"
        )
    passed_over = sorted(indexed - set(present))
    if passed_over:
        paths = {os.path.join(str(folder), name) for name in passed_over}
        tensors = sum(path in paths for path in weight_map.values())
        raise LoadPlanError(
            f"{folder}: the index names {len(passed_over)} file(s) that engines pass "
            f"over, {passed_over[0]!r} first, so that {tensors} tensor(s) would be "
            "missing; expected .safetensors files in the folder itself; download the "
            "checkpoint again or repair the index"
        )
    return indexed
