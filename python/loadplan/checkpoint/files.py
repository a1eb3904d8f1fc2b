"""Which files of a checkpoint an engine loads, without the engine: headers and index.

SGLang's choice, where the checkpoint is a folder: every ``*.safetensors`` that the
index names, or every one where there is no index.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

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

    Raises:
        LoadPlanError: no such folder, nothing to load in it, files that are missing,
            or a file that cannot be loaded.
    """
    if len(paths) == 1 and not paths[0].is_file():
        return _read_folder(paths[0])
    folders = {path.parent for path in paths}
    if len(folders) > 1 or any(path.is_dir() for path in paths):
        raise LoadPlanError(
            f"{paths[0]}: given with {len(paths) - 1} other path(s) that lie elsewhere "
            "or are folders, expected one folder or files of one folder; name one"
        )
    folder = folders.pop()
    headers = read_headers([str(path) for path in paths])
    return Checkpoint(
        folder=folder,
        headers=headers,
        draft_headers=headers,
        weight_map=read_index(str(folder)),
        unindexed=(),
        hidden=(),
        layers=_hidden_layers(folder),
    )


def _read_folder(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        raise LoadPlanError(
            f"{folder}: no such folder or file, expected a checkpoint; 'loadplan synth "
            "DIR' makes one"
        )
    names = sorted(p.name for p in folder.iterdir() if p.suffix == ".safetensors")
    hidden = tuple(name for name in names if name.startswith("."))
    present = [name for name in names if not name.startswith(".")]
    weight_map = read_index(str(folder))
    wanted = present
    if weight_map is not None:
        shards = set(weight_map.values())
        indexed = {os.path.relpath(path, folder) for path in shards}
        missing = sorted(name for name in indexed if not (folder / name).exists())
        if missing:
            raise LoadPlanError(
                f"{folder}: the index names {len(missing)} file(s) that are not there, "
                f"{missing[0]!r} first, expected all of {len(indexed)}; is the "
                "download complete?"
            )
        wanted = [name for name in present if name in indexed]
    elif present == list(_CONSOLIDATED):
        wanted = present[1:]
    if not wanted:
        raise LoadPlanError(
            f"{folder}: nothing to load in {len(present)} safetensors file(s), "
            "expected a checkpoint; is the download complete?"
        )
    headers = read_headers([str(folder / name) for name in wanted])
    draft_headers = headers
    if _DRAFT_FILE in present and _DRAFT_FILE not in wanted:
        draft_headers = [*headers, *read_headers([str(folder / _DRAFT_FILE)])]
    return Checkpoint(
        folder=folder,
        headers=headers,
        draft_headers=draft_headers,
        weight_map=weight_map,
        unindexed=tuple(name for name in present if name not in wanted),
        hidden=hidden,
        layers=_hidden_layers(folder),
    )


def _hidden_layers(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        value = config.get("text_config", config)["num_hidden_layers"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # only DeepSeek-V3's naming of a draft needs it
    return value if isinstance(value, int) else None
