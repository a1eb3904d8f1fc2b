"""Run the linters of .pre-commit-config.yaml from the environment, without pre-commit.

    python tools/lint.py

The same commands over the same files, where the environment has the pinned version of
the tool; what it lacks is named and left to ``make lint``. Exit code 1 at a complaint.
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    )
    exclude = re.compile(config["exclude"])
    files = [
        file
        for file in result.stdout.splitlines()
        if not exclude.search(file) and (ROOT / file).is_file()
    ]
    runnable = [hook for hook in hooks if is_here(hook)]
    with ThreadPoolExecutor(2) as pool:
        complaints = list(pool.map(lambda hook: complaint(hook, files), runnable))
    left = [hook["id"] for hook in hooks if hook not in runnable]
    for text in filter(None, complaints):
        print(text)
    print(f"lint: {len(runnable)} checks; left to 'make lint': {', '.join(left)}")
    return 1 if any(complaints) else 0


def is_here(hook: dict) -> bool:
    """Whether the pinned tool, and no other version of it, is installed here."""
    (pin,) = hook["additional_dependencies"]
    name, _, version = pin.partition("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def complaint(hook: dict, files: list[str]) -> str:
    """What the hook says of its files, empty where it says that all is well."""
    wanted, excluded = hook.get("files", ""), hook.get("exclude", "^$")
    types = hook.get("types", ["file"])
    chosen = [
        file
        for file in files
        if re.search(wanted, file)
        and not re.search(excluded, file)
        and ("python" not in types or file.endswith(".py"))
    ]
    tool, *options = shlex.split(hook["entry"])
    program = Path(sys.executable).with_name(tool)
    result = subprocess.run(
        [str(program), *options, *chosen], cwd=ROOT, capture_output=True, text=True
    )
    if result.returncode == 0:
        return ""
    return f"{hook['name']}:\n{result.stdout}{result.stderr}"


if __name__ == "__main__":
    sys.exit(main())
