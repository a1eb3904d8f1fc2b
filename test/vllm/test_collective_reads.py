# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights under load_format instanttensor: who reads what, and with whom.

The released DefaultModelLoader runs on one rank, or on two with vLLM's own world group;
InstantTensor and the device are fakes that keep a journal of what reached them.
"""

import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny_vllm_checkpoints import (
    DENSE,
    EXPERT_SCALES,
    EXPERTS,
    GATE,
    LARGE,
    NORM,
    SCALE,
    TABLE,
    load,
    load_on_rank,
    nbytes,
    run_ranks,
    vllm_config,
    write_checkpoint,
)

from vllm.config import LoadConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.stateless_coordinator import StatelessGroupCoordinator
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import compute_local_expert_ids

OFFLOAD = {"cpu_offload": True}
LOCAL = [{"local_expert_ids": compute_local_expert_ids(4, 2, rank)} for rank in (0, 1)]


def two_ranks(folder, options):
    message = ""
    try:
        return run_ranks(2, load_on_rank, str(folder), options)
    except (RuntimeError, TimeoutError) as error:
        message = str(error)
    pytest.fail(message[-2000:])


def own(rank):
    """The expert weights that a rank keeps."""
    return [EXPERTS[i] for i in sorted(LOCAL[rank]["local_expert_ids"])]


class TestGroups:
    @pytest.mark.feature
    def test_table_on_the_cpu_leaves_other_files_collective(self, tmp_path):
        """Red when one Engram tensor switches collective reading off for all files."""
        expected = write_checkpoint(
            tmp_path, a=[DENSE], b=[TABLE, SCALE, GATE], c=[NORM]
        )
        for rank in two_ranks(tmp_path, OFFLOAD):
            assert rank.tensors == expected and len(rank.names) == len(expected)
            assert rank.grouped_files == ["a.safetensors", "c.safetensors"]
            assert len(rank.calls) == 1
            assert "tensor_filter" not in rank.calls[0].options
            assert rank.read_files == {"b.safetensors"}
            assert rank.read == nbytes(GATE)
            assert rank.streamed == nbytes(DENSE, NORM)

    @pytest.mark.feature
    def test_rest_of_a_file_with_a_table_is_read_once_between_the_ranks(self, tmp_path):
        """Red when every rank reads what does not go by InstantTensor."""
        expected = write_checkpoint(tmp_path, a=[DENSE], b=[TABLE, LARGE, GATE])
        ranks = two_ranks(tmp_path, {**OFFLOAD, "share_all": True})
        assert [rank.tensors for rank in ranks] == [expected, expected]
        read, wanted = sum(rank.read for rank in ranks), nbytes(LARGE, GATE)
        # Small gaps are read along.
        assert wanted <= read <= 1.01 * wanted

    @pytest.mark.feature
    def test_expert_filter_leaves_other_files_collective(self, tmp_path):
        """Red when a rank reads other ranks' experts, or all files by itself."""
        write_checkpoint(
            tmp_path, a=[DENSE, NORM], e=[*EXPERTS, *EXPERT_SCALES, GATE], t=[TABLE]
        )
        # However little a rank reads, it shares nothing that others leave out.
        options = [{**local, "share_all": True} for local in LOCAL]
        for index, rank in enumerate(two_ranks(tmp_path, options)):
            wanted = [*own(index), *EXPERT_SCALES, GATE]
            assert rank.grouped_files == ["a.safetensors", "t.safetensors"]
            assert rank.read == nbytes(*wanted)
            assert rank.read_files == {"e.safetensors"}
            assert sorted(rank.names) == sorted([*wanted, DENSE, NORM, TABLE])

    @pytest.mark.feature
    def test_file_with_nothing_but_experts_is_not_collective(self, tmp_path):
        """Red when ranks with different experts meet in one collective read."""
        write_checkpoint(tmp_path, a=[DENSE], e=EXPERTS[:2], f=EXPERTS[2:])
        for index, rank in enumerate(two_ranks(tmp_path, LOCAL)):
            assert rank.grouped_files == ["a.safetensors"]
            assert rank.read == nbytes(*own(index))
            assert sorted(rank.names) == sorted([DENSE, *own(index)])

    @pytest.mark.guard(mutation="a group of one is passed on, or none of two")
    def test_nothing_to_split_is_one_collective_call(self, tmp_path):
        """Red when the plan costs a clean checkpoint its collective reads."""
        expected = write_checkpoint(tmp_path, a=[DENSE, *EXPERTS], b=[TABLE, GATE])
        for rank in two_ranks(tmp_path, {}):
            assert rank.tensors == expected and rank.read == 0
            assert rank.grouped_files == ["a.safetensors", "b.safetensors"]
            assert len(rank.calls) == 1
        alone = load(tmp_path)
        assert alone.tensors == expected and alone.grouped_files == []

    @pytest.mark.feature
    def test_files_of_the_only_rank_have_no_group(self, tmp_path):
        """Red when a single rank waits for others, or loses whole-file reads."""
        expected = write_checkpoint(tmp_path, a=[DENSE], b=[TABLE, GATE])
        alone = load(tmp_path, cpu_offload=True)
        assert alone.tensors == expected
        (call,) = alone.calls
        assert (call.files, call.grouped) == (["a.safetensors"], False)


