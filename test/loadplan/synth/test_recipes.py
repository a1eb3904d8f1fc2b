"""Synthetic checkpoints: official safetensors and SGLang's own model are the judges."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from loadplan.core.header import LoadPlanError
from loadplan.synth import model as synth_model
from loadplan.synth import recipes
from loadplan.synth.recipes import SynthOptions

MIB = 1 << 20
GIB = 1 << 30
SMALL = SynthOptions(size=8 * MIB)
PUBLISHED_SIZE = 475 * 10**9


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "checkpoint"
    recipes.synthesize(out, SMALL)
    return out


def tensors_of(options: SynthOptions) -> dict[str, recipes.TensorHeader]:
    shards = recipes.layout(options)
    return {tensor.name: tensor for shard in shards for tensor in shard.tensors}


def expected_tensor(spec: recipes.TensorHeader, *, seed: int) -> torch.Tensor:
    data = recipes.content(seed, spec.name, 0, spec.nbytes)
    return torch.from_numpy(data).view(recipes.torch_dtype(spec.dtype)).view(spec.shape)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The files


def test_files_equal_official_safetensors_own_byte_for_byte(
    small: Path, tmp_path: Path
) -> None:
    """Red if the header text, its padding, the order of tensors or a byte changes."""
    for shard in recipes.layout(SMALL):
        tensors = {t.name: expected_tensor(t, seed=SMALL.seed) for t in shard.tensors}
        save_file(tensors, tmp_path / "official", metadata={"format": "pt"})
        ours = (small / shard.name).read_bytes()
        assert ours == (tmp_path / "official").read_bytes(), shard.name
        assert len(ours) == shard.nbytes


def test_official_safetensors_reads_every_tensor_of_the_layout(small: Path) -> None:
    """Red if a name, dtype, shape or byte that is read differs from the pure layout."""
    for shard in recipes.layout(SMALL):
        with safe_open(small / shard.name, framework="pt") as file:
            assert sorted(file.keys()) == sorted(t.name for t in shard.tensors)
            for spec in shard.tensors:
                read = file.get_tensor(spec.name)
                assert read.dtype == recipes.torch_dtype(spec.dtype)
                assert tuple(read.shape) == spec.shape
                data = read.contiguous().view(torch.uint8).numpy().tobytes()
                assert data == recipes.content(0, spec.name, 0, spec.nbytes).tobytes()


def test_begin_and_end_are_offsets_in_the_file(small: Path) -> None:
    """Red if offsets become relative to the data, as in the header."""
    for shard in recipes.layout(SMALL):
        data = (small / shard.name).read_bytes()
        for spec in (shard.tensors[0], shard.tensors[-1]):
            expected = recipes.content(0, spec.name, 0, spec.nbytes).tobytes()
            assert data[spec.begin : spec.end] == expected


def test_index_names_each_tensor_once_with_its_file_and_all_bytes(small: Path) -> None:
    """Red if the index leaves a tensor out or counts headers into ``total_size``."""
    index = json.loads((small / recipes.INDEX_NAME).read_text())
    shards = recipes.layout(SMALL)
    assert index["weight_map"] == {
        tensor.name: shard.name for shard in shards for tensor in shard.tensors
    }
    nbytes = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    assert index["metadata"] == {"total_size": nbytes}


def test_equal_options_give_equal_folders(small: Path, tmp_path: Path) -> None:
    """Red if anything but the options (time, threads, paths) reaches the files."""
    recipes.synthesize(tmp_path / "again", SynthOptions(size=8 * MIB))
    assert snapshot(tmp_path / "again") == snapshot(small)


def test_seed_changes_every_files_bytes_and_no_header(
    small: Path, tmp_path: Path
) -> None:
    """Red if the seed is ignored or changes names, shapes or order."""
    other = dataclasses.replace(SMALL, seed=1)
    recipes.synthesize(tmp_path / "other", other)
    assert recipes.layout(other) == recipes.layout(SMALL)
    for shard in recipes.layout(SMALL):
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
        recipes.synthesize(tmp_path / "out", options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB < table.nbytes
    index = json.loads((tmp_path / "out" / recipes.INDEX_NAME).read_text())
    with open(tmp_path / "out" / index["weight_map"][table.name], "rb") as file:
        # Every border of the writer's chunks is among these.
        for border in range(MIB, table.nbytes, MIB):
            file.seek(table.begin + border - 20)
            expected = recipes.content(0, table.name, border - 20, border + 20)
            assert file.read(40) == expected.tobytes(), border


def test_progress_adds_up_to_the_bytes_of_all_files(tmp_path: Path) -> None:
    """Red if headers are left out of the sum: a progress bar would not fill."""
    done: list[int] = []
    recipes.synthesize(tmp_path / "out", SMALL, progress=done.append)
    assert sum(done) == sum(shard.nbytes for shard in recipes.layout(SMALL))


# Variants


def test_tables_lie_alone_in_one_file_each_by_default() -> None:
    """Red if another tensor joins a table's file, or both tables share one."""
    tables = [
        {tensor.name for tensor in shard.tensors}
        for shard in recipes.layout(SMALL)
        if any(".engram.embed." in tensor.name for tensor in shard.tensors)
    ]
    assert tables == [
        {f"layers.{layer}.engram.embed.{field}" for field in ("weight", "scale")}
        for layer in (1, 2)
    ]


