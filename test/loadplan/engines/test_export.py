"""What an export holds, where it refuses, and how texts change on the way."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from engine_tree import TARGET

from loadplan import cli
from loadplan.engines import export, prose, upstream_tests
from loadplan.engines.series import read_series
from loadplan.engines.stages import own_stages
from loadplan.engines.targets import Limits
from loadplan.errors import EngineError


def test_export_is_the_same_each_time_and_prints_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the text depends on a clock or an order, or the limits go unprinted."""
    for name in ("a", "b"):
        assert cli.main(["export", "sglang", "--out", str(tmp_path / name)]) == 0
    mails = [sorted((tmp_path / name).iterdir()) for name in ("a", "b")]
    assert [p.read_bytes() for p in mails[0]] == [p.read_bytes() for p in mails[1]]
    assert mails[0][0].name == "0001-reload-rollback.patch"
    printed = capsys.readouterr().out
    for commit in export.plan_export(TARGET):
        lines = commit.lines
        assert f"{lines.total:6}  {commit.name}\n" in printed
    assert "lines of hunks and glue, below 300" in printed


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when --help stops teaching."""
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    assert "Example:\n  loadplan export sglang --out" in capsys.readouterr().out


def test_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    """Red when an export mixes with files of before, or overwrites them."""
    (tmp_path / "empty").mkdir()
    export.write_export(TARGET, tmp_path / "empty")
    for out in (tmp_path, tmp_path / "empty" / "0001-reload-rollback.patch"):
        with pytest.raises(EngineError, match="expected an empty folder or none"):
            export.write_export(TARGET, out)


def test_every_new_file_comes_once_with_what_needs_it_first() -> None:
    """Red when a commit lacks a file that it imports, or two commits add one."""
    commits = export.plan_export(TARGET)
    paths = [path for commit in commits for path in commit.new]
    assert len(paths) == len(set(paths))
    by_name = {commit.name: commit.new for commit in commits}
    for name, path in (
        ("engram-config", "python/sglang/srt/layers/engram_config.py"),
        ("engram-config", "docs_new/docs/advanced_features/engram_config.mdx"),
        ("safetensors-headers", f"python/{TARGET.core_folder}/__init__.py"),
        ("load-plan", f"{TARGET.rules.helper_folder}/simple.py"),
        ("load-plan", f"{TARGET.rules.helper_folder}/small_loads.py"),
    ):
        assert path in by_name[name], path
    for path, text in (item for new in by_name.values() for item in new.items()):
        if path.startswith("python/sglang/srt/"):
            assert text.startswith(f"{TARGET.rules.licence_header}\n\n"), path
        assert "pytest.mark" not in text, path


def test_core_comes_by_layers() -> None:
    """Red when a mail brings a module that it does not need yet, or lacks one."""
    core = f"python/{TARGET.core_folder}"
    brought: set[str] = set()
    for commit in export.plan_export(TARGET):
        layers = TARGET.layers.get(commit.name, ())
        here = {path for path in commit.new if path.startswith(core)}
        first = {f"{core}/__init__.py"} if layers and not brought else set()
        assert here == {f"{core}/{name}.py" for name in layers} | first, commit.name
        brought |= here
        for path in here:
            tree = ast.parse(commit.new[path])
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.level:
                    assert f"{core}/{node.module}.py" in brought, (path, node.module)


def test_glue_of_a_mail_needs_nothing_of_a_later_one() -> None:
    """Red when a hunk for a later layer stands in an earlier patch."""
    core = f"python/{TARGET.core_folder}/"
    package = TARGET.core_folder.replace("/", ".")
    series = read_series(TARGET.patches)
    for patch, stage in zip(series, own_stages(TARGET, series), strict=True):
        there = {
            path.removeprefix(core).removesuffix(".py")
            for path in stage
            if path.startswith(core)
        }
        for path, text in stage.items():
            used = re.findall(rf"from {re.escape(package)}\.(\w+) import", text)
            assert set(used) <= there, (patch.name, path)


def test_last_stage_is_what_apply_writes() -> None:
    """Red when hunks of the series give other glue than ``python/`` holds."""
    series = read_series(TARGET.patches)
    last = own_stages(TARGET, series)[-1]
    files = TARGET.new_files()
    assert last == {TARGET.upstream(p): text.decode() for p, text in files.items()}
    first = own_stages(TARGET, series)[0]
    assert first == {}


@pytest.mark.parametrize("first", [True, False])
def test_mail_past_a_persons_patience_is_refused(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Red when a mail of any size is written."""
    name = "_FIRST_MAIL_LINES" if first else "_MAIL_LINES"
    monkeypatch.setattr(export, name, 40)
    with pytest.raises(EngineError, match=r"its mail adds \d+ lines .* at most 40"):
        export.plan_export(TARGET)