class TestYields:
    """What a rank gets is what it has always got."""

    @pytest.mark.guard(mutation="scales are filtered like the experts' weights")
    def test_ranks_get_their_experts_and_every_scale(self, tmp_path):
        """Red when a scale of another rank's expert is missing."""
        expected = write_checkpoint(tmp_path, a=[DENSE, *EXPERTS, *EXPERT_SCALES])
        for rank in (0, 1):
            got = load(tmp_path, **LOCAL[rank])
            names = {DENSE, *own(rank), *EXPERT_SCALES}
            assert got.tensors == {n: t for n, t in expected.items() if n in names}
            assert len(got.names) == len(names) and got.on_device == names

    @pytest.mark.guard(mutation="the expert filter is applied under EPLB")
    def test_every_rank_gets_all_experts_under_eplb(self, tmp_path):
        """Red when a redundant expert's slot stays empty."""
        expected = write_checkpoint(tmp_path, a=[DENSE, *EXPERTS, *EXPERT_SCALES])
        config, loader = vllm_config(), DefaultModelLoader(LoadConfig())
        config.parallel_config.enable_expert_parallel = True
        config.parallel_config.enable_ep_weight_filter = True
        config.parallel_config.enable_eplb = True
        with set_current_vllm_config(config):
            loader._init_ep_weight_filter(SimpleNamespace(is_moe=True))
        got = load(tmp_path, local_expert_ids=loader.local_expert_ids)
        assert got.tensors == expected and got.on_device == set(expected)
        (call,) = got.calls
        assert "tensor_filter" not in call.options

    @pytest.mark.guard(mutation="names are matched otherwise than vLLM does")
    @pytest.mark.parametrize(
        "name",
        [
            TABLE,
            SCALE,
            "engram.embed.weight",
            "model.layers.3.ple.ple_embedding.ngram_embedding.shard_12.weight",
        ],
    )
    def test_table_stays_on_the_cpu(self, tmp_path, name):
        """Red when a table goes to the device, which it does not fit."""
        expected = write_checkpoint(tmp_path, a=[DENSE, name])
        got = load(tmp_path, cpu_offload=True)
        assert got.tensors == expected and got.names[-1] == name
        assert got.on_device == {DENSE}

    @pytest.mark.guard(mutation="names are matched otherwise than vLLM does")
    @pytest.mark.parametrize(
        "name",
        [
            "layers.1.xengram.embed.weight",
            "layers.1.engram.embed.weight_scale",
            "layers.1.ple.ple_embedding.ngram_embedding.shard_1.weight_scale",
            "layers.1.ple.ple_embedding.ngram_embedding.shard_x.weight",
        ],
    )
    def test_other_name_goes_to_the_device(self, tmp_path, name):
        """Red when a weight that is no table stays on the host."""
        expected = write_checkpoint(tmp_path, a=[DENSE, name], b=[TABLE])
        got = load(tmp_path, cpu_offload=True)
        assert got.tensors == expected and got.on_device == {DENSE, name}

    @pytest.mark.guard(mutation="tables stay on the host whatever the configuration")
    def test_table_goes_to_the_device_without_offload(self, tmp_path):
        """Red when cpu_offload is not asked."""
        expected = write_checkpoint(tmp_path, a=[DENSE], b=[TABLE, SCALE])
        got = load(tmp_path)
        assert got.tensors == expected and got.on_device == set(expected)

    @pytest.mark.feature
    def test_tables_come_last_and_carry_their_rows(self, tmp_path):
        """Red when two streams of requests compete for the disk, or rows get lost."""
        write_checkpoint(tmp_path, a=[TABLE, SCALE, GATE], b=[DENSE])
        got = load(tmp_path, cpu_offload=True)
        assert set(got.names[-2:]) == got.with_rows == {TABLE, SCALE}

    @pytest.mark.guard(mutation="another load format is planned")
    def test_other_load_formats_are_untouched(self, tmp_path):
        """Red when the safetensors format reads by a plan."""
        expected = write_checkpoint(tmp_path, a=[DENSE, GATE], b=[TABLE])
        got = load(tmp_path, cpu_offload=True, load_format="safetensors")
        assert got.tensors == expected
        assert (got.on_device, got.calls, got.with_rows) == (set(), [], set())

    @pytest.mark.guard(mutation="the disable switch is not looked at")
    def test_disabled_is_stock(self, tmp_path):
        """Red when LOADPLAN_DISABLE no longer gives vLLM's own behaviour."""
        expected = write_checkpoint(tmp_path, a=[DENSE], b=[TABLE, GATE, *EXPERTS])
        with mock.patch.dict(os.environ, {"LOADPLAN_DISABLE": "1"}):
            got = load(tmp_path, cpu_offload=True, local_expert_ids={0})
        assert got.tensors == {
            n: t for n, t in expected.items() if n not in EXPERTS[1:]
        }
        (call,) = got.calls
        assert sorted(call.options["tensor_filter"]) == sorted(
            [DENSE, GATE, EXPERTS[0]]
        )
        assert (got.read, got.with_rows) == (0, set())


