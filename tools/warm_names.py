"""Write which third-party modules the tests import, for warm_server.py to import once.

    PYTHONPATH=python python tools/warm_names.py FILE

Collects the tests of each engine in a fresh process, in which this module is a pytest
plugin. One name a line, in the order of their import. From then on the compiled modules
lie beside the engines' sources, in the patched trees and in the pristine ones.
"""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FILE = "LOADPLAN_WARM_NAMES"


def main() -> None:
    from loadplan.engines.targets import load_targets

    folders = {
        target.name: [target.rules.tests_folder] for target in load_targets().values()
    }
    folders["sglang"] += ["test/loadplan"]
    names: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "names")
        for engine, tests in folders.items():
            tree = ROOT / "build" / "engines" / engine / "patched"
            paths = [tree, ROOT / "python", Path(__file__).parent]
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "PYTHONDONTWRITEBYTECODE": "",
                _FILE: str(file),
            }
            file.unlink(missing_ok=True)
            options = ["-q", "-p", "warm_names", "-p", "no:cacheprovider"]
            result = subprocess.run(
                [sys.executable, "-m", "pytest", *options, "--collect-only", *tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
            if not file.exists():
                sys.exit(f"{tests}: cannot be collected\n{result.stdout}")
            names |= dict.fromkeys(file.read_text().split())
            compile_like(tree, tree.with_name("pristine"))
    output = Path(sys.argv[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.{os.getpid()}")
    partial.write_text("".join(f"{name}\n" for name in names))
    partial.replace(output)


def compile_like(model: Path, tree: Path) -> None:
    """Compile the modules of a tree that are compiled in another one."""
    for compiled in model.rglob("*.pyc"):
        folder = tree / compiled.parent.parent.relative_to(model)
        source = folder / f"{compiled.name.partition('.')[0]}.py"
        if source.exists():
            py_compile.compile(str(source), quiet=2)


def third_party() -> list[str]:
    """The modules loaded here that come from the library or from a wheel."""
    folders = tuple({os.path.dirname(os.__file__), sys.prefix})
    return [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(folders)
    ]


def pytest_sessionfinish() -> None:
    Path(os.environ[_FILE]).write_text("\n".join(third_party()))


if __name__ == "__main__":
    main()
