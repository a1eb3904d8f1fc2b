"""The commands in the docs: run where nothing but this machine is needed, else parsed.

A block is only parsed where the paragraph before it says what it needs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from engine_tree import make_tree

from loadplan import cli
from loadplan.doctor import Need, host
from loadplan.engines import targets

ROOT = Path(__file__).parents[3]
ENGINES = ROOT / "build" / "engines"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

# These are worked through from top to bottom, by a reader and by this test.
RUN = (
    "start-here.md",
    "operators-sglang.md",
    "operators-tokenspeed.md",
    "operators-vllm.md",
    "upstreaming.md",
)
NEEDS = re.compile(r"needs a GPU|needs a clone|as root")
BLOCK = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)


def blocks(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each block of commands with the paragraph before it."""
    text = page.read_text() + "\n"
    for found in BLOCK.finditer(text):
        before = text[: found.start()].rstrip()
        if not text[: found.start()].endswith("\n\n"):
            continue  # a list's own lines
        lines = [line.strip() for line in found[0].splitlines()]
        yield before[before.rfind("\n\n") + 1 :], lines


def commands(page: Path) -> list[tuple[str, bool]]:
    """Every command with whether it is only parsed."""
    found = []
    for before, lines in blocks(page):
        text = "\n".join(lines).replace("\\\n", " ")
        for line in text.splitlines():
            found.append((line, NEEDS.search(before) is not None))
    return found


# How each kind of command is checked where it is not run.


def parse_loadplan(words: list[str]) -> None:
    parser, _ = cli.make_parser()
    parser.parse_args(words[1:])


def parse_server(words: list[str]) -> None:
    import argparse

    from sglang.srt.layers.engram_config import parse_engram_config
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    engram_config = parser.parse_args(words[3:]).engram_config
    if engram_config is not None:
        parse_engram_config(engram_config)


def parse_docker(words: list[str]) -> None:
    parse_loadplan(words[words.index("IMAGE") + 1 :])
    # What the page asks Docker for is what the doctor says.
    told = " ".join(
        (ROOT / f"python/loadplan/doctor/{name}.py").read_text()
        for name in ("storage", "host", "gpu")
    )
    for option in ("--ipc=host", "--ulimit memlock=-1", "seccomp=unconfined"):
        assert option in told and option in " ".join(words)


def parse_setting(words: list[str]) -> None:
    assert words[2] == ">"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_try_huge_pages", lambda shared: "refused")
        changes = [
            host._huge_pages(Need(layout=layout), shared=shared).change
            for layout, shared in (("per_rank", False), ("shared", True))
        ]
    assert any(" ".join(words) in change for change in changes)


def parse_make(words: list[str]) -> None:
    assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def parse_by_source(words: list[str]) -> None:
    """The options stand in the modules of the engine that declare arguments."""
    modules = (ROOT / "build/engines" / words[0] / "patched").rglob("*arg*.py")
    declared = "".join(module.read_text() for module in modules)
    for option in re.findall(r"--([a-z-]+)", " ".join(words)):
        assert option in declared or option.replace("-", "_") in declared, option


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "loadplan": parse_loadplan,
    "python -m sglang.launch_server": parse_server,
    "docker run": parse_docker,
    "echo": parse_setting,
    "make": parse_make,
    "tokenspeed serve": parse_by_source,
    "vllm serve": parse_by_source,
    "pip install": lambda words: None,
    "git am": lambda words: None,
    "cd sglang && git am": lambda words: None,
}


def parse(command: str) -> None:
    kinds = [kind for kind in PARSERS if command.startswith(kind)]
    if not kinds:
        pytest.fail(f"{command!r}: no way to check it; add one or take it out")
    PARSERS[kinds[0]](shlex.split(command))


# Blocks that are no commands, or that only maintainers of the set type.
NOT_HERE = {"patches.md", "benchmark.md"}
# Code, and what a log says.
NOT_COMMANDS = ("@", "def ", "The ", "the ", "Draft ", "preserved ")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name not in NOT_HERE], ids=lambda page: page.name
)
def test_every_command_is_understood(page: Path) -> None:
    """Red when an option is renamed and a page still has the old one."""
    for command, _ in commands(page):
        if not command.startswith(NOT_COMMANDS):
            parse(command)


@pytest.mark.parametrize("name", RUN)
def test_page_can_be_worked_through(name: str, tmp_path: Path) -> None:
    """From an empty folder; red when a command fails that says it needs nothing."""
    site = tmp_path / "site"
    for target in targets.load_targets().values():
        make_tree(site, target=target)
    folder = tmp_path / "work"
    folder.mkdir()
    ran = 0
    for command, only_parsed in commands(ROOT / "docs" / name):
        words = shlex.split(command)
        if only_parsed or words[0] != "loadplan":
            continue
        # Loads run the whole engine, patches change a small tree of it.
        engine = site
        if words[1] == "load":
            name = words[words.index("--engine") + 1] if "--engine" in words else ""
            engine = ENGINES / (name or "sglang") / "patched"
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{engine}"}
        result = warm.run(["-m", *words], cwd=folder, env=environment)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        ran += 1
    assert ran >= 1


def test_every_engine_has_its_pages() -> None:
    """Red when patches for an engine come without a guide, or README leaves it out."""
    for name, target in targets.load_targets().items():
        assert (ROOT / "docs" / f"operators-{name}.md").exists()
        for page in ("README.md", "docs/start-here.md", f"docs/operators-{name}.md"):
            text = (ROOT / page).read_text().lower()
            assert f"{name} {target.version}" in text, page


def test_pages_lead_to_each_other() -> None:
    """Red when a link leads nowhere, or a page cannot be found from the README."""
    reached = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        if page.suffix != ".md":
            continue
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            target = (page.parent / link).resolve()
            assert target.exists(), f"{page.name}: {link}"
            waiting.append(target)
    assert {page for page in reached if page.suffix == ".md"} >= set(PAGES)
