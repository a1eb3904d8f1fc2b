"""What was given in place of a checkpoint: one sentence with what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

from loadplan.core.header import LoadPlanError
from loadplan.core.small_file import kind

# Files of weights that are none of ours, by their endings.
_FORMATS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch",
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".ckpt": "PyTorch",
    ".h5": "HDF5",
    ".msgpack": "Flax",
    ".npz": "NumPy",
}
_UNFINISHED = (".incomplete", ".part", ".aria2", ".tmp", ".download")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MOST_SEARCHED = 1000


def refusal(path: Path) -> LoadPlanError:
    """Why ``path``, which is neither a folder nor a regular file, is no checkpoint."""
    try:
        found = kind(path.stat().st_mode)
    except OSError:
        return LoadPlanError(f"{path}: {_absent(path)}")
    return LoadPlanError(
        f"{path}: {found}, expected a folder with a checkpoint or safetensors files"
    )


def _absent(path: Path) -> str:
    if path.is_symlink():
        target = path.readlink()
        return (
            f"a link to '{target}', which is not there, expected a checkpoint; "
            "download it again"
        )
    if _REPOSITORY.fullmatch(str(path)) and not path.parent.exists():
        return (
            "no such folder or file; it looks like a repository id of a model hub, "
            f"expected a local checkpoint: 'hf download {path}' fetches it and prints "
            "its folder"
        )
    return (
        "no such folder or file, expected a checkpoint; 'loadplan synth DIR' makes one"
    )


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder with safetensors files in it.

    Raises:
        LoadPlanError: it says what ``path`` is.
    """
    if path.is_file():
        raise LoadPlanError(
            f"{path}: a file, expected the folder of a checkpoint; name '{path.parent}'"
        )
    if not path.is_dir():
        raise refusal(path)
    if not any(_is_shard(p.name) for p in path.iterdir()):
        raise nothing_in(path)


def nothing_in(folder: Path) -> LoadPlanError:
    """What lies in ``folder``, where no safetensors file does."""
    names = sorted(path.name for path in folder.iterdir())
    return LoadPlanError(f"{folder}: no safetensors file: {_content(folder, names)}")


def _content(folder: Path, names: list[str]) -> str:
    unfinished = [name for name in names if name.endswith(_UNFINISHED)]
    below = _below(folder)
    if not names:
        return "an empty folder, expected a checkpoint; download it"
    if "model_index.json" in names:
        parts = f": {_some(below)}" if below else ""
        return (
            "a diffusers pipeline, whose parts are checkpoints of their own; name one "
            f"of its folders{parts}"
        )
    if unfinished:
        return (
            f"{_some(unfinished)}, a download that is not complete; let it end or "
            "begin it again"
        )
    if below:
        return f"there are some below; name one of the folders: {_some(below)}"
    for ending, name in _FORMATS.items():
        files = [file for file in names if file.endswith(ending)]
        if files:
            return (
                f"{len(files)} {ending} file(s) of {name}, which loadplan does not "
                "read; use the engine's own --load-format for them or "
                "download the safetensors"
            )
    return (
        f"{_some(names)}, expected a checkpoint; is this the right folder, and is the "
        "download complete?"
    )


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and not name.startswith(".")


def _below(folder: Path) -> list[str]:
    """Folders in ``folder``, a hub's snapshots too, that hold safetensors files."""
    found = []
    inner = [p for p in folder.glob("*") if p.is_dir()]
    inner += [p for p in folder.glob("snapshots/*") if p.is_dir()]
    for place in sorted(inner)[:_MOST_SEARCHED]:
        try:
            if any(_is_shard(path.name) for path in place.iterdir()):
                found.append(place.relative_to(folder).as_posix())
        except OSError:
            continue
    return found


def _some(names: list[str]) -> str:
    """The first three of ``names``, and how many there are besides."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
