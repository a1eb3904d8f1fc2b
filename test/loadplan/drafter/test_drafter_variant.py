"""What a variant is made of, in both layouts, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import drafter_variant
import pytest
import torch
from safetensors.torch import load_file, save_file

from loadplan.core.header import LoadPlanError
from loadplan.drafter import checkpoint, head, packing, scheme, variant, verify

BASE = ["config.json", "draft_head.safetensors", "draft_ids.pt"]


@pytest.mark.parametrize("kind", ["int4", "asymmetric", "nvfp4"])
def test_a_variant_has_the_new_head_and_the_rest_byte_for_byte(
    source: Path, layout: str, kind: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a tensor beside the head changes, or the head is another one."""
    before = tiny.hashes(source)
    out = tmp_path / "fast"
    results = drafter_variant.make(source, out, heads, kind=kind)
    assert all(result.ok for result in results)
    assert tiny.hashes(source) == before
    shard = tiny.HEAD_SHARDS[layout]
    old, new = load_file(source / shard), load_file(out / shard)
    written = load_file(getattr(heads, kind))
    assert {n for n in new if n.startswith("lm_head.")} == set(written)
    for name, tensor in new.items():
        expected = written[name] if name in written else old[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    assert {n for n in old if not n.startswith("lm_head.")} < set(new)
    index = json.loads((out / checkpoint.INDEX).read_text())
    assert {n for n, s in index["weight_map"].items() if s == shard} == set(new)
    shards = set(index["weight_map"].values())
    nbytes = sum(t.nbytes for s in shards for t in load_file(out / s).values())
    assert index["metadata"]["total_size"] == nbytes


def test_shards_are_linked_and_all_else_is_its_own(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a file that a later step may rewrite shares its inode."""
    out = tmp_path / "fast"
    drafter_variant.make(source, out, heads)
    inodes = {path.stat().st_ino for path in source.iterdir()}
    names = sorted(os.listdir(out))
    linked = [name for name in names if (out / name).stat().st_ino in inodes]
    assert linked == tiny.LINKED[layout]
    assert tiny.BACKUPS[layout] not in names
    expected = set(os.listdir(source)) - {tiny.BACKUPS[layout]}
    expected |= {*BASE, checkpoint.RECORD}
    assert set(names) == expected
    same = ["tokenizer.json", "generation_config.json"]
    if layout == "streamed":
        same += ["preprocessor_config.json", "video_preprocessor_config.json"]
        same += ["recipe.yaml", "chat_template.jinja"]
    for name in same:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_modes_are_kept(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a server under another user can no longer read a rewritten file."""
    for number, path in enumerate(source.iterdir()):
        path.chmod(0o440 if number % 2 else 0o640)
    out = tmp_path / "fast"
    drafter_variant.make(source, out, heads)
    for name in os.listdir(source):
        if name != tiny.BACKUPS[layout]:
            mode = stat.S_IMODE((source / name).stat().st_mode)
            assert stat.S_IMODE((out / name).stat().st_mode) == mode


def test_an_old_draft_goes_as_a_whole(
    source: Path, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when ids of one draft stay beside the rows of another."""
    tiny.write_old_draft(source)
    drafter_variant.make(source, tmp_path / "fast", heads)
    assert not {"fast_head.safetensors", "vocab_map.pt"} & set(
        os.listdir(tmp_path / "fast")
    )
    ids = torch.load(tmp_path / "fast" / "draft_ids.pt", weights_only=True)
    assert torch.equal(ids, drafter_heads.IDS)


def test_an_old_draft_is_copied_with_its_ids_where_there_is_no_new_one(
    source: Path, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when the draft's head or ids are linked, or one of them is left out."""
    tiny.write_old_draft(source)
    plan = variant.make_plan(source, tmp_path / "fast", heads.int4)
    assert {"fast_head.safetensors", "vocab_map.pt"} <= set(plan.copies)
    assert not set(plan.links) & {"fast_head.safetensors", "vocab_map.pt"}


def test_a_shard_with_a_drafts_own_head_is_copied(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when an indexed file that a draft is written to is linked."""
    shard = tiny.LINKED[layout][0]
    own = "model.mtp_layers.0.shared_head.head.weight"
    drafter_variant.add(source / shard, own, torch.ones(4, tiny.WIDTH))
    index = json.loads((source / checkpoint.INDEX).read_text())
    index["weight_map"][own] = shard
    (source / checkpoint.INDEX).write_text(json.dumps(index))
    drafter_variant.make(source, tmp_path / "fast", heads)
    assert (tmp_path / "fast" / shard).stat().st_nlink == 1
    assert (tmp_path / "fast" / shard).read_bytes() == (source / shard).read_bytes()


def test_the_configuration_gives_the_head_its_format(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when an engine would read the new head as the old one."""
    out = tmp_path / "fast"
    drafter_variant.make(source, out, heads, kind="nvfp4")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert scheme.of_head(config, "lm_head") == scheme.Scheme("nvfp4", 16, True)
    assert next(iter(config["config_groups"])) == scheme.GROUP
    beside = out / "quantization_config.json"
    assert beside.exists() == (layout == "sharded")
    if beside.exists():
        assert json.loads(beside.read_text()) == config


def test_other_groups_keep_their_format_in_a_mixed_configuration() -> None:
    """Red when the linear layers' format is lost, or the head stays ignored."""
    own = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}},
    }
    new = scheme.with_head(own, "lm_head", scheme.Scheme("nvfp4", 16, True))
    assert new["ignore"] == ["re:.*gate$"]
    assert new["format"] == "mixed-precision"
    assert new["config_groups"]["group_0"]["format"] == "pack-quantized"
    assert own["ignore"] == ["lm_head", "re:.*gate$"]
    assert scheme.of_head(own, "lm_head") is None


def test_the_head_is_quantised_in_the_checkpoints_own_format(source: Path) -> None:
    """Red when the defaults are not the checkpoint's group size and symmetry."""
    config = json.loads((source / "config.json").read_text())["quantization_config"]
    assert scheme.choose(config, "lm_head", kind="int4") == tiny.OWN_SCHEME
    config["config_groups"]["group_0"]["weights"] |= {"symmetric": False}
    chosen = scheme.choose(config, "lm_head", kind="int4")
    assert chosen == scheme.Scheme("int4", 32, False)
    config["quant_method"] = "awq"
    with pytest.raises(LoadPlanError, match="quant_method is 'awq'"):
        scheme.choose(config, "lm_head", kind="int4")


def float_head(source: Path) -> torch.Tensor:
    found = checkpoint.read_checkpoint(source)
    return head.read_float_head(found, head.find_head(found))[0]


def test_the_unquantised_head_is_the_backups(source: Path, layout: str) -> None:
    """Red when the head is taken from the int4 one."""
    assert torch.equal(float_head(source), tiny.tensors()["lm_head.weight"])
    # A copy of the backup under the other name is no contradiction.
    other = source / f"{tiny.HEAD_SHARDS[layout]}.bak-2"
    shutil.copy(source / tiny.BACKUPS[layout], other)
    assert torch.equal(float_head(source), tiny.tensors()["lm_head.weight"])


def test_no_backup_is_an_error_that_names_both(source: Path, layout: str) -> None:
    """Red when a rounded head is quantised once more."""
    (source / tiny.BACKUPS[layout]).unlink()
    shard = tiny.HEAD_SHARDS[layout]
    with pytest.raises(LoadPlanError, match=rf"neither {shard}\.bak nor {shard}\.bak-"):
        float_head(source)


def test_two_backups_that_differ_are_an_error_that_names_them(
    source: Path, layout: str
) -> None:
    """Red when one of two heads is taken by chance."""
    shard = tiny.HEAD_SHARDS[layout]
    for name in (".bak", ".bak-orig"):
        if not (source / f"{shard}{name}").exists():
            held = {"lm_head.weight": tiny.tensors(seed=1)["lm_head.weight"]}
            save_file(held, source / f"{shard}{name}")
    with pytest.raises(LoadPlanError, match=r"differ: .*\.bak .*\.bak-orig "):
        float_head(source)


@pytest.mark.parametrize("spoil", ["int4", "shape", "dtype", "absent", "no file"])
def test_a_backup_without_the_head_is_refused(
    source: Path, layout: str, spoil: str
) -> None:
    """Red when a backup of the rounded shard, or of another model, is believed."""
    backup = source / tiny.BACKUPS[layout]
    if spoil == "int4":
        shutil.copy(source / tiny.HEAD_SHARDS[layout], backup)
    elif spoil == "no file":
        backup.write_text("none")
    else:
        weight = {
            "shape": torch.ones(tiny.VOCABULARY - 1, tiny.WIDTH),
            "dtype": torch.ones(tiny.VOCABULARY, tiny.WIDTH, dtype=torch.int32),
            "absent": None,
        }[spoil]
        drafter_variant.change(backup, "lm_head.weight", weight)
    with pytest.raises(LoadPlanError, match=backup.name.replace(".", r"\.")):
        float_head(source)


def test_an_unquantised_checkpoint_needs_no_backup(
    tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a plain checkpoint in one file, without an index, has no variant."""
    source = tiny.write_model(tmp_path / "source")
    before = tiny.hashes(source)
    results = drafter_variant.make(source, tmp_path / "fast", heads)
    assert all(result.ok for result in results)
    assert (tmp_path / "fast" / checkpoint.INDEX).is_file()
    assert tiny.hashes(source) == before


def test_a_head_of_another_checkpoint_is_refused(
    source: Path, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a head of another model is put in, or the two kinds are mixed up."""
    other = tmp_path / "other.st"
    drafter_heads.write_head(other, tiny.OWN_SCHEME, seed=1)
    out = tmp_path / "fast"
    with pytest.raises(LoadPlanError, match="from another head"):
        variant.make_plan(source, out, other)
    with pytest.raises(LoadPlanError, match="with draft ids, expected the other"):
        variant.make_plan(source, out, heads.draft)
    with pytest.raises(LoadPlanError, match="without draft ids, expected the other"):
        variant.make_plan(source, out, heads.int4, draft_head=heads.int4)


def test_bad_places_are_refused_before_work(
    source: Path,
    tmp_path: Path,
    heads: drafter_heads.Heads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when something is written inside of the source, over a folder or in vain."""
    before = tiny.hashes(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    inside = tmp_path / "inside"
    inside.symlink_to(source, target_is_directory=True)
    for out, said in (
        (source / "fast", "inside"),
        (inside / "fast", "inside"),
        (source, "is there already"),
        (tmp_path / "taken", "is there already"),
        (tmp_path / "dangling", "is there already"),
        (tmp_path / "none" / "fast", "folder is missing"),
    ):
        with pytest.raises(LoadPlanError, match=said):
            variant.make_plan(source, out, heads.int4)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(LoadPlanError, match="1000 B are free, expected at least"):
        variant.make_plan(source, tmp_path / "fast", heads.int4)
    inside.unlink()
    assert tiny.hashes(tmp_path) == before


def test_another_file_system_is_an_error_with_the_size_or_a_copy(
    source: Path,
    layout: str,
    tmp_path: Path,
    heads: drafter_heads.Heads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a link that cannot be is tried after hours of work."""
    real = os.stat
    device = real(tmp_path).st_dev + 1

    def elsewhere(path, *arguments, **options):
        found = real(path, *arguments, **options)
        if Path(path) == tmp_path:
            values = list(found)
            values[stat.ST_DEV] = device
            return os.stat_result(values)
        return found

    monkeypatch.setattr(os, "stat", elsewhere)
    out = tmp_path / "fast"
    size = real(source / tiny.LINKED[layout][0]).st_size
    with pytest.raises(LoadPlanError, match=rf"1 shards .*, {size} B, .*--copy"):
        variant.make_plan(source, out, heads.int4)
    plan = variant.make_plan(source, out, heads.int4, copy_links=True)
    assert plan.links == () and set(tiny.LINKED[layout]) <= set(plan.copies)
    monkeypatch.undo()
    assert all(result.ok for result in variant.build(plan, out))
    assert (out / tiny.LINKED[layout][0]).stat().st_nlink == 1


def test_links_of_a_cache_are_followed_to_the_blob(
    layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a variant has links into a cache's snapshot instead of the blob."""
    blobs = tiny.write_layout(tmp_path / "blobs", layout)
    source = tmp_path / "snapshots" / "main"
    source.mkdir(parents=True)
    for path in blobs.iterdir():
        (source / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    before = tiny.hashes(blobs)
    out = tmp_path / "fast"
    results = drafter_variant.make(source, out, heads)
    assert all(result.ok for result in results)
    assert not any(path.is_symlink() for path in out.iterdir())
    for name in tiny.LINKED[layout]:
        assert (out / name).stat().st_ino == (blobs / name).stat().st_ino
    assert tiny.hashes(blobs) == before
    shutil.rmtree(tmp_path / "snapshots")
    assert all(result.ok for result in verify.verify(out))


def test_a_source_that_changes_meanwhile_is_noticed(
    source: Path, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when a variant of two states of a source is kept."""
    plan = variant.make_plan(source, tmp_path / "fast", heads.int4)

    def touch(step: str, total: int):
        if step == "Writing":
            (source / "generation_config.json").write_text("{}")
        return lambda _: None

    with pytest.raises(LoadPlanError, match="generation_config.json has another"):
        variant.build(plan, tmp_path / "fast", start=touch)
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_a_draft_in_the_index_is_not_doubled(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when an engine would find two lists of ids."""
    shard = tiny.LINKED[layout][0]
    drafter_variant.add(source / shard, "model.d2t", torch.arange(4))
    index = json.loads((source / checkpoint.INDEX).read_text())
    index["weight_map"]["model.d2t"] = shard
    (source / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(LoadPlanError, match="a draft's ids already, .'model.d2t'."):
        variant.make_plan(source, tmp_path / "f", heads.int4, draft_head=heads.draft)


def test_the_decoded_head_of_a_variant_is_close_to_the_original(
    source: Path, layout: str, tmp_path: Path, heads: drafter_heads.Heads
) -> None:
    """Red when the head in the variant's shard is not the quantised original."""
    drafter_variant.make(source, tmp_path / "fast", heads, kind="asymmetric")
    held = load_file(tmp_path / "fast" / tiny.HEAD_SHARDS[layout])
    packed = {n[8:]: t for n, t in held.items() if n.startswith("lm_head.")}
    weight = packing.unpack(packed, scheme.Scheme("int4", 64, False))
    original = tiny.tensors()["lm_head.weight"].float()
    assert (weight - original).norm() < 0.15 * original.norm()