def test_mixed_tables_share_their_files_with_other_tensors(tmp_path: Path) -> None:
    """Red if ``mixed_engram`` still writes a file of tables alone."""
    options = dataclasses.replace(SMALL, mixed_engram=True)
    for shard in recipes.layout(options):
        assert any(".engram.embed." not in tensor.name for tensor in shard.tensors)
    assert set(tensors_of(options)) == set(tensors_of(SMALL))
    recipes.synthesize(tmp_path / "out", options)
    for shard in recipes.layout(options):
        with safe_open(tmp_path / "out" / shard.name, framework="pt") as file:
            assert len(file.keys()) == len(shard.tensors)


def test_without_index_only_the_index_file_is_missing(
    small: Path, tmp_path: Path
) -> None:
    """Red if ``index`` changes anything but the index and the record of options."""
    recipes.synthesize(tmp_path / "out", dataclasses.replace(SMALL, index=False))
    ours, full = snapshot(tmp_path / "out"), snapshot(small)
    assert full.keys() - ours.keys() == {recipes.INDEX_NAME}
    ours.pop(recipes.OPTIONS_NAME)
    assert all(full[name] == data for name, data in ours.items())


def test_without_draft_neither_tensors_nor_config_mention_it() -> None:
    """Red if a draft's tensor or a dspark key stays: the engine would look for one."""
    options = SynthOptions(draft=False)
    assert not [name for name in tensors_of(options) if name.startswith("mtp.")]
    model = synth_model.fit_model(options.size, engram_fraction=0.4, draft=False)
    assert not [key for key in synth_model.config(model) if "dspark" in key]


@pytest.mark.parametrize("mixed", [False, True])
def test_shards_counts_every_file(mixed: bool) -> None:
    """Red if the tables' files are not counted in ``shards``."""
    for count in (3, 7):
        shards = recipes.layout(SynthOptions(shards=count, mixed_engram=mixed))
        assert [shard.name for shard in shards] == [
            f"model-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]


# Sizes and shapes


@pytest.mark.parametrize("fraction", [0.2, 0.6])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "size", [16 * MIB, 64 * MIB, 200 * MIB, GIB, 12 * GIB, 100 * GIB]
)
def test_size_and_fraction_are_met(size: int, fraction: float, draft: bool) -> None:
    """Red if a size class or a share drifts by more than the promised 15 %."""
    options = SynthOptions(size=size, engram_fraction=fraction, draft=draft)
    tensors = tensors_of(options).values()
    total = sum(tensor.nbytes for tensor in tensors)
    tables = sum(t.nbytes for t in tensors if ".engram.embed." in t.name)
    assert abs(total - size) <= 0.15 * size
    assert abs(tables - fraction * size) <= 0.05 * size


def test_published_size_has_the_published_files_and_layers() -> None:
    """Red if the largest class leaves the published 48 files or layers 1 and 14."""
    options = SynthOptions(size=PUBLISHED_SIZE, engram_fraction=0.427)
    shards = recipes.layout(options)
    assert len(shards) == 48
    assert abs(sum(shard.nbytes for shard in shards) / PUBLISHED_SIZE - 1) < 0.02
    assert [table.layer_id for table in recipes.engram_tables(options)] == [1, 14]


