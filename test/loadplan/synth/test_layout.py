"""Which file holds which tensor."""

from __future__ import annotations

import pytest
from synthetic import MIB, PUBLISHED_SIZE, SMALL, tensors_of

from loadplan.core.header import LoadPlanError
from loadplan.synth.layout import engram_tables, layout
from loadplan.synth.options import SynthOptions


def test_tables_lie_alone_in_one_file_each_by_default() -> None:
    """Red if another tensor joins a table's file, or both tables share one."""
    tables = [
        {tensor.name for tensor in shard.tensors}
        for shard in layout(SMALL)
        if any(".engram.embed." in tensor.name for tensor in shard.tensors)
    ]
    assert tables == [
        {f"layers.{layer}.engram.embed.{field}" for field in ("weight", "scale")}
        for layer in (1, 2)
    ]


@pytest.mark.parametrize("mixed", [False, True])
def test_shards_counts_every_file(mixed: bool) -> None:
    """Red if the tables' files are not counted in ``shards``."""
    for count in (3, 7):
        shards = layout(SynthOptions(shards=count, mixed_engram=mixed))
        assert [shard.name for shard in shards] == [
            f"model-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]


def test_published_size_has_the_published_files_and_layers() -> None:
    """Red if the largest class leaves the published 48 files or layers 1 and 14."""
    options = SynthOptions(size=PUBLISHED_SIZE, engram_fraction=0.427)
    shards = layout(options)
    assert len(shards) == 48
    assert abs(sum(shard.nbytes for shard in shards) / PUBLISHED_SIZE - 1) < 0.02
    assert [table.layer_id for table in engram_tables(options)] == [1, 14]


def test_table_rows_dtypes_and_bounds_agree_with_the_layout() -> None:
    """Red if a table's rows and its tensors in the file part ways."""
    tensors = tensors_of(SMALL)
    for table in engram_tables(SMALL):
        prefix = f"layers.{table.layer_id}.engram.embed"
        weight, scale = tensors[f"{prefix}.weight"], tensors[f"{prefix}.scale"]
        assert (weight.dtype, weight.shape) == ("F8_E4M3", (table.rows, 256))
        assert (scale.dtype, scale.shape) == ("F8_E8M0", (table.rows, 8))
        assert table.column_bounds[0] == 0 and table.column_bounds[-1] == table.rows


def test_more_shards_than_tensors_can_fill_is_refused() -> None:
    """Red if an empty shard is written: InstantTensor dies of one."""
    with pytest.raises(LoadPlanError, match="shards: got 2000, of which .* be empty"):
        layout(SynthOptions(size=8 * MIB, shards=2000))
