"""Headers: official safetensors' verdict, and byte ranges that fit the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from files import content, write_shard
from safetensors import SafetensorError, safe_open

from loadplan.core.header import LoadPlanError, read_header, read_headers, read_index

TENSORS = [
    ("byte", "I8", (1,)),
    ("scalar", "F32", ()),
    ("one", "F32", (1,)),
    ("empty", "U8", (0, 4)),
    ("scale", "F8_E8M0", (3,)),
    ("packed", "F4", (2, 8)),
    ("matrix", "BF16", (3, 5)),
    ("complex", "C64", (1,)),
]


def test_ranges_hold_the_bytes_that_official_safetensors_loads(tmp_path: Path) -> None:
    """Odd offsets, scalars, sub-byte and empty; red when a range is off by one."""
    path = write_shard(tmp_path / "a.safetensors", TENSORS)
    raw = path.read_bytes()
    header = read_header(str(path))
    assert {t.name for t in header.tensors} == {name for name, _, _ in TENSORS}
    with safe_open(path, framework="pt") as official:
        for tensor in header.tensors:
            loaded = official.get_tensor(tensor.name)
            assert loaded.dtype == tensor.torch_dtype
            assert tuple(loaded.shape) == tensor.torch_shape
            expected = bytes(loaded.untyped_storage()) if loaded.numel() else b""
            assert raw[tensor.begin : tensor.end] == expected, tensor.name
    assert header.size == len(raw)
    assert header.payload_bytes == len(raw) - 8 - int.from_bytes(raw[:8], "little")


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"xx",
        lambda raw: b"",
        lambda raw: bytes([0, 5, 0x16, 7, 0, 2, 0, 0]) + b"x" * 92,
        lambda raw: raw[:8] + b"]" + raw[9:],
        lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:],
    ],
    ids=["truncated", "trailing", "no-bytes", "AppleDouble", "no-JSON", "huge-header"],
)
def test_file_that_official_safetensors_refuses_is_refused_by_name(
    tmp_path: Path, damage
) -> None:
    """Red when our verdict on a file is kinder than the official one."""
    path = write_shard(tmp_path / "a.safetensors", TENSORS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt").__enter__()
    with pytest.raises(LoadPlanError, match="a.safetensors: refused by safetensors"):
        read_header(str(path))


@pytest.mark.parametrize("metadata", [None, {}, {"format": "mlx"}])
def test_metadata_is_told_and_never_refused(tmp_path: Path, metadata) -> None:
    """Red when a foreign format is refused here rather than routed around."""
    path = write_shard(tmp_path / "a.safetensors", TENSORS, metadata=metadata)
    assert (read_header(str(path)).metadata or {}) == (metadata or {})


def test_null_metadata_is_none_as_for_official_safetensors(tmp_path: Path) -> None:
    """Red when a writer that fills in null for no metadata is refused."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    text = json.dumps({"__metadata__": None, "x": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
    assert read_header(str(path)).metadata is None


def test_fifo_is_refused_without_opening_it(tmp_path: Path) -> None:
    """Opening a FIFO blocks for ever; red when only regular files stop being read."""
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(LoadPlanError, match="not a regular file"):
        read_header(str(tmp_path / "a.safetensors"))


def test_tensor_with_half_a_byte_per_row_has_no_torch_dtype(tmp_path: Path) -> None:
    """Official safetensors lists F4 [3, 2, 1] and cannot load it; red when we can."""
    path = write_shard(tmp_path / "a.safetensors", [("x", "F4", (3, 2, 1))])
    with safe_open(path, framework="pt") as official:
        with pytest.raises(SafetensorError):
            official.get_tensor("x")
    (tensor,) = read_header(str(path)).tensors
    assert tensor.torch_dtype is None


def test_memory_and_disk_are_told_apart_and_links_share_an_identity(
    tmp_path: Path,
) -> None:
    """Red when tmpfs is taken for a disk, or when a link counts as a second file."""
    disk = write_shard(tmp_path / "a.safetensors", TENSORS)
    (tmp_path / "link.safetensors").symlink_to(disk)
    memory = Path("/dev/shm", f"loadplan-{os.getpid()}.safetensors")
    try:
        write_shard(memory, TENSORS)
        paths = [str(disk), str(tmp_path / "link.safetensors"), str(memory)]
        first, link, third = read_headers(paths)
    finally:
        memory.unlink()
    assert (first.in_memory, third.in_memory) == (False, True)
    assert first.identity == link.identity != third.identity
    assert [h.path for h in (first, link, third)] == paths