def test_primes_give_the_published_tables_rows() -> None:
    """Red if primes are skipped, repeated, or not shared by the two layers."""
    primes = synth_model.draw_primes(16_000_000, 48)
    assert sum(primes[:24]) == 384_006_168
    assert sum(primes[24:]) == 384_016_682


def test_table_rows_dtypes_and_bounds_agree_with_the_layout() -> None:
    """Red if a table's record and its tensors in the file part ways."""
    tensors = tensors_of(SMALL)
    for table in recipes.engram_tables(SMALL):
        prefix = f"layers.{table.layer_id}.engram.embed"
        weight, scale = tensors[f"{prefix}.weight"], tensors[f"{prefix}.scale"]
        assert (weight.dtype, weight.shape) == ("F8_E4M3", (table.rows, 256))
        assert (scale.dtype, scale.shape) == ("F8_E8M0", (table.rows, 8))
        assert table.column_bounds[0] == 0 and table.column_bounds[-1] == table.rows


def test_published_names_are_present_with_their_dtypes() -> None:
    """Red if a name of the published checkpoint is spelled or stored otherwise."""
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(SMALL).items()}
    expected = {
        "embed.weight": "BF16",
        "head.weight": "BF16",
        "norm.weight": "BF16",
        "layers.0.attn.wq_a.weight": "F8_E4M3",
        "layers.0.attn.wq_a.scale": "F8_E8M0",
        "layers.0.attn_norm.weight": "BF16",
        "layers.0.hc_attn_fn": "F32",
        "layers.0.ffn.gate.weight": "BF16",
        "layers.0.ffn.gate.bias": "F32",
        "layers.0.ffn.shared_experts.w2.weight": "F8_E4M3",
        "layers.1.engram.embed.weight": "F8_E4M3",
        "layers.1.engram.embed.scale": "F8_E8M0",
        "layers.1.engram.wkv.weight": "F8_E4M3",
        "layers.1.engram.q_weight": "BF16",
        "layers.2.ffn.experts.7.w1.weight": "I8",
        "layers.2.ffn.experts.7.w1.scale": "F8_E8M0",
        "mtp.0.attn.wq_a.weight": "F8_E4M3",
        "mtp.0.main_proj.weight": "F8_E4M3",
        "mtp.2.markov_head.embed.weight": "BF16",
    }
    assert {name: dtypes.get(name) for name in expected} == expected


# Content


def test_any_range_equals_the_same_range_of_the_whole() -> None:
    """Red if content depends on where a read starts or how long it is."""
    whole = recipes.content(3, "layers.1.engram.embed.weight", 0, 5000)
    for start, stop in ((0, 1), (1, 2), (31, 33), (32, 64), (17, 4999), (77, 77)):
        part = recipes.content(3, "layers.1.engram.embed.weight", start, stop)
        assert part.dtype == np.uint8 and part.shape == (stop - start,)
        assert part.tobytes() == whole[start:stop].tobytes()


def test_content_is_the_same_on_every_machine_and_release() -> None:
    """Red if generator, key or byte order changes: old checkpoints stop verifying."""
    assert recipes.content(0, "embed.weight", 0, 16).tobytes().hex() == (
        "c089117c73fecf243db2d723cca0cce8"
    )
    assert recipes.content(
        7, "embed.weight", 10**11 + 5, 10**11 + 21
    ).tobytes().hex() == ("39fbde6692ddee9f77c17e548eac7509")


def test_content_differs_by_name_seed_and_position() -> None:
    """Red if two tensors, seeds or blocks share bytes, which would hide a mix-up."""
    blocks = {
        recipes.content(seed, name, start, start + 32).tobytes()
        for seed in (0, 1)
        for name in ("a", "b", "1:a")
        for start in range(0, 3200, 32)
    }
    assert len(blocks) == 2 * 3 * 100


# The folder


def test_options_are_read_back_and_a_foreign_folder_has_none(
    small: Path, tmp_path: Path
) -> None:
    """Red if an option is not recorded, or a folder without a record raises."""
    assert recipes.read_options(small) == SMALL
    assert recipes.read_options(tmp_path) is None


