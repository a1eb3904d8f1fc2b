"""What lies on the disk; official safetensors is the judge."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from synthetic import MIB, SMALL, snapshot, tensors_of

from loadplan.core.header import INDEX_NAME, LoadPlanError, TensorHeader
from loadplan.synth import writer
from loadplan.synth.content import content, torch_dtype
from loadplan.synth.layout import layout
from loadplan.synth.options import OPTIONS_NAME, SynthOptions, read_options


def expected_tensor(spec: TensorHeader, *, seed: int) -> torch.Tensor:
    data = content(seed, spec.name, 0, spec.nbytes)
    return torch.from_numpy(data).view(torch_dtype(spec.dtype)).view(spec.shape)


def test_files_equal_official_safetensors_own_byte_for_byte(
    small: Path, tmp_path: Path
) -> None:
    """Red if the header text, its padding, the order of tensors or a byte changes."""
    for shard in layout(SMALL):
        tensors = {t.name: expected_tensor(t, seed=SMALL.seed) for t in shard.tensors}
        save_file(tensors, tmp_path / "official", metadata={"format": "pt"})
        ours = (small / shard.name).read_bytes()
        assert ours == (tmp_path / "official").read_bytes(), shard.name
        assert len(ours) == shard.nbytes


def test_official_safetensors_reads_every_tensor_of_the_layout(small: Path) -> None:
    """Red if a name, dtype, shape or byte that is read differs from the pure layout."""
    for shard in layout(SMALL):
        with safe_open(small / shard.name, framework="pt") as file:
            assert sorted(file.keys()) == sorted(t.name for t in shard.tensors)
            for spec in shard.tensors:
                read = file.get_tensor(spec.name)
                assert read.dtype == torch_dtype(spec.dtype)
                assert tuple(read.shape) == spec.shape
                data = read.contiguous().view(torch.uint8).numpy().tobytes()
                assert data == content(0, spec.name, 0, spec.nbytes).tobytes()


def test_begin_and_end_are_offsets_in_the_file(small: Path) -> None:
    """Red if offsets become relative to the data, as in the header."""
    for shard in layout(SMALL):
        data = (small / shard.name).read_bytes()
        for spec in (shard.tensors[0], shard.tensors[-1]):
            expected = content(0, spec.name, 0, spec.nbytes).tobytes()
            assert data[spec.begin : spec.end] == expected


def test_index_names_each_tensor_once_with_its_file_and_all_bytes(small: Path) -> None:
    """Red if the index leaves a tensor out or counts headers into ``total_size``."""
    index = json.loads((small / INDEX_NAME).read_text())
    shards = layout(SMALL)
    assert index["weight_map"] == {
        tensor.name: shard.name for shard in shards for tensor in shard.tensors
    }
    nbytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    assert index["metadata"] == {"total_size": nbytes}


def test_equal_options_give_equal_folders(small: Path, tmp_path: Path) -> None:
    """Red if anything but the options (time, threads, paths) reaches the files."""
    writer.synthesize(tmp_path / "again", SynthOptions(size=8 * MIB))
    assert snapshot(tmp_path / "again") == snapshot(small)


def test_seed_changes_every_files_bytes_and_no_header(
    small: Path, tmp_path: Path
) -> None:
    """Red if the seed is ignored or changes names, shapes or order."""
    other = dataclasses.replace(SMALL, seed=1)
    writer.synthesize(tmp_path / "other", other)
    assert layout(other) == layout(SMALL)
    for shard in layout(SMALL):
        ours = (small / shard.name).read_bytes()
        theirs = (tmp_path / "other" / shard.name).read_bytes()
        start = shard.tensors[0].begin
        assert ours[:start] == theirs[:start]
        assert ours[start:] != theirs[start:]


def test_large_table_is_written_right_and_in_little_memory(tmp_path: Path) -> None:
    """Red if a chunk lands in another's place, or the writer holds a whole table."""
    options = SynthOptions(size=256 * MIB, engram_fraction=0.9)
    table = tensors_of(options)["layers.1.engram.embed.weight"]
    tracemalloc.start()
    try:
        writer.synthesize(tmp_path / "out", options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB < table.nbytes
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    with open(tmp_path / "out" / index["weight_map"][table.name], "rb") as file:
        # Every border of the writer's chunks is among these.
        for border in range(MIB, table.nbytes, MIB):
            file.seek(table.begin + border - 20)
            expected = content(0, table.name, border - 20, border + 20)
            assert file.read(40) == expected.tobytes(), border


def test_progress_adds_up_to_the_bytes_of_all_files(tmp_path: Path) -> None:
    """Red if headers are left out of the sum: a progress bar would not fill."""
    done: list[int] = []
    writer.synthesize(tmp_path / "out", SMALL, progress=done.append)
    assert sum(done) == sum(shard.nbytes for shard in layout(SMALL))


def test_mixed_tables_share_their_files_with_other_tensors(tmp_path: Path) -> None:
    """Red if ``mixed_engram`` still writes a file of tables alone."""
    options = dataclasses.replace(SMALL, mixed_engram=True)
    for shard in layout(options):
        assert any(".engram.embed." not in tensor.name for tensor in shard.tensors)
    assert set(tensors_of(options)) == set(tensors_of(SMALL))
    writer.synthesize(tmp_path / "out", options)
    for shard in layout(options):
        with safe_open(tmp_path / "out" / shard.name, framework="pt") as file:
            assert len(file.keys()) == len(shard.tensors)


def test_without_index_only_the_index_file_is_missing(
    small: Path, tmp_path: Path
) -> None:
    """Red if ``index`` changes anything but the index and the written options."""
    writer.synthesize(tmp_path / "out", dataclasses.replace(SMALL, index=False))
    ours, full = snapshot(tmp_path / "out"), snapshot(small)
    assert full.keys() - ours.keys() == {INDEX_NAME}
    ours.pop(OPTIONS_NAME)
    assert all(full[name] == data for name, data in ours.items())


@pytest.mark.parametrize("name", ["notes.txt", "model-00001-of-00006.safetensors"])
def test_folder_with_foreign_files_is_refused_untouched(
    tmp_path: Path, name: str
) -> None:
    """Red if somebody's checkpoint with our file names is written over."""
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(LoadPlanError, match=f"holds '{name}'.*expected an empty"):
        writer.synthesize(tmp_path, SMALL)
    assert snapshot(tmp_path) == {name: b"precious"}


def test_finished_checkpoint_and_plain_file_are_refused(
    small: Path, tmp_path: Path
) -> None:
    """Red if a finished checkpoint is begun anew, or a file taken for a folder."""
    before = snapshot(small)
    with pytest.raises(LoadPlanError, match="expected an empty or missing folder"):
        writer.synthesize(small, SMALL)
    assert snapshot(small) == before
    (tmp_path / "file").touch()
    with pytest.raises(LoadPlanError, match="is not a folder"):
        writer.synthesize(tmp_path / "file", SMALL)


class Interrupted(Exception):
    """What an interrupted run dies of."""


def interrupt(out: Path, *, options: SynthOptions, after: int) -> None:
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > after:
            raise Interrupted

    with pytest.raises(Interrupted):
        writer.synthesize(out, options, progress=progress)


def test_interrupted_run_is_recognised_and_completed(
    small: Path, tmp_path: Path
) -> None:
    """Red if a cut run counts as finished, or its finished files are made again."""
    out = tmp_path / "out"
    shards = layout(SMALL)
    interrupt(out, options=SMALL, after=shards[0].nbytes + 1000)
    assert read_options(out) is None
    names = {path.name for path in out.iterdir()}
    assert shards[0].name in names and shards[1].name not in names
    kept = (out / shards[0].name).stat().st_mtime_ns
    done: list[int] = []
    writer.synthesize(out, SMALL, progress=done.append)
    assert sum(done) == sum(shard.nbytes for shard in shards)
    assert (out / shards[0].name).stat().st_mtime_ns == kept
    assert snapshot(out) == snapshot(small)


def test_leftovers_of_other_options_or_with_foreign_files_are_refused(
    tmp_path: Path,
) -> None:
    """Red if files of two seeds, or somebody's file, can end in one checkpoint."""
    out = tmp_path / "out"
    interrupt(out, options=SMALL, after=1000)
    with pytest.raises(LoadPlanError, match="unfinished checkpoint of .*seed=0"):
        writer.synthesize(out, dataclasses.replace(SMALL, seed=1))
    (out / "notes.txt").touch()
    with pytest.raises(LoadPlanError, match="holds 'notes.txt'"):
        writer.synthesize(out, SMALL)


def test_disk_that_is_too_small_is_refused_before_a_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if the run starts and fails when the disk is full."""
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: free)
    with pytest.raises(LoadPlanError, match="the disk has 1000 bytes free, expected"):
        writer.synthesize(tmp_path / "out", SMALL)
    assert not list((tmp_path / "out").glob("*.safetensors*"))
