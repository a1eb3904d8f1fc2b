"""TokenSpeed as a target: patched, exported, and a load through it that is proven."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm

from loadplan import cli
from loadplan.engines.targets import find_target

TARGET = find_target("tokenspeed")
TREES = Path(__file__).parents[3] / "build" / "engines" / "tokenspeed"


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    return warm.run(["-m", "loadplan", *arguments])


def load(checkpoint: Path, *options: str) -> subprocess.CompletedProcess:
    engine = ("--engine", "tokenspeed", "--engine-dir", TREES / "patched")
    return run("load", checkpoint, *engine, *options)


def test_apply_tells_which_libraries_work_and_revert_takes_all_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the release's extra seems to be all that works, or bytes differ."""
    pristine = {}
    for path in (*TARGET.files, "tokenspeed/__init__.py"):
        pristine[path] = (TREES / "pristine" / path).read_bytes()
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(pristine[path])
    assert cli.main(["apply", "tokenspeed", "--target", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "NOTE InstantTensor 0.1.9 and 0.2.2 both work" in printed
    assert "from there: tokenspeed serve MODEL --load-format instanttensor" in printed
    assert cli.main(["revert", "tokenspeed", "--target", str(tmp_path)]) == 0
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    found = {p.relative_to(tmp_path).as_posix(): p.read_bytes() for p in files}
    assert found == pristine


def test_export_has_a_cover_letter_and_signed_mails(tmp_path: Path) -> None:
    """Red when the change of the extra goes unsaid, or a mail lacks its sign-off."""
    out = tmp_path / "mails"
    assert cli.main(["export", "tokenspeed", "--out", str(out)]) == 0
    letter = (out / "0000-cover-letter.txt").read_text()
    assert '+instanttensor = ["instanttensor>=0.1.9"]' in letter
    mails = sorted(out.glob("*.patch"))
    assert len(mails) == len(list(TARGET.patches.glob("*.patch")))
    for mail in mails:
        text = mail.read_text()
        assert text.count("\nSigned-off-by: loadplan contributors <") == 1, mail.name
        # Helpers of tests are imported before the engine, whose kernels they replace.
        for part in text.split("\ndiff --git ")[1:]:
            fakes, engine = (
                part.find(f"\n+from {package}")
                for package in ("loadplan_fakes", "tokenspeed.")
            )
            assert part.startswith("a/python/") or engine < 0 or fakes < engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "v41"
    assert run("synth", folder, "--size", "8M", "--mixed-engram").returncode == 0
    return folder


@pytest.mark.parametrize(("placement", "route"), [("cpu", "host"), ("gpu", "read")])
def test_load_proves_tables_in_mixed_shards(
    checkpoint: Path, placement: str, route: str
) -> None:
    """Red when rows of a table are wrong, or are left out of the proof."""
    config = json.dumps({"placement": placement})
    result = load(checkpoint, "--engram-config", config, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["wrong"] == []
    assert report["engine"] == "tokenspeed"
    assert report["routes"][route]["tensors"] >= 4
    assert report["routes"]["skip"]["tensors"] == 0
    assert report["routes"]["stream"]["files"] > 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"placement": "disk"}', "placement is 'disk'; expected"),
        ('{"lookup": "peer_read"}', "expected for TokenSpeed only a placement"),
    ],
)
def test_what_tokenspeed_does_not_have_is_refused(
    checkpoint: Path, config: str, message: str
) -> None:
    """Red when an option of another engine is taken and ignored."""
    result = load(checkpoint, "--engram-config", config)
    assert result.returncode == 1
    assert message in result.stderr