@pytest.mark.parametrize(
    "record",
    ["{", "[]", '{"format": 2, "options": {}}', '{"format": 1, "options": {"a": 1}}'],
)
def test_unreadable_record_is_refused(tmp_path: Path, record: str) -> None:
    """Red if a record of another version is taken for this one's."""
    (tmp_path / recipes.OPTIONS_NAME).write_text(record)
    with pytest.raises(LoadPlanError, match="loadplan-synth.json: got .*format 1"):
        recipes.read_options(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "model-00001-of-00006.safetensors"])
def test_folder_with_foreign_files_is_refused_untouched(
    tmp_path: Path, name: str
) -> None:
    """Red if somebody's checkpoint with our file names is written over."""
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(LoadPlanError, match=f"holds '{name}'.*expected an empty"):
        recipes.synthesize(tmp_path, SMALL)
    assert snapshot(tmp_path) == {name: b"precious"}


def test_finished_checkpoint_and_plain_file_are_refused(
    small: Path, tmp_path: Path
) -> None:
    """Red if a finished checkpoint is begun anew, or a file taken for a folder."""
    before = snapshot(small)
    with pytest.raises(LoadPlanError, match="expected an empty or missing folder"):
        recipes.synthesize(small, SMALL)
    assert snapshot(small) == before
    (tmp_path / "file").touch()
    with pytest.raises(LoadPlanError, match="is not a folder"):
        recipes.synthesize(tmp_path / "file", SMALL)


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
        recipes.synthesize(out, options, progress=progress)


def test_interrupted_run_is_recognised_and_completed(
    small: Path, tmp_path: Path
) -> None:
    """Red if a cut run counts as finished, or its finished files are made again."""
    out = tmp_path / "out"
    shards = recipes.layout(SMALL)
    interrupt(out, options=SMALL, after=shards[0].nbytes + 1000)
    assert recipes.read_options(out) is None
    names = {path.name for path in out.iterdir()}
    assert shards[0].name in names and shards[1].name not in names
    kept = (out / shards[0].name).stat().st_mtime_ns
    done: list[int] = []
    recipes.synthesize(out, SMALL, progress=done.append)
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
        recipes.synthesize(out, dataclasses.replace(SMALL, seed=1))
    (out / "notes.txt").touch()
    with pytest.raises(LoadPlanError, match="holds 'notes.txt'"):
        recipes.synthesize(out, SMALL)


