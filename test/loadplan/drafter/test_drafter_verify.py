"""Each check of verify has a damaged variant that fails it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import drafter_variant
import pytest
import torch
from drafter_variant import add, change
from safetensors.torch import load_file, save_file

from loadplan import cli
from loadplan.drafter import checkpoint, quantize, verify

SHARD = tiny.HEAD_SHARDS["sharded"]
LINKED = tiny.LINKED["sharded"][0]


@pytest.fixture
def made(tmp_path: Path, heads: drafter_heads.Heads) -> tuple[Path, Path]:
    source = tiny.write_layout(tmp_path / "source", "sharded")
    drafter_variant.make(source, tmp_path / "fast", heads, kind="asymmetric")
    return tmp_path / "fast", source


def edit_json(path: Path, edit: Callable[[dict], None]) -> None:
    held = json.loads(path.read_text())
    edit(held)
    path.write_text(json.dumps(held))


def head_of(fast: Path) -> dict[str, torch.Tensor]:
    return load_file(fast / SHARD)


def lost_entry(fast: Path, _: Path) -> None:
    change(fast / SHARD, "model.norm.weight", None)


def lost_shard(fast: Path, _: Path) -> None:
    (fast / LINKED).unlink()


def doubled(fast: Path, _: Path) -> None:
    add(fast / "more.safetensors", "model.norm.weight", torch.ones(tiny.WIDTH))


def backup(fast: Path, source: Path) -> None:
    name = tiny.BACKUPS["sharded"]
    shutil.copy(source / name, fast / name)


def config_says_floating(fast: Path, _: Path) -> None:
    def edit(config: dict) -> None:
        config["quantization_config"]["ignore"] = ["lm_head"]

    edit_json(fast / "config.json", edit)


def configs_differ(fast: Path, _: Path) -> None:
    def edit(config: dict) -> None:
        config["config_groups"]["drafter_head"]["weights"]["group_size"] = 128

    edit_json(fast / "quantization_config.json", edit)


def config_says_nvfp4(fast: Path, _: Path) -> None:
    def edit(config: dict) -> None:
        group = config["quantization_config"]["config_groups"]["drafter_head"]
        group["weights"] |= {"type": "float", "group_size": 16, "symmetric": True}

    edit_json(fast / "config.json", edit)


def other_groups(fast: Path, _: Path) -> None:
    for name in ("config.json", "quantization_config.json"):

        def edit(config: dict) -> None:
            config = config.get("quantization_config", config)
            config["config_groups"]["drafter_head"]["weights"]["group_size"] = 32

        edit_json(fast / name, edit)


def other_shape(fast: Path, _: Path) -> None:
    shape = torch.tensor([tiny.WIDTH, tiny.VOCABULARY])
    change(fast / SHARD, "lm_head.weight_shape", shape)


def no_zero_points(fast: Path, _: Path) -> None:
    change(fast / SHARD, "lm_head.weight_zero_point", None)
    edit_json(
        fast / checkpoint.INDEX,
        lambda index: index["weight_map"].pop("lm_head.weight_zero_point"),
    )


def infinite_scale(fast: Path, _: Path) -> None:
    scale = head_of(fast)["lm_head.weight_scale"]
    scale[5, 0] = float("inf")
    change(fast / SHARD, "lm_head.weight_scale", scale)


def zero_scale(fast: Path, _: Path) -> None:
    scale = head_of(fast)["lm_head.weight_scale"]
    scale[:] = 0
    change(fast / SHARD, "lm_head.weight_scale", scale)


def no_draft(fast: Path, _: Path) -> None:
    (fast / "draft_head.safetensors").unlink()


def draft_of_zeros(fast: Path, _: Path) -> None:
    path = fast / "draft_head.safetensors"
    scale = load_file(path)["draft_head.weight_scale"]
    change(path, "draft_head.weight_scale", torch.zeros_like(scale))


def ids(edit: Callable[[torch.Tensor], torch.Tensor], *, alone: bool = False):
    def damage(fast: Path, _: Path) -> None:
        path = fast / "draft_head.safetensors"
        new = edit(load_file(path)["draft_ids"].clone())
        torch.save(new, fast / "draft_ids.pt")
        if not alone:
            change(path, "draft_ids", new)
            change(path, "d2t", quantize.offsets(new))

    return damage


def twice(held: torch.Tensor) -> torch.Tensor:
    held[1] = held[0]
    return held


def outside(held: torch.Tensor) -> torch.Tensor:
    held[-1] = tiny.VOCABULARY
    return held


def unsorted(held: torch.Tensor) -> torch.Tensor:
    return held.flip(0)


def fewer(held: torch.Tensor) -> torch.Tensor:
    return held[:-1]


def shifted(held: torch.Tensor) -> torch.Tensor:
    return held + 1


def other_d2t(fast: Path, _: Path) -> None:
    path = fast / "draft_head.safetensors"
    change(path, "d2t", torch.zeros_like(load_file(path)["d2t"]))


def linked_json(fast: Path, source: Path) -> None:
    (fast / "tokenizer.json").unlink()
    os.link(source / "tokenizer.json", fast / "tokenizer.json")


def linked_head(fast: Path, source: Path) -> None:
    os.rename(fast / SHARD, source.parent / "kept")
    os.link(source.parent / "kept", fast / SHARD)


def other_shard(fast: Path, _: Path) -> None:
    held = load_file(fast / LINKED)
    held["model.embed_tokens.weight"][3, 3] += 1
    (fast / LINKED).unlink()
    save_file(held, fast / LINKED, {"format": "pt"})


def other_rows(fast: Path, _: Path) -> None:
    packed = head_of(fast)["lm_head.weight_packed"]
    change(fast / SHARD, "lm_head.weight_packed", packed.roll(8, dims=0))


def touched_source(_: Path, source: Path) -> None:
    os.utime(source / "tokenizer.json", ns=(1, 1))


def rewritten_source(_: Path, source: Path) -> None:
    path = source / LINKED
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def new_in_source(_: Path, source: Path) -> None:
    (source / "model.safetensors.bak").write_text("new")


DAMAGES = [
    ("index", lost_entry),
    ("index", lost_shard),
    ("one shard each", doubled),
    ("no backup", backup),
    ("head format", config_says_floating),
    ("head format", configs_differ),
    ("head format", config_says_nvfp4),
    ("head geometry", other_groups),
    ("head geometry", other_shape),
    ("head geometry", no_zero_points),
    ("round trip", infinite_scale),
    ("round trip", zero_scale),
    ("draft head", no_draft),
    ("draft head", draft_of_zeros),
    ("draft ids", ids(twice)),
    ("draft ids", ids(outside)),
    ("draft ids", ids(unsorted)),
    ("draft ids", ids(fewer)),
    ("draft ids", ids(shifted, alone=True)),
    ("draft ids", other_d2t),
    ("draft rows", ids(shifted)),
    ("own files", linked_json),
    ("own files", linked_head),
    ("linked shards", other_shard),
    ("head rows", other_rows),
    ("source unchanged", touched_source),
    ("source unchanged", rewritten_source),
    ("source unchanged", new_in_source),
]


def failed(results: list[verify.Result]) -> set[str]:
    return {result.name for result in results if not result.ok}


@pytest.mark.parametrize(
    ("name", "damage"), DAMAGES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(DAMAGES)]
)
def test_damage_fails_its_check(
    made: tuple[Path, Path], name: str, damage: Callable[[Path, Path], None]
) -> None:
    """Red when a check no longer sees what it is there for."""
    fast, source = made
    damage(fast, source)
    found = {result.name: result for result in verify.verify(fast, source)}
    assert not found[name].ok, found
    assert "expected" in found[name].detail or name in ("index", "draft head")


def test_every_check_has_its_damage(made: tuple[Path, Path]) -> None:
    """Red when a check is added that no damaged variant fails."""
    names = {result.name for result in verify.verify(*made)}
    assert names == {name for name, _ in DAMAGES}


def test_the_command_prints_a_line_a_check_and_fails(
    made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the count, the lines, the JSON or the exit code is lost."""
    fast, source = map(str, made)
    assert cli.main(["drafter", "verify", fast, "--source", source]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "13 of 13"
    assert len(lines) == 14 and all(line.startswith("ok   ") for line in lines[:-1])
    no_draft(made[0], made[1])
    assert cli.main(["drafter", "verify", fast]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "7 of 10"
    assert sum(line.startswith("FAIL ") for line in lines) == 3
    assert cli.main(["drafter", "verify", fast, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["held"], told["of"]) == (7, 10)
    assert [c["name"] for c in told["checks"] if not c["ok"]] == [
        "draft head",
        "draft ids",
        "draft rows",
    ]


def test_a_variant_without_a_draft_of_its_own_holds(
    tmp_path: Path, heads: drafter_heads.Heads, layout: str, source: Path
) -> None:
    """Red when a draft that uses the model's head is taken for a lost one."""
    results = drafter_variant.make(source, tmp_path / "fast", heads, draft=False)
    assert failed(results) == set()


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    """Red when verify of a typo says that checks failed."""
    with pytest.raises(ValueError, match="no folder"):
        verify.verify(tmp_path / "none")
