"""The engine of an environment: found, patched and given back where pip put it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from engine_tree import LOADER, TARGET, make_tree, snapshot

from loadplan.engines import export, targets
from loadplan.errors import EngineError
from loadplan.load import processes

ROOT = Path(__file__).parents[3]
COUNT = len(TARGET.files) + len(TARGET.new_files())


def pip(*arguments: str | Path, path: str = "") -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([*command, *map(str, arguments)], check=True, env=environment)


def run(command: list, folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def build_wheel(tree: Path, folder: Path) -> Path:
    """A wheel of the released engine's touched files."""
    wheel = folder / f"sglang-{TARGET.version}-py3-none-any.whl"
    (tree / TARGET.record).with_name("WHEEL").write_text(
        "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    (tree / "sglang/__init__.py").write_text("")
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in sorted(tree.rglob("*")):
            if path.is_file() and path.name != "RECORD":
                archive.write(path, path.relative_to(tree))
        archive.writestr(TARGET.record, "")
    return wheel


class Environment:
    """A virtual environment without torch, with loadplan from a built wheel."""

    def __init__(self, folder: Path, loadplan: Path):
        self.folder = folder
        self.python = folder / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True
        )
        self.pip("install", "--no-deps", "--no-index", loadplan)
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str | Path, path: str = "") -> None:
        pip("--python", self.python, *arguments, path=path)

    def loadplan(self, *arguments: str) -> str:
        return run([self.folder / "bin" / "loadplan", *arguments], self.folder.parent)


@pytest.fixture(scope="module")
def loadplan_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("loadplan-*.whl")
    return wheel


@pytest.fixture
def environment(tmp_path: Path, loadplan_wheel: Path) -> Environment:
    """In an ignored folder of a git repository, where git apply does nothing."""
    repository = tmp_path / "somebody"
    repository.mkdir()
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    (repository / ".gitignore").write_text(".venv\n")
    return Environment(repository / ".venv", loadplan_wheel)


def test_wheel_in_a_repository_is_patched_and_given_back(
    environment: Environment, tmp_path: Path
) -> None:
    """With loadplan from its wheel, outside its clone, over compiled files.

    Red when a file or RECORD is not as pip left it, or pip cannot uninstall.
    """
    stock = make_tree(tmp_path / "stock")
    wheel = build_wheel(stock, tmp_path)
    environment.pip("install", "--no-deps", "--no-index", wheel)
    subprocess.run([environment.python, "-m", "compileall", "-q", environment.packages])
    before = snapshot(environment.packages)
    compiled = environment.packages / LOADER
    compiled = (
        compiled.parent / "__pycache__" / f"loader.{sys.implementation.cache_tag}"
    )
    assert compiled.with_name(compiled.name + ".pyc").exists()
    record = environment.packages / TARGET.record
    assert b"\r\n" in record.read_bytes()

    out = environment.loadplan("apply", "sglang")
    assert f"in {environment.packages}: patched, {COUNT} files changed" in out
    assert "Next: python -m sglang.launch_server" in out
    assert not compiled.with_name(compiled.name + ".pyc").exists()
    assert json.loads(environment.loadplan("status", "sglang", "--json"))["state"] == (
        "patched"
    )
    environment.loadplan("revert", "sglang")
    after = snapshot(environment.packages)
    assert {p for p in before.keys() ^ after.keys() if "__pycache__" not in p} == set()
    assert {p for p in after if after[p] != before[p]} == set()

    environment.loadplan("apply", "sglang")
    environment.pip("uninstall", "--yes", "sglang")
    assert not (environment.packages / "sglang").exists()


@pytest.mark.parametrize("layout", ["python", "."])
def test_editable_clone_is_patched_where_it_lies(
    environment: Environment, tmp_path: Path, layout: str
) -> None:
    """Red when site-packages is searched instead of the clone, or RECORD is touched."""
    clone = tmp_path / "my clone"
    make_tree(clone / "python")
    (clone / "python/sglang/__init__.py").write_text("")
    source = "." if layout == "python" else "python"
    (clone / layout / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "sglang"\nversion = "{TARGET.version}"\n'
        f'[tool.hatch.build.targets.wheel]\npackages = ["{source}/sglang"]\n'
        f'[tool.hatch.build]\ndev-mode-dirs = ["{source}"]\n'
    )
    # The metadata of an installation that is not this one.
    (clone / "python" / TARGET.record).unlink()
    environment.pip(
        *("install", "--no-deps", "--no-index", "--no-build-isolation"),
        *("--editable", clone / layout),
        path=sysconfig.get_path("purelib"),
    )
    record = environment.packages / TARGET.record
    before, metadata = snapshot(clone), record.read_bytes()
    out = environment.loadplan("apply", "sglang")
    assert f"in {clone / 'python'}: patched, {COUNT} files changed" in out
    assert record.read_bytes() == metadata
    environment.loadplan("revert", "sglang")
    assert snapshot(clone) == before


def test_installed_loadplan_exports_what_its_clone_does(
    environment: Environment, tmp_path: Path
) -> None:
    """Red when tests, helpers or docs are left out of the wheel."""
    environment.loadplan("export", "sglang", "--out", str(tmp_path / "installed"))
    export.write_export(TARGET, tmp_path / "clone")
    assert snapshot(tmp_path / "installed") == snapshot(tmp_path / "clone")


def test_release_without_patches_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an unpinned release is patched, or nobody says which ones can be."""
    tree = make_tree(tmp_path / "tree")
    information = (tree / TARGET.record).parent
    (information / "METADATA").write_text("Name: sglang\nVersion: 0.5.24\n")
    information.rename(tree / "sglang-0.5.24.dist-info")
    monkeypatch.syspath_prepend(str(tree))
    for refuse in (
        lambda: targets.environment_root(TARGET),
        lambda: targets.check_version(TARGET, tree),
    ):
        with pytest.raises(EngineError, match=r"0\.5\.24, expected one of \[0\.5\.23"):
            refuse()


def test_folder_without_a_module_is_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone of loadplan; red when its glue is taken for the engine."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    assert targets.importable_root(TARGET) is None


def test_running_engine_is_found_by_name_and_mapped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a server of this tree is missed, or one of another tree is named."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    tree = make_tree(tmp_path / "tree")
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb')\n"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tree / LOADER)]
    for name, found in (("sglang.launch_server", True), ("my_sglang_notes", False)):
        with subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            running = processes.engine_processes("sglang", tree)
            elsewhere = processes.engine_processes("sglang", tmp_path / "elsewhere")
            process.communicate(b"\n")
        assert (process.pid in running) is found
        assert process.pid not in elsewhere