def test_disk_that_is_too_small_is_refused_before_a_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red if the run starts and fails when the disk is full."""
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(recipes.shutil, "disk_usage", lambda path: free)
    with pytest.raises(LoadPlanError, match="the disk has 1000 bytes free, expected"):
        recipes.synthesize(tmp_path / "out", SMALL)
    assert not list((tmp_path / "out").glob("*.safetensors*"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 8 * MIB - 1}, "size: got 8388607, expected at least 8388608 bytes"),
        ({"engram_fraction": 0.0}, "engram_fraction: got 0.0, expected 0.05 to 0.9"),
        ({"engram_fraction": float("nan")}, "engram_fraction: got nan"),
        ({"seed": -1}, "seed: got -1, expected 0 to"),
        ({"shards": 2}, "shards: got 2, expected at least 3 files"),
        ({"shards": 0, "mixed_engram": True}, "shards: got 0, expected at least 1"),
    ],
)
def test_value_out_of_range_is_refused(values: dict[str, object], message: str) -> None:
    """Red if a bad value is taken, or its error names neither field nor rule."""
    with pytest.raises(LoadPlanError, match=re.escape(message)):
        SynthOptions(**values)


def test_size_that_cannot_be_met_says_what_would_be_made() -> None:
    """Red if a checkpoint far from the wanted size is made without a word."""
    options = SynthOptions(size=8 * MIB, engram_fraction=0.9)
    with pytest.raises(LoadPlanError, match="the nearest model has 1[0-9]{7} bytes"):
        recipes.layout(options)


def test_more_shards_than_tensors_can_fill_is_refused() -> None:
    """Red if an empty shard is written: InstantTensor dies of one."""
    with pytest.raises(LoadPlanError, match="shards: got 2000, of which .* be empty"):
        recipes.layout(SynthOptions(size=8 * MIB, shards=2000))


# SGLang


def sglang_parameter(name: str) -> str:
    """The parameter that SGLang stacks a tensor of this (mapped) name into."""
    expert = re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(\w+)_proj\.(.*)", name)
    if expert:
        prefix, projection, field = expert.groups()
        return f"{prefix}.{'w2' if projection == 'down' else 'w13'}_{field}"
    name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
    name = re.sub(r"\.self_attn\.(wq_a|wkv)\.", ".self_attn.wqkv_a.", name)
    return re.sub(r"\.compressor\.(wkv|wgate)\.", ".compressor.wkv_gate.", name)


def assert_fills(
    module: torch.nn.Module, mapped: Iterable[tuple[str, recipes.TensorHeader]]
) -> None:
    """Each parameter is filled exactly, by tensors of its own row length."""
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if not name.endswith(("k_scale", "v_scale"))  # of the KV cache
    }
    filled: Counter[str] = Counter()
    for name, spec in mapped:
        whole = name if name in shapes else sglang_parameter(name)
        assert shapes[whole][-1:] == spec.shape[-1:], name
        filled[whole] += math.prod(spec.shape)
    assert filled == {name: math.prod(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("options", [SMALL, SynthOptions(size=PUBLISHED_SIZE)])
def test_sglang_config_tables_and_module_tree_accept_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: SynthOptions
) -> None:
    """Red if a name, shape or config key is not what SGLang's own classes expect."""
    pytest.importorskip("sglang", reason="needs an SGLang tree on PYTHONPATH")
    from sglang.srt.layers.engram import EngramLayout, shard_range
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models import deepseek_v4
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.speculative.dspark_components import dspark_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    model = synth_model.fit_model(options.size, engram_fraction=0.4, draft=True)
    (tmp_path / "config.json").write_text(json.dumps(synth_model.config(model)))
    config = get_config(str(tmp_path), trust_remote_code=False)
    assert config.architectures == ["DeepseekV4ForCausalLM"]
    assert dspark_config.checkpoint_bundles_dspark_draft(config)

    layout = EngramLayout.from_config(config)
    for position, table in enumerate(recipes.engram_tables(options)):
        assert layout.layer_ids[position] == table.layer_id
        assert layout.num_embeddings[position] == table.rows
        assert layout.head_dim == table.dim
        assert layout.column_bounds(position) == table.column_bounds
        for tp_size in (1, 2, 3, 4):
            ends = [0]
            for rank in range(tp_size):
                start, end = shard_range(table.rows, table.column_bounds, rank, tp_size)
                assert start == ends[-1]
                ends.append(end)
            assert ends[-1] == table.rows

    # Neither the hasher (it reads a tokenizer) nor the rotary cache holds weights.
    monkeypatch.setattr(deepseek_v4.EngramHasher, "from_config", lambda *a, **k: None)
    monkeypatch.setattr(deepseek_v4, "get_rope_wrapper", lambda **kwargs: None)
    quantization = Fp8Config.from_config(config.quantization_config)
    quantization.is_fp4_experts = True
    ranks = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")
    one = SimpleNamespace(
        world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True
    )
    with (
        get_context().override_server_args(device="cpu"),
        get_parallel().override(
            pp_group=one, tp_group=one, **{f"{name}_rank": 0 for name in ranks}
        ),
        torch.device("meta"),
    ):
        target = deepseek_v4.DeepseekV4ForCausalLM(config, quantization)
        draft = DeepseekV4ForCausalLMDSpark(config, quantization)
    draft.confidence_head = torch.nn.Module()
    draft.confidence_head.proj = torch.nn.Linear(
        config.hidden_size + config.dspark_markov_rank, 1, bias=False, device="meta"
    )

    for_target, for_draft = [], []
    for spec in tensors_of(options).values():
        # wo_a's scales are folded into its weight; the vision bias has no module.
        if spec.name.endswith((".wo_a.scale", ".gate.bias_vl")):
            continue
        if spec.name.startswith("mtp."):
            for_draft.append((draft._remap_dspark_weight_name(spec.name), spec))
        else:
            name = target.remap_weight_name_to_dpsk_hf_format(spec.name)
            for_target.append((name, spec))
    assert_fills(target, for_target)
    assert_fills(draft, for_draft)


def test_sglang_recognises_the_packed_experts(small: Path) -> None:
    """Red if the experts' dtype is one that SGLang does not take for packed FP4."""
    pytest.importorskip("sglang", reason="needs an SGLang tree on PYTHONPATH")
    from sglang.srt.configs.deepseek_v4 import try_detect_fp4_experts

    assert try_detect_fp4_experts(str(small)) is True
