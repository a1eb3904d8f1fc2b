"""The engines that loadplan has patches for: releases, layout, where a tree lies."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import tomllib

from .core import LoadPlanError

_PACKAGE = Path(__file__).parent


def data_folder() -> Path:
    """The folder with ``patches/`` and ``python/``: in the wheel, else the checkout."""
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One pinned release of an engine.

    Paths in ``files`` are relative to the folder that holds the engine's package
    (site-packages, an unpacked wheel); ``prefix`` is that folder in the upstream
    repository. ``files`` maps each touched file to its pristine and patched sha256.
    """

    name: str
    version: str
    package: str
    prefix: str
    core_folder: str
    files: dict[str, dict[str, str]]

    @property
    def patches(self) -> Path:
        return data_folder() / "patches" / self.name

    def upstream(self, path: str) -> str:
        return self.prefix + path

    def new_files(self) -> dict[str, bytes]:
        """Path to content of the files that the engine does not have: glue and core."""
        sources = {
            f"{self.core_folder}/{path.name}": path
            for path in (_PACKAGE / "core").glob("*.py")
        }
        glue = data_folder() / "python"
        for path in (glue / self.package).rglob("*.py"):
            sources[path.relative_to(glue).as_posix()] = path
        return {name: path.read_bytes() for name, path in sorted(sources.items())}


def load_targets() -> dict[str, Target]:
    """Every engine in ``patches/targets.toml``, by name."""
    with open(data_folder() / "patches" / "targets.toml", "rb") as file:
        table = tomllib.load(file)
    return {
        name: Target(
            name=name,
            version=entry["version"],
            package=entry["package"],
            prefix=entry["prefix"],
            core_folder=entry["core_folder"],
            files=entry.get("files", {}),
        )
        for name, entry in table.items()
    }


def find_target(name: str) -> Target:
    """The target called ``name``.

    Raises:
        LoadPlanError: there are no patches for that engine.
    """
    targets = load_targets()
    if name not in targets:
        raise LoadPlanError(f"no patches for engine {name!r}, known: {sorted(targets)}")
    return targets[name]


def find_root(target: Target, folder: Path) -> Path:
    """The folder that holds the engine's package: ``folder``, or below it a checkout's.

    Raises:
        LoadPlanError: neither holds the package.
    """
    for root in (folder, folder / target.prefix):
        if (root / target.package / "__init__.py").is_file():
            return root
    raise LoadPlanError(
        f"{folder}: no package {target.package!r} here or in {target.prefix!r}, "
        "expected an unpacked wheel, a site-packages folder or a source checkout"
    )


def importable_root(target: Target) -> Path | None:
    """Where ``import`` would take the engine from, None if from nowhere."""
    spec = importlib.util.find_spec(target.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent


def check_version(target: Target, root: Path) -> None:
    """Refuse a release other than the pinned one, where the tree tells its version."""
    versions = {
        path.name.removesuffix(".dist-info").split("-", 1)[1]
        for path in root.glob(f"{target.package}-*.dist-info")
    }
    if versions and target.version not in versions:
        raise LoadPlanError(
            f"{root}: {target.name} {', '.join(sorted(versions))}, expected "
            f"{target.version}; install that release. Nothing was changed"
        )
