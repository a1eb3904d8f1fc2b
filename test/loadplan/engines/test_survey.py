"""What apply and revert find: other versions of loadplan, and changes of somebody."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from engine_tree import LOADER, PRISTINE, TARGET, make_tree, snapshot

from loadplan.engines import apply, survey, targets, tree
from loadplan.engines.series import read_series
from loadplan.engines.status import status_of
from loadplan.engines.survey import FileState, file_states, sha256
from loadplan.errors import EngineError

CORE = f"{TARGET.core_folder}/plan.py"
GLUE = "sglang/srt/model_loader/planned_weights.py"
RETIRED_FILE = "sglang/__init__.py"
RETIRED_GLUE = "sglang/srt/model_loader/retired_glue.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def states(root: Path) -> set[FileState]:
    return set(file_states(TARGET, root).values())


def other_version(monkeypatch: pytest.MonkeyPatch) -> targets.Target:
    """A loadplan whose patches give other bytes and touch another file too.

    It has a glue file and a core module more than this one.
    """
    new = targets.Target.new_files(TARGET)
    new[CORE] += b"# of another version\n"
    new[f"{TARGET.core_folder}/gone.py"] = b"GONE = 1\n"
    new[RETIRED_GLUE] = b"OLD = 1\n"
    files = {path: dict(hashes) for path, hashes in TARGET.files.items()}
    files[RETIRED_FILE] = {"pristine": sha256(engine_file(RETIRED_FILE))}
    patched = survey._patched

    def more(series, upstream, content):
        return patched(series, upstream, content) + b"# of another version\n"

    for path in files:
        content = more(
            read_series(TARGET.patches),
            TARGET.upstream(path),
            (engine_file(path)),
        )
        files[path]["patched"] = sha256(content)
    monkeypatch.setattr(survey, "_patched", more)
    monkeypatch.setattr(targets.Target, "new_files", lambda self: new)
    return dataclasses.replace(TARGET, files=files)


def engine_file(path: str) -> bytes:
    return (PRISTINE / path).read_bytes()


RETIRING = dataclasses.replace(
    TARGET,
    retired={
        RETIRED_FILE: sha256((PRISTINE / RETIRED_FILE).read_bytes()),
        RETIRED_GLUE: "",
    },
)


@pytest.fixture
def other_tree(root: Path) -> Path:
    """Patched by the other version."""
    with pytest.MonkeyPatch.context() as patch:
        apply.apply(other_version(patch), root)
    return root


def test_leftovers_of_another_version_are_reverted(
    tmp_path: Path, other_tree: Path
) -> None:
    """Red when a byte of another version stays, in a file, a folder or RECORD."""
    assert FileState.OTHER in states(other_tree)
    apply.revert(RETIRING, other_tree)
    assert snapshot(other_tree) == snapshot(make_tree(tmp_path / "stock"))


def test_apply_over_another_version_gives_this_one(
    tmp_path: Path, other_tree: Path
) -> None:
    """Red when an upgrade needs a revert, or leaves modules of before."""
    apply.apply(RETIRING, other_tree)
    fresh = make_tree(tmp_path / "fresh")
    apply.apply(TARGET, fresh)
    assert snapshot(other_tree) == snapshot(fresh)
    assert states(other_tree) == {FileState.PATCHED}
    assert file_states(RETIRING, other_tree).keys() == (
        file_states(TARGET, other_tree).keys()
    )


def test_file_that_this_version_does_not_know_stops_both(other_tree: Path) -> None:
    """A newer version's; red when it is left behind in silence, or written."""
    before = snapshot(other_tree)
    for run in (apply.apply, apply.revert):
        with pytest.raises(EngineError, match="__init__.py: patched by another"):
            run(TARGET, other_tree)
    assert snapshot(other_tree) == before
    assert status_of(TARGET, other_tree).state == "unknown"


@pytest.mark.parametrize("path", [LOADER, CORE, GLUE])
@pytest.mark.parametrize("run", [apply.apply, apply.revert])
def test_file_changed_by_hand_stops_both(root: Path, path: str, run) -> None:
    """Also on top of the patch; red when somebody's edit is overwritten."""
    apply.apply(TARGET, root)
    with (root / path).open("a") as file:
        file.write("# mine\n")
    before = snapshot(root)
    with pytest.raises(EngineError, match=f"{Path(path).name}: changed by something"):
        run(TARGET, root)
    assert snapshot(root) == before
    assert file_states(TARGET, root)[path] is FileState.UNKNOWN


def test_receipt_with_other_content_restores_nothing(root: Path) -> None:
    """Red when bytes are written back that are not the release's."""
    apply.apply(TARGET, root)
    mine = b"import os  # mine\n"
    (root / LOADER).write_bytes(mine)
    originals = root / TARGET.core_folder / "originals"
    (originals / sha256(mine)).write_bytes(b"evil")
    with pytest.raises(EngineError, match="loader.py: changed by something else"):
        apply.revert(TARGET, root)


def test_somebodys_file_in_our_folder_stays(root: Path) -> None:
    """Red when revert removes what loadplan did not write."""
    apply.apply(TARGET, root)
    mine = root / TARGET.core_folder / "mine.py"
    mine.write_text("MINE = 1\n")
    apply.revert(TARGET, root)
    assert mine.read_text() == "MINE = 1\n"
    assert not (root / CORE).exists()


@pytest.mark.parametrize("count", range(0, 60, 10))
def test_killed_revert_of_another_version_is_finished(
    tmp_path: Path, other_tree: Path, count: int
) -> None:
    """After each few steps; red when receipts go before what they are needed for."""
    edits = apply.plan_revert(RETIRING, other_tree)
    tree.commit(other_tree, edits[:count])
    apply.revert(RETIRING, other_tree)
    assert snapshot(other_tree) == snapshot(make_tree(tmp_path / "stock"))


def test_receipts_name_no_path(root: Path) -> None:
    """Red when a file in the tree says where loadplan writes."""
    apply.apply(TARGET, root)
    folder = root / TARGET.core_folder / "originals"
    names = [path.name for path in folder.iterdir()]
    assert names
    assert all(len(name) == 64 and int(name, 16) for name in names)
    # Whatever else lies there is not read and not removed.
    (folder / "paths.json").write_text(json.dumps({"../../../evil.py": "x"}))
    apply.revert(TARGET, root)
    assert [path.name for path in folder.iterdir()] == ["paths.json"]