def limited(**changes: object):
    limits = Limits(hunks=25, hunks_of={"engram-config": 60}, heart=(), heart_lines=1)
    rules = dataclasses.replace(
        TARGET.rules, limits=dataclasses.replace(limits, **changes)
    )
    return dataclasses.replace(TARGET, rules=rules)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hunks_of": {}}, r"engram-config.patch: adds \d+ lines .* fewer than 25"),
        ({"hunks": 11}, r"reload-rollback.patch: adds \d+ lines"),
        (
            {"heart": ("host-resident-weights",), "heart_lines": 100},
            r"host-resident-weights.patch: add \d+ lines .* fewer than 100",
        ),
    ],
)
def test_patch_past_its_limit_is_refused(changes: dict, message: str) -> None:
    """Red when a limit is printed and not kept."""
    with pytest.raises(EngineError, match=message):
        export.plan_export(limited(**changes))


def test_name_that_upstream_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an export could overwrite a file that upstream has added."""
    export._check_paths(TARGET, {"docs_new/docs/new.mdx": ""})
    for taken in (
        "test/registered/unit/model_loader/test_draft_weight_loading.py",
        "docs_new/docs/advanced_features/dspark.mdx",
    ):
        with pytest.raises(EngineError, match="upstream has a file of this name"):
            export._check_paths(TARGET, {taken: ""})


TEST = '''\
import unittest

import pytest
import torch
from helper import (
    b,
    c,
)

from loadplan.standin.gpu import a
from sglang.srt.x import x
from sglang.test.ci import y
from sglang.test.test_utils import z


class Case(z):
    @pytest.mark.feature
    def test_one(self):
        a(b, c)

    @pytest.mark.guard(
        mutation="something "
        "long"
    )
    @other
    def test_two(self):
        """pytest.mark.feature"""
'''


def test_test_loses_our_marks_and_finds_its_helpers(tmp_path: Path) -> None:
    """Red when isort or F401 would complain upstream, or a mark of ours stays."""
    file = tmp_path / "test_x.py"
    file.write_text(TEST)
    moved = {
        "helper": "sglang.test.own.helper",
        "loadplan.standin.gpu": "sglang.test.own.gpu",
    }
    assert upstream_tests._upstream_test(TARGET, file, moved) == (
        f"{TARGET.rules.licence_header}\n\n"
        "import unittest\n\nimport torch\n\nfrom sglang.srt.x import x\n"
        "from sglang.test.ci import y\nfrom sglang.test.own.gpu import a\n"
        "from sglang.test.own.helper import (\n    b,\n    c,\n)\n"
        "from sglang.test.test_utils import z\n\n\nclass Case(z):\n"
        "    def test_one(self):\n        a(b, c)\n\n    @other\n"
        '    def test_two(self):\n        """pytest.mark.feature"""\n'
    )


def test_import_that_upstream_cannot_have_is_refused(tmp_path: Path) -> None:
    """Red when an exported test would need loadplan installed."""
    file = tmp_path / "test_x.py"
    file.write_text("from loadplan.core.plan import make_plan\n")
    with pytest.raises(EngineError, match=r"imports 'loadplan\.core\.plan'"):
        upstream_tests._helpers(file)


def test_page_becomes_mdx() -> None:
    """Red when code would be read as JSX, or the title is lost."""
    page = (
        '# A `--flag`: "what"\n\nText with `{code}`.\n\n    run --x \'{"a": 1}\'\n\n'
        "    again\n\n- item\n  more\n\n    def f(): ...\n"
    )
    assert prose.to_mdx(page, label="p") == (
        '---\ntitle: "A --flag: \\"what\\""\n---\n\nText with `{code}`.\n\n```bash\n'
        "run --x '{\"a\": 1}'\n\nagain\n```\n\n- item\n  more\n\n```python\n"
        "def f(): ...\n```\n"
    )
    for text in ("a {b} c", "a <b> c", "see [there](other.md)"):
        with pytest.raises(EngineError, match="expected text that upstream's pages"):
            prose.to_mdx(f"# T\n\n{text}\n", label="p")
    with pytest.raises(EngineError, match="expected a title"):
        prose.to_mdx("text\n", label="p")
