"""The engines that loadplan has patches for: releases, layout, where a tree lies."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import urllib.parse
from importlib import metadata
from pathlib import Path
from typing import Any

import tomllib

from loadplan.errors import EngineError
from loadplan.suggest import did_you_mean

_PACKAGE = Path(__file__).parents[1]


def data_folder() -> Path:
    """The folder with ``patches/`` and ``python/``: in the wheel, else the checkout."""
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How many lines patches may add, each number exclusive.

    ``hunks`` is for existing files, a patch, with the exceptions in ``hunks_of``;
    ``heart_lines`` is for hunks and glue of the patches in ``heart`` together.
    """

    hunks: int
    hunks_of: dict[str, int]
    heart: tuple[str, ...]
    heart_lines: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What only the keepers of a series need: where tests lie, what upstream asks for.

    Our tests of the engine lie in ``tests_folder``. Folders in the upstream repository,
    and what it asks of a commit, say what an export looks like: tests in
    ``upstream_tests_folder``, their helpers in ``helper_folder``, imported from
    ``helper_package``, pages in ``docs_folder`` with ``docs_suffix`` (.md or .mdx),
    ``licence_header`` in front of new files, a sign-off if ``signed_off``. ``linters``
    are the commands that judge its files.
    """

    tests_folder: str
    upstream_tests_folder: str
    helper_folder: str
    helper_package: str
    docs_folder: str
    docs_suffix: str
    signed_off: bool
    licence_header: str
    linters: tuple[str, ...]
    limits: Limits


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """One pinned release of an engine.

    Paths in ``files`` are relative to the folder that holds the engine's package
    (site-packages, an unpacked wheel); ``prefix`` is that folder in the upstream
    repository. ``unpack`` says which files of the wheel a development tree needs.
    ``files`` maps each touched file to its pristine and patched sha256;
    ``retired`` maps what only earlier versions of loadplan wrote to its pristine
    sha256, or to "" where the engine has no such file. ``serve`` is a command that
    uses the patches, ``note`` what to know before.
    """

    name: str
    version: str
    package: str
    prefix: str
    unpack: tuple[str, ...]
    core_folder: str
    serve: str
    note: str
    rules: Rules
    files: dict[str, dict[str, str]]
    retired: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def patches(self) -> Path:
        return data_folder() / "patches" / self.name

    @property
    def record(self) -> str:
        """The list of an installed wheel's files, which a checkout does not have."""
        return f"{self.package}-{self.version}.dist-info/RECORD"

    def upstream(self, path: str) -> str:
        return self.prefix + path

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """By patch, the core modules that it is the first to need."""
        with open(_PACKAGE / "core" / "LAYERS.toml", "rb") as file:
            table = tomllib.load(file)
        return {patch: tuple(names) for patch, names in table[self.name].items()}

    def new_files(self) -> dict[str, bytes]:
        """Path to content of the files that the engine does not have: glue and core."""
        modules = ["__init__", *itertools.chain.from_iterable(self.layers.values())]
        sources = {
            f"{self.core_folder}/{name}.py": _PACKAGE / "core" / f"{name}.py"
            for name in modules
        }
        glue = data_folder() / "python"
        for path in (glue / self.package).rglob("*.py"):
            sources[path.relative_to(glue).as_posix()] = path
        return {name: path.read_bytes() for name, path in sorted(sources.items())}


def load_targets() -> dict[str, Target]:
    """Every engine in ``patches/targets.toml``, by name."""
    with open(data_folder() / "patches" / "targets.toml", "rb") as file:
        table = tomllib.load(file)
    return {name: _target(name, entry) for name, entry in table.items()}


def _target(name: str, entry: dict[str, Any]) -> Target:
    rules = entry["rules"]
    return Target(
        name=name,
        version=entry["version"],
        package=entry["package"],
        prefix=entry["prefix"],
        unpack=tuple(entry["unpack"]),
        core_folder=entry["core_folder"],
        serve=entry["serve"],
        note=entry.get("note", ""),
        rules=Rules(
            **{
                **rules,
                "linters": tuple(rules["linters"]),
                "limits": Limits(**rules["limits"]),
            }
        ),
        files=entry.get("files", {}),
        retired=entry.get("retired", {}),
    )


def find_target(name: str) -> Target:
    """The target called ``name``.

    Raises:
        EngineError: there are no patches for that engine.
    """
    targets = load_targets()
    if name not in targets:
        raise EngineError(
            f"no patches for engine {name!r}, known: {sorted(targets)}"
            f"{did_you_mean(name, targets)}"
        )
    return targets[name]


def find_root(target: Target, folder: Path) -> Path:
    """The folder that holds the engine's package: ``folder``, or below it a checkout's.

    Raises:
        EngineError: neither holds the package.
    """
    for root in (folder, folder / target.prefix):
        if (root / target.package / "__init__.py").is_file():
            return root
    raise EngineError(
        f"{folder}: no package {target.package!r} here or in {target.prefix!r}, "
        "expected an unpacked wheel, a site-packages folder or a source checkout"
    )


def environment_root(target: Target) -> Path:
    """The folder that holds the engine of this Python's environment.

    The engine is not imported: that takes long, and fails where its kernels do.

    Raises:
        EngineError: it is not installed, or is a release without patches.
    """
    try:
        distribution = metadata.distribution(target.name)
    except metadata.PackageNotFoundError:
        root = importable_root(target)
        if root is None:
            raise EngineError(
                f"{target.name} is not installed for this Python; run loadplan with "
                "the engine's Python or name a folder by --target"
            ) from None
        return find_root(target, root)
    _check_release(target, distribution.version, where="this Python's environment")
    checkout = _editable_folder(distribution)
    if checkout is not None:
        return find_root(target, checkout)
    return find_root(target, Path(distribution.locate_file("")))


def importable_root(target: Target) -> Path | None:
    """Where ``import`` would take the engine from, None if from nowhere."""
    spec = importlib.util.find_spec(target.package)
    # A folder without a module of its own, like this repository's glue, is no engine.
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(list(spec.submodule_search_locations)[0]).parent


def check_version(target: Target, root: Path) -> None:
    """Refuse a release other than the pinned one, where the tree tells its version."""
    for path in root.glob(f"{target.package}-*.dist-info"):
        version = path.name.removesuffix(".dist-info").split("-", 1)[1]
        _check_release(target, version, where=str(root))


def _check_release(target: Target, version: str, *, where: str) -> None:
    if version != target.version:
        raise EngineError(
            f"{where}: {target.name} {version}, expected one of [{target.version}]; "
            "install that release. Nothing was changed"
        )


def _editable_folder(distribution: metadata.Distribution) -> Path | None:
    """The project folder of ``pip install -e``, None for any other installation."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    url = urllib.parse.urlsplit(origin.get("url", ""))
    if not origin.get("dir_info", {}).get("editable") or url.scheme != "file":
        return None
    return Path(urllib.parse.unquote(url.path))