def test_index_maps_names_to_paths_and_is_none_where_there_is_none(
    tmp_path: Path,
) -> None:
    """Red when a shard is not looked for in the checkpoint's folder."""
    assert read_index(str(tmp_path)) is None
    index = {"weight_map": {"x": "sub/a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_index(str(tmp_path)) == {"x": str(tmp_path / "sub/a.safetensors")}


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/a", "b/../../a"])
def test_index_that_leaves_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    """Red when an untrusted index chooses files outside the checkpoint."""
    index = {"weight_map": {"x": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadPlanError, match="names shard"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("shard", ["", ".", "./", "a\0b", "\ud800.safetensors"])
def test_index_that_names_no_file_is_refused(tmp_path: Path, shard: str) -> None:
    """Red when its tensors are left out silently, or the error is a raw one."""
    index = {"weight_map": {"x": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LoadPlanError, match="names shard .* for tensor 'x'"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("shard", ["./a.safetensors", ".//./a.safetensors"])
def test_index_may_spell_a_path_in_other_ways(tmp_path: Path, shard: str) -> None:
    """Red when a shard is not the file that a listing of the folder gives."""
    index = {"weight_map": {"x": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_index(str(tmp_path)) == {"x": str(tmp_path / "a.safetensors")}


@pytest.mark.parametrize("instead", ["folder", "FIFO", "link"])
def test_what_is_no_file_in_the_place_of_the_index_is_refused(
    tmp_path: Path, instead: str
) -> None:
    """Red when it counts as no index, so that stale copies load, or when it hangs."""
    path = tmp_path / "model.safetensors.index.json"
    if instead == "folder":
        path.mkdir()
    elif instead == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("blob")
    with pytest.raises(LoadPlanError, match=f"index.json: a {instead}.*, expected a"):
        read_index(str(tmp_path))


def test_index_that_gives_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    """Red when the last of two shards wins silently."""
    text = '{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LoadPlanError, match="the key 'x' is given twice"):
        read_index(str(tmp_path))


@pytest.mark.parametrize("dangling", [True, False])
def test_missing_shard_and_dangling_link_have_their_own_texts(
    tmp_path: Path, dangling: bool
) -> None:
    """Red when an incomplete download ends in a bare FileNotFoundError."""
    path = tmp_path / "a.safetensors"
    if dangling:
        path.symlink_to(tmp_path / "blob")
    text = "a link to '.*blob', which is not there" if dangling else "no such file"
    with pytest.raises(LoadPlanError, match=f"a.safetensors: {text}"):
        read_header(str(path))


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": 3}}', "null", NESTED],
)
def test_index_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """Red when a broken index ends in a bare KeyError."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        LoadPlanError, match="index.json: .*, expected a JSON object whose"
    ):
        read_index(str(tmp_path))


PICKLE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "a git-LFS pointer",
        ),
        (b"\n<!DOCTYPE html><html>", "an HTML page"),
        (b"<?xml version='1.0'?><Error/>", "an XML text"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"GGUF\3\0\0\0", "a GGUF file"),
        (b"PK\3\4\0\0\x08\x08", "a zip archive"),
        (PICKLE, "a pickle"),
        (b"", "an empty file"),
        (bytes(4096), "zero bytes"),
    ],
)
def test_file_of_another_kind_is_told(tmp_path: Path, found: bytes, words: str) -> None:
    """Red when a pointer or a page in a shard's place is only "header too large"."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(found)
    with pytest.raises(LoadPlanError, match=f"refused by safetensors: it is {words}"):
        read_header(str(path))


@pytest.mark.parametrize("length", [0x7B, 0x3C, 0x8B1F, 0x280])
def test_damaged_shard_is_not_taken_for_something_else(
    tmp_path: Path, length: int
) -> None:
    """Red when a header's length looks like the begin of a text or an archive."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{" * length)
    with pytest.raises(LoadPlanError, match="download the file again"):
        read_header(str(path))


def test_content_is_told_apart_by_position() -> None:
    """The fixture itself: a read shifted by one byte must show."""
    assert content(600)[1:] != content(599)


def test_file_larger_than_the_memory_is_read(tmp_path: Path) -> None:
    """8 TiB, sparse; red when reading a header maps the file so that it needs room."""
    path = write_shard(
        tmp_path / "a.safetensors", [("a", "U8", (1 << 43,))], payload=b""
    )
    os.truncate(path, path.stat().st_size + (1 << 43))
    assert read_header(str(path)).tensors[0].nbytes == 1 << 43