class TestMemory:
    @pytest.mark.feature
    def test_ring_is_as_deep_as_the_files_need(self, tmp_path):
        """Red when a few bytes take the default ring of 4 GiB."""
        write_checkpoint(tmp_path, a=[DENSE], b=[TABLE])
        got = load(tmp_path, cpu_offload=True)
        assert [call.options.get("io_depth") for call in got.calls] == [3]

    @pytest.mark.feature
    def test_tensor_larger_than_the_device_has_room_for_stays_on_the_host(
        self, tmp_path
    ):
        """Red when a ring is asked for that the device cannot hold."""
        expected = write_checkpoint(tmp_path, a=[LARGE, NORM], b=[DENSE])
        try:
            got = load(tmp_path, free_memory=2 * nbytes(LARGE) - 2)
            found = (got.tensors, got.on_device)
        except RuntimeError as error:
            found = str(error)
        assert found == (expected, {NORM, DENSE})


class TestRefusals:
    """vLLM's own errors come first, ours name the way out."""

    def broken(self, tmp_path):
        write_checkpoint(tmp_path, a=[DENSE])
        (tmp_path / "a.safetensors").write_bytes(b"no header")

    def iterate(self, tmp_path):
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        weights_of = SimpleNamespace(model=str(tmp_path), revision=None)
        return loader.get_all_weights(weights_of, torch.nn.Module())

    @pytest.mark.guard(mutation="headers are read before the import is tried")
    def test_missing_instanttensor_gives_vllms_error(self, tmp_path):
        """Red when the install hint is lost behind an error of the plan."""
        self.broken(tmp_path)
        with mock.patch.dict("sys.modules", {"instanttensor": None}):
            with pytest.raises(ImportError, match="pip install"):
                list(self.iterate(tmp_path))

    @pytest.mark.guard(mutation="headers are read before the platform is checked")
    def test_machine_without_nvidia_gpu_gives_vllms_error(self, tmp_path):
        """Red when a broken file is reported on a machine that cannot load."""
        self.broken(tmp_path)
        with mock.patch.dict("sys.modules", {"instanttensor": mock.Mock()}):
            with pytest.raises(ValueError, match="requires NVIDIA GPUs"):
                list(self.iterate(tmp_path))

    @pytest.mark.guard(mutation="ranks of an elastic group exchange Python objects")
    def test_elastic_group_loads_as_ever(self, tmp_path):
        """Red when a group that torch does not know is asked to exchange objects."""
        expected = write_checkpoint(tmp_path, a=[DENSE], b=[TABLE, GATE])
        world = object.__new__(StatelessGroupCoordinator)
        world.world_size, world.cpu_group, world.device_group = 1, None, None
        with mock.patch.object(parallel_state, "_WORLD", world):
            got = load(tmp_path, cpu_offload=True)
        assert got.tensors == expected
        assert got.calls[0].options["tensor_filter"] == [DENSE, GATE]

    @pytest.mark.feature
    def test_ranks_that_see_different_checkpoints_all_say_so(self, tmp_path):
        """Red when one rank hangs in a collective read that another never enters."""
        write_checkpoint(tmp_path / "0", a=[DENSE], b=[NORM])
        write_checkpoint(tmp_path / "1", a=[DENSE])
        messages = run_ranks(2, failure_on_rank, str(tmp_path))
        assert all("'b.safetensors'" in text for text in messages), messages
        assert all("rank 1" in text for text in messages), messages


def failure_on_rank(rank, ranks, folder):
    """How loading a folder of its own fails on a rank."""
    try:
        load(f"{folder}/{rank}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
