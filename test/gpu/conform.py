"""Compare the InstantTensor stub with the installed library, odd file by odd file.

    python test/gpu/conform.py [--disk DIR] [--only REGEX]

Needs one GPU, torch and instanttensor (0.2.2 or 0.1.9; the stub of the same release is
taken). Prints one line a case: SAME, or DIFF and what differs. Takes two minutes.
Exit codes: 0 all the same, 1 a difference, 2 not possible here.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

Comparison = Callable[[], list[str]]
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "python"))

import odd_files  # noqa: E402

from loadplan.standin import gpu  # noqa: E402
from loadplan.standin.backends import in_memory  # noqa: E402
from loadplan.standin.reads import required_buffer_size_for_io  # noqa: E402
from loadplan.standin.ring import ring_for_tensors  # noqa: E402


def main() -> int:
    """Run every case; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", help="a folder on a disk; default: the temporary one")
    parser.add_argument("--only", default="", help="only cases whose name matches")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("conform: no CUDA device, expected one", file=sys.stderr)
        return 2
    import instanttensor

    with (
        tempfile.TemporaryDirectory(dir=arguments.disk) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        if in_memory(disk):
            print(f"conform: {disk} is in memory; give --disk", file=sys.stderr)
            return 2
        differing = compared = 0
        for name, compare in _comparisons(instanttensor, Path(disk), Path(memory)):
            if not re.search(arguments.only, name):
                continue
            differences = compare()
            compared += 1
            differing += bool(differences)
            print(
                "DIFF" if differences else "SAME",
                name,
                *differences,
                sep="  ",
                flush=True,
            )
    print(f"{compared} cases, {differing} differ")
    return 1 if differing else 0


def _comparisons(real, disk: Path, memory: Path) -> Iterator[tuple[str, Comparison]]:
    version = odd_files.version_of(real)
    stub = gpu.make_module(version)
    torch.ones(1, device="cuda")  # The context takes memory: before it is measured.
    yield "arguments and names", partial(_unequal, odd_files.surface, stub, real)
    if version == "0.2.2":
        impl = importlib.import_module("instanttensor._impl")
        yield (
            "ring sizes",
            partial(
                _unequal,
                lambda pair: odd_files.ring_sizes(*pair),
                (required_buffer_size_for_io, ring_for_tensors),
                (
                    impl.required_buffer_size_for_io,
                    impl.recommended_buffer_size_for_tensors,
                ),
            ),
        )
    for number, case in enumerate(odd_files.cases(version)):
        files = case.write(*(_folder(root, number) for root in (disk, memory)))
        yield case.name, partial(_case, real, version, case, files)
    good = odd_files.Case("good", (odd_files.GOOD, odd_files.SECOND))
    files = good.write(disk, memory)
    for name, (probe, _) in odd_files.PROBES.items():
        yield (
            name,
            partial(_unequal, lambda m, p=probe: p(m.safe_open, files), stub, real),
        )


def _folder(root: Path, number: int) -> Path:
    # One folder a case: a file read through mmap may stay mapped for a while.
    folder = root / str(number)
    folder.mkdir()
    return folder


def _unequal(ask, stub, real) -> list[str]:
    ours, theirs = ask(stub), ask(real)
    return [] if ours == theirs else [f"stub {ours!r}", f"real {theirs!r}"]


def _case(real, version: str, case: odd_files.Case, files: list[str]) -> list[str]:
    free_memory, _ = torch.cuda.mem_get_info()
    stub = gpu.make_module(version, free_memory=free_memory)
    expected = case.expects(version)
    seen = []
    for module in (real, stub):
        one = odd_files.observe(
            module.safe_open, list(files), env=case.env, **case.kwargs
        )
        one.error = one.error and (one.error[0], _first_line(one.error[1]))
        if not isinstance(expected, odd_files.Raises):
            one.tensors = odd_files.certain(one.tensors, expected)
        seen.append(one)
    theirs, ours = seen
    names = [field.name for field in fields(odd_files.Observed)]
    return [
        f"{name}: stub {_short(ours, name)}; real {_short(theirs, name)}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _first_line(text: str) -> str:
    return odd_files.comparable(text).splitlines()[0]


def _short(seen: odd_files.Observed, name: str) -> str:
    value = getattr(seen, name)
    if name == "tensors":
        value = [replace(got, data=got.data[:32]) for got in value]
    return re.sub(r"\s+", " ", repr(value))


if __name__ == "__main__":
    sys.exit(main())
