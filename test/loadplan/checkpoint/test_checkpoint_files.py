"""Which files a checkpoint has, whatever lies there or is given in its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from files import write_shard

from loadplan.checkpoint.files import read_checkpoint
from loadplan.core.header import LoadPlanError

INDEX = "model.safetensors.index.json"


def shard(folder: Path, name: str = "model.safetensors", tensor: str = "a") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_shard(folder / name, [(tensor, "U8", (8,))])


def index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


# What is given in place of a checkpoint.


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def holding(*names: str):
    def make(folder: Path) -> Path:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".safetensors"):
                shard(path.parent, path.name)
            else:
                path.write_text("{}")
        return folder

    return make


def fifo(folder: Path) -> Path:
    os.mkfifo(folder)
    return folder


def dangling(folder: Path) -> Path:
    folder.symlink_to("gone")
    return folder


STRANGERS = [
    (empty, "an empty folder, expected a checkpoint; download it"),
    (holding("a.gguf", "b.gguf"), "2 .gguf file.s. of GGUF, .* --load-format"),
    (holding("pytorch_model.bin"), "1 .bin file.s. of PyTorch, .* --load-format"),
    (
        holding("model_index.json", "unet/x.safetensors"),
        "a diffusers pipeline, .* name one of its folders: 'unet'",
    ),
    (
        holding("refs/main", "snapshots/4af/x.safetensors"),
        "name one of the folders: 'snapshots/4af'",
    ),
    (holding("model.safetensors.part"), "a download that is not complete"),
    (holding("a", "b", "c", "d"), "'a', 'b', 'c' and 1 more, .* the right folder"),
    (fifo, "a FIFO, expected a folder"),
    (dangling, "a link to 'gone', which is not there"),
    (lambda folder: Path("/dev/zero"), "/dev/zero: a character device, expected a"),
    (lambda folder: Path("org-1/Model-v4.1"), "repository id of a model hub.*hf downl"),
    (lambda folder: Path("nowhere"), "nowhere: no such folder or file, expected"),
    (
        lambda folder: holding("config.json")(folder) / "config.json",
        "config.json: a JSON file, .*; name '.*/given'",
    ),
    (
        lambda folder: holding("a.bin")(folder) / "a.bin",
        "a.bin: refused by safetensors: it is a JSON text",
    ),
]


@pytest.mark.parametrize(("make", "words"), STRANGERS)
def test_what_is_no_checkpoint_is_said(tmp_path: Path, make, words: str) -> None:
    """Red when a user hears only that nothing is there to load, or it hangs."""
    with pytest.raises(LoadPlanError, match=words) as caught:
        read_checkpoint([make(tmp_path / "given")])
    assert "\n" not in str(caught.value)


# config.json


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "config.json: not JSON"),
        (b"[]", "config.json: a list, no JSON object"),
        (b'{"a": ' + b"[" * 100_000, "config.json: .*nested too deep"),
        ('{"num_hidden_layers": 1}'.encode("utf-16"), "it begins as UTF-16"),
        (b'{"num_hidden_layers": "61"}', "num_hidden_layers is '61', expected a whole"),
        (b'{"num_hidden_layers": 61.5}', "num_hidden_layers is 61.5, expected a whole"),
        (b'{"num_hidden_layers": true}', "num_hidden_layers is True, expected a whole"),
        (b'{"num_hidden_layers": -1}', "num_hidden_layers is -1, expected a whole"),
        (b'{"text_config": [1]}', "text_config is .1., expected a JSON object"),
    ],
)
def test_configuration_that_no_engine_reads_is_told(
    tmp_path: Path, content: bytes, words: str
) -> None:
    """Red when inspect finds nothing odd in what a server dies of."""
    shard(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    for given in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(LoadPlanError, match=words):
            read_checkpoint([given])


def test_configuration_that_is_no_file_is_told(tmp_path: Path) -> None:
    """Red when a FIFO hangs inspect, or /dev/zero takes all memory."""
    shard(tmp_path)
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(LoadPlanError, match="config.json: a FIFO, expected"):
        read_checkpoint([tmp_path])
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(LoadPlanError, match="config.json: a character device, exp"):
        read_checkpoint([tmp_path])


@pytest.mark.parametrize(
    ("content", "layers"),
    [
        ("{}", None),
        ('{"num_hidden_layers": null}', None),
        ('{"num_hidden_layers": 61, "text_config": null}', 61),
        ('{"num_hidden_layers": 1, "text_config": {"num_hidden_layers": 2}}', 2),
    ],
)
def test_layers_are_the_text_models(
    tmp_path: Path, content: str, layers: int | None
) -> None:
    """Red when a vision model's layers are counted, or null is an error."""
    shard(tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert read_checkpoint([tmp_path]).layers == layers


# The index


@pytest.mark.parametrize("odd", ["sub/b.safetensors", "b.bin", ".b.safetensors"])
def test_file_of_the_index_that_engines_pass_over_is_told(
    tmp_path: Path, odd: str
) -> None:
    """Red when its tensors are left out and nobody is told."""
    shard(tmp_path)
    shard((tmp_path / odd).parent, Path(odd).name, "b")
    index(tmp_path, {"a": "model.safetensors", "b": odd, "c": odd})
    with pytest.raises(LoadPlanError, match=f"'{odd}' first, so that 2 tensor.s."):
        read_checkpoint([tmp_path])


def test_index_that_names_nothing_is_told(tmp_path: Path) -> None:
    """Red when the folder is called empty."""
    shard(tmp_path)
    index(tmp_path, {})
    with pytest.raises(LoadPlanError, match="the index names no file, .* 1 safetensor"):
        read_checkpoint([tmp_path])


@pytest.mark.parametrize("spelled", ["b.safetensors", "./b.safetensors"])
@pytest.mark.parametrize("given", [".", "here", "./here/../here", "absolute"])
def test_index_counts_however_paths_are_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str, given: str
) -> None:
    """Red when the index is ignored for a folder "." or a shard "./b.safetensors"."""
    folder = tmp_path / "here"
    for name in ("a", "b"):
        shard(folder, f"{name}.safetensors", "x")
    index(folder, {"x": spelled})
    monkeypatch.chdir(folder if given == "." else tmp_path)
    place = str(folder) if given == "absolute" else given
    paths = [Path(place, f"{name}.safetensors") for name in ("a", "b")]
    checkpoint = read_checkpoint(paths)
    (path,) = set(checkpoint.weight_map.values())
    assert path == checkpoint.headers[1].path
    checkpoint = read_checkpoint([Path(place)])
    assert [file.path for file in checkpoint.headers] == [path]
    assert checkpoint.unindexed == ("a.safetensors",)


# The same twice


def test_what_is_given_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a file's bytes are counted double."""
    path = shard(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    near = Path("here", "..", "here", path.name)
    assert len(read_checkpoint([path, path, near]).headers) == 1
    assert len(read_checkpoint([tmp_path / "here", Path("here")]).headers) == 1
