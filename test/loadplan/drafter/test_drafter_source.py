"""The source stays as it is whatever writes to the variant later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import drafter_variant
import pytest

from loadplan.drafter import checkpoint

HERE = Path(__file__).parent
VERSIONS = ("0.4.5", "0.7.0", "0.8.0")
# Found by running it: these open the file that is there and write into its inode.
REACHING = {("safetensors", "0.4.5"), ("safetensors", "0.7.0"), ("torch", "0.8.0")}


def rewrite(how: str, version: str, *paths: Path) -> None:
    """Write to ``paths`` in place, by a release of safetensors or by torch.save."""
    old = drafter_heads.ROOT / "build" / "safetensors" / version
    environment = dict(os.environ)
    if version != "0.8.0":
        if not (old / ".stamp").is_file():
            pytest.skip(f"no safetensors {version}: run make setup")
        environment["PYTHONPATH"] = str(old)
    command = [sys.executable, HERE / "drafter_rewrite.py", how, *paths]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == version


@pytest.mark.parametrize(
    ("how", "version"),
    [*(("safetensors", version) for version in VERSIONS), ("torch", "0.8.0")],
)
def test_a_later_rewrite_of_a_variant_leaves_the_source_as_it_was(
    tmp_path: Path, heads: drafter_heads.Heads, how: str, version: str
) -> None:
    """Red when a file that may be rewritten is a hard link to the source's.

    Or when a writer changes its ways, so that less or more is shown: a hard link of the
    test's own tells who reaches through one.
    """
    sources, written = {}, []
    for layout in tiny.LAYOUTS:
        source = tiny.write_layout(tmp_path / layout, layout)
        tiny.write_old_draft(source)
        sources[source] = tiny.hashes(source)
        for name, draft in (("fast", True), ("same-draft", False)):
            out = tmp_path / f"{layout}-{name}"
            if draft:
                drafter_variant.make(source, out, heads)
            else:
                # A draft of other hands stays, and verify would miss ours in it.
                _build_unverified(source, out, heads)
            held = checkpoint.read_checkpoint(out)
            shards = set(held.headers) - {tiny.HEAD_SHARDS[layout]}
            assert sorted(shards) == tiny.LINKED[layout]
            written += [out / name for name in held.names if name not in shards]
    assert len(written) > 30
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"source")
    os.link(path, link)
    rewrite(how, version, *written, link)
    reached = path.read_bytes() != b"source"
    assert reached == ((how, version) in REACHING)
    for source, before in sources.items():
        assert tiny.hashes(source) == before


def _build_unverified(source: Path, out: Path, heads: drafter_heads.Heads) -> None:
    from loadplan.drafter import files, variant

    plan = variant.make_plan(source, out, heads.int4)
    out.mkdir()
    variant._fill(plan, out, files.no_progress)
