"""The released DefaultModelLoader with --load-format instanttensor, over small files.

InstantTensor and the device are fakes that keep a journal of what reached them.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_tokenspeed_v41 import (
    run_ranks,
    tensor_bytes,
    tiny_gpu,
    weights_of,
)
from tokenspeed_kernel.platform import ArchVersion, Platform

from tokenspeed.runtime.configs.load_config import LoadConfig
from tokenspeed.runtime.distributed.process_group_manager import process_group_manager
from tokenspeed.runtime.model_loader.loader import DefaultModelLoader


def tensors_of(*names):
    """A tensor of 64 bytes for each name, with other bytes each."""
    return {
        name: torch.arange(len(name), len(name) + 64, dtype=torch.uint8).view(8, 8)
        for name in names
    }


def raw(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor_bytes(tensor)


def write(folder, **files):
    """Write a shard of tensors for each keyword, and an index; their bytes by name."""
    weight_map, content = {}, {}
    for stem, tensors in files.items():
        save_file(tensors, Path(folder, f"{stem}.safetensors"))
        weight_map |= dict.fromkeys(tensors, f"{stem}.safetensors")
        content |= {name: raw(tensor) for name, tensor in tensors.items()}
    index = Path(folder, "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": weight_map}))
    return content


def write_header(path, header, payload):
    """A safetensors file with a header that save_file cannot write."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def draft_of(prefix, **attributes):
    """A model that uses only the tensors with this prefix."""
    return SimpleNamespace(
        checkpoint_weight_name_filter=lambda name: name.startswith(prefix), **attributes
    )


ALL = SimpleNamespace()


class LoaderCase(unittest.TestCase):
    """Needs no GPU."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.journal = self.gpu()

    def gpu(self, **options):
        context = tiny_gpu(**options)
        journal = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return journal

    def load(self, model=ALL, load_format="instanttensor"):
        self.journal.calls.clear()
        return dict(weights_of(model, self.folder, load_format))

    def try_load(self, model=ALL, journal=None):
        """What arrived, or the error as text: what fails is for the test to say."""
        try:
            return {name: raw(tensor) for name, tensor in self.load(model).items()}
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    @property
    def streamed(self):
        return [os.path.basename(f) for call in self.journal.calls for f in call.files]


class TestWhatTheGuidePromises(LoaderCase):
    """Needs no GPU."""

    @pytest.mark.guard(mutation="whole files are read tensor by tensor")
    def test_plain_checkpoint_is_one_call_and_equal_to_the_default_loader(self):
        # Turns red when a plain checkpoint loses its collective reads or a bit.
        expected = write(self.folder, a=tensors_of("x", "yy"), b=tensors_of("zzz"))
        by_default = self.load(load_format="auto")
        self.assertEqual(self.journal.calls, [])
        loaded = self.load()
        self.assertEqual({n: raw(t) for n, t in loaded.items()}, expected)
        self.assertEqual({n: raw(t) for n, t in by_default.items()}, expected)
        (call,) = self.journal.calls
        self.assertEqual(len(call.files), 2)
        self.assertTrue(all(map(self.journal.on_device, loaded.values())))

    @pytest.mark.guard(mutation="the glue imports instanttensor at its top")
    def test_library_is_imported_only_when_the_format_is_chosen(self):
        # Turns red when an installation without the extra cannot import the loader.
        code = (
            "import sys; sys.modules['instanttensor'] = None; "
            f"sys.path.insert(0, {str(Path(__file__).parent)!r}); "
            f"import {tiny_gpu.__module__}"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        expected = write(self.folder, a=tensors_of("x"))
        with mock.patch.dict(sys.modules, instanttensor=None):
            loaded = self.load(load_format="safetensors")
            with self.assertRaisesRegex(ImportError, r"tokenspeed\[instanttensor\]"):
                self.load()
        self.assertEqual({n: raw(t) for n, t in loaded.items()}, expected)

    @pytest.mark.guard(mutation="the plan is made before the format's own refusals")
    def test_platform_other_than_nvidia_is_refused_before_a_file_is_opened(self):
        # Turns red when another error hides the one that tells what to do.
        Path(self.folder, "a.safetensors").write_bytes(b"no safetensors file")
        self.addCleanup(Platform.override, Platform.get())
        Platform.override(mock.Mock(is_nvidia=False, arch_version=ArchVersion(9, 4)))
        with self.assertRaisesRegex(ValueError, "requires NVIDIA GPUs"):
            self.load()

    @pytest.mark.guard(mutation="other files of the folder are planned too")
    def test_only_safetensors_files_are_taken(self):
        # Turns red when weights of another format are opened, or loaded instead.
        torch.save(tensors_of("old"), Path(self.folder, "pytorch_model.bin"))
        with self.assertRaisesRegex(RuntimeError, "Cannot find any model weights"):
            self.load()
        expected = write(self.folder, a=tensors_of("x"))
        save_file(tensors_of("y"), Path(self.folder, "not-in-the-index.safetensors"))
        self.assertEqual(self.try_load(), expected)

    @pytest.mark.guard(mutation="other load formats are planned too")
    def test_other_formats_are_untouched(self):
        # Turns red when the safetensors format reaches InstantTensor or the device.
        write(self.folder, a=tensors_of("x", "mtp.y"), b=tensors_of("mtp.z"))
        for load_format in ("auto", "safetensors"):
            loaded = self.load(draft_of("mtp."), load_format)
            self.assertEqual(set(loaded), {"mtp.y", "mtp.z"})
            self.assertEqual(self.journal.calls, [])
            self.assertFalse(any(map(self.journal.on_device, loaded.values())))

    @pytest.mark.guard(mutation="planned although LOADPLAN_DISABLE is set")
    def test_way_back_is_the_call_of_the_release(self):
        # Turns red when LOADPLAN_DISABLE=1 still changes what a load does.
        write(self.folder, a=tensors_of("x", "mtp.y"), b=tensors_of("mtp.z"))
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"):
            loaded = self.load(draft_of("mtp."))
        self.assertEqual(set(loaded), {"x", "mtp.y", "mtp.z"})
        (call,) = self.journal.calls
        self.assertEqual(dict(call.kwargs), {})

    @pytest.mark.guard(mutation="the plan is made when the loader is asked, not used")
    def test_model_that_takes_nothing_reads_nothing(self):
        # As a pipeline stage without draft parameters; red when it opens files.
        write(self.folder, a=tensors_of("x"))
        weights_of(ALL, self.folder)
        self.assertEqual(self.journal.calls, [])


class TestTensorLevelFilter(LoaderCase):
    """Needs no GPU."""

    @pytest.mark.feature
    def test_draft_gets_only_its_tensors_of_a_mixed_shard(self):
        # Turns red when a draft's load_weights meets the target's tensors.
        expected = write(self.folder, a=tensors_of("x", "mtp.y"), b=tensors_of("mtp.z"))
        del expected["x"]
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)
        self.assertEqual(self.streamed, ["b.safetensors"])

    @pytest.mark.feature
    def test_checkpoint_without_an_index_is_filtered_too(self):
        # Turns red when only the index tells what a draft wants.
        save_file(tensors_of("x", "mtp.y"), Path(self.folder, "model.safetensors"))
        expected = {n: raw(t) for n, t in tensors_of("mtp.y").items()}
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)

    @pytest.mark.feature
    def test_small_unwanted_part_does_not_cost_the_collective_reads(self):
        # Turns red when one small tensor sends its file to positioned reads.
        big = torch.zeros(100_000, dtype=torch.uint8)
        expected = write(self.folder, a={"mtp.big": big} | tensors_of("x"))
        del expected["x"]
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)
        self.assertEqual(self.streamed, ["a.safetensors"])

    @pytest.mark.feature
    def test_filter_sees_names_with_the_prefix_of_their_source(self):
        # Turns red when a second source is filtered by names the model never sees.
        expected = write(self.folder, a=tensors_of("mtp.x", "y"))
        with tempfile.TemporaryDirectory() as other:
            expected |= {
                f"mtp.{name}": tensor
                for name, tensor in write(other, b=tensors_of("z")).items()
            }
            second = DefaultModelLoader.Source(other, None, prefix="mtp.")
            model = draft_of("mtp.", secondary_weights=[second])
            del expected["y"]
            self.assertEqual(self.try_load(model), expected)

    @pytest.mark.feature
    def test_filter_that_accepts_nothing_is_an_error(self):
        # Turns red when a draft silently loads nothing, or everything.
        write(self.folder, a=tensors_of("x"))
        self.assertIn("accepts none of 1 tensors", str(self.try_load(draft_of("mtp."))))

    @pytest.mark.feature
    def test_shard_that_is_not_there_is_named_before_anything_is_loaded(self):
        # Turns red when a download that stopped halfway loads half a model.
        write(self.folder, a=tensors_of("x"), b=tensors_of("y"))
        os.remove(f"{self.folder}/b.safetensors")
        result = str(self.try_load())
        self.assertIn("b.safetensors: no such file", result)
        self.assertIn("'y'", result)
        self.assertEqual(self.journal.calls, [])

    @pytest.mark.feature
    def test_shard_that_a_draft_does_not_want_may_be_missing(self):
        # Turns red when a draft asks for the target's files.
        expected = write(self.folder, a=tensors_of("x"), b=tensors_of("x2", "mtp.y"))
        os.remove(f"{self.folder}/a.safetensors")
        expected = {"mtp.y": expected["mtp.y"]}
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)


class TestDeviceBuffer(LoaderCase):
    """Needs no GPU."""

    @pytest.mark.feature
    def test_small_draft_behind_a_large_target_takes_a_small_buffer(self):
        # Turns red when 64 bytes take the 4 GiB of a whole checkpoint.
        expected = write(self.folder, a=tensors_of("x"), b=tensors_of("mtp.y"))
        del expected["x"]
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)
        (call,) = self.journal.calls
        self.assertEqual(dict(call.kwargs), {"io_depth": 3})

    @pytest.mark.guard(mutation="the operator's own depth is overruled")
    def test_depth_that_the_operator_sets_wins(self):
        # Turns red when INSTANTTENSOR_IO_DEPTH no longer says how deep it reads.
        write(self.folder, a=tensors_of("x"))
        with mock.patch.dict(os.environ, INSTANTTENSOR_IO_DEPTH="5"):
            self.load()
        (call,) = self.journal.calls
        self.assertEqual(dict(call.kwargs), {})


class TestHostResidentWeights(LoaderCase):
    """Needs no GPU."""

    @pytest.mark.feature
    def test_declared_weights_stay_on_the_host_and_come_last(self):
        # Turns red when a host table crosses the device, or loses its row source.
        expected = write(self.folder, a=tensors_of("table", "x"), b=tensors_of("y"))
        model = SimpleNamespace(host_resident_weight_patterns=("tab",))
        loaded = self.load(model)
        self.assertEqual({n: raw(t) for n, t in loaded.items()}, expected)
        on_device = {n for n, t in loaded.items() if self.journal.on_device(t)}
        self.assertEqual(on_device, {"x", "y"})
        self.assertEqual([*loaded][-1], "table")
        self.assertTrue(hasattr(loaded["table"], "row_source"))
        self.assertEqual(self.streamed, ["b.safetensors"])


class TestSubByteDtypes(LoaderCase):
    """Needs no GPU."""

    def write_f4(self, dtype="F4", shape=(2, 8)):
        values = bytes(range(8))
        header = {
            "f": {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 8]},
            "u": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
        }
        write_header(Path(self.folder, "f.safetensors"), header, values + b"mark")

    @pytest.mark.feature
    def test_f4_is_what_official_safetensors_loads(self):
        # Turns red when F4 is refused whole, or arrives as its neighbour's bytes.
        self.write_f4()
        save_file(tensors_of("x"), Path(self.folder, "x.safetensors"))
        with safe_open(Path(self.folder, "f.safetensors"), framework="pt") as file:
            expected = {name: raw(file.get_tensor(name)) for name in file.keys()}
        expected |= {n: raw(t) for n, t in tensors_of("x").items()}
        self.assertEqual(self.try_load(), expected)
        self.assertEqual(self.streamed, ["x.safetensors"])

    @pytest.mark.guard(mutation="a dtype that nobody can load gets another message")
    def test_f6_is_refused_with_the_message_of_the_release(self):
        # Turns red when users no longer read what to do instead.
        self.write_f4("F6_E2M3", (4, 2))
        header = {"g": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
        write_header(Path(self.folder, "f.safetensors"), header, b"abc")
        result = self.try_load()
        self.assertIn("declares the sub-byte safetensors dtype 'F6_E2M3'", str(result))
        self.assertIn("Use --load-format auto instead.", str(result))
        self.assertEqual(self.journal.calls, [])

    @pytest.mark.guard(mutation="the plan is made at the first tensor")
    def test_refusal_comes_when_the_iterator_is_made(self):
        # Turns red when it waits for the first tensor, behind other work.
        header = {"g": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
        write_header(Path(self.folder, "f.safetensors"), header, b"abc")
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        source = DefaultModelLoader.Source(self.folder, None, fall_back_to_pt=False)
        with self.assertRaisesRegex(ValueError, "F6_E2M3"):
            loader._get_weights_iterator(source, None, None)

    @pytest.mark.feature
    def test_unwanted_odd_tensor_does_not_stop_a_draft(self):
        # Turns red when a draft fails for a tensor that it never wanted.
        header = {
            "g": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
            "mtp.u": {"dtype": "U8", "shape": [4], "data_offsets": [3, 7]},
        }
        write_header(Path(self.folder, "f.safetensors"), header, b"abcmark")
        expected = {"mtp.u": (torch.uint8, (4,), b"mark")}
        self.assertEqual(self.try_load(draft_of("mtp.")), expected)

    @pytest.mark.guard(mutation="packed bytes are taken for a sub-byte dtype")
    def test_values_packed_in_bytes_stay_on_the_fast_path(self):
        # Turns red when NVFP4 and MXFP4 checkpoints lose their collective reads.
        packed = {
            "w.weight_packed": torch.arange(64, dtype=torch.uint8).view(8, 8),
            "w.weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn),
        }
        expected = write(self.folder, a=packed)
        self.assertEqual(self.try_load(), expected)
        self.assertEqual(self.streamed, ["a.safetensors"])


class TestLibraryVersions(LoaderCase):
    """Needs no GPU."""

    @pytest.mark.feature
    def test_both_releases_load_what_each_refuses(self):
        # Turns red when 0.1.9 or 0.2.2 gets a file that it cannot read.
        header = {
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "f": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        }
        write_header(Path(self.folder, "odd.safetensors"), header, bytes(range(9)))
        save_file(tensors_of("x"), Path(self.folder, "x.safetensors"))
        with safe_open(Path(self.folder, "odd.safetensors"), framework="pt") as file:
            expected = {name: raw(file.get_tensor(name)) for name in file.keys()}
        expected |= {n: raw(t) for n, t in tensors_of("x").items()}
        for version, streamed in (
            ("0.1.9", ["x.safetensors"]),
            ("0.2.2", ["odd.safetensors", "x.safetensors"]),
        ):
            with self.subTest(version=version), tiny_gpu(version=version) as journal:
                self.journal = journal
                self.assertEqual(self.try_load(), expected)
                self.assertEqual(sorted(self.streamed), streamed)


def load_in_groups(rank, world_size, folder, cases):
    """Load on one rank; by case the group that InstantTensor got, and the names."""
    everyone = tuple(range(world_size))
    groups = {everyone: torch.distributed.group.WORLD}
    for alone in everyone:
        groups[(alone,)] = torch.distributed.new_group([alone])
    for ranks, group in groups.items():
        process_group_manager.register_process_group("nccl", ranks, group)
    names = {"all": everyone, "mine": (rank,), None: None}
    results = []
    for declared, configured in cases:
        model = SimpleNamespace(checkpoint_load_group=names[declared])
        config = LoadConfig(
            load_format="instanttensor", checkpoint_load_group=names[configured]
        )
        model_config = SimpleNamespace(model_path=folder, revision=None)
        with tiny_gpu() as journal:
            loader = DefaultModelLoader(config)
            loaded = sorted(dict(loader._get_all_weights(model_config, model)))
        (call,) = journal.calls
        (which,) = [k for k, group in groups.items() if group is call.process_group]
        results.append((which, loaded))
    return results


def load_own(rank, world_size, folders):
    """Load what this rank finds in its folder; the names, or the error as text."""
    with tiny_gpu():
        try:
            return sorted(name for name, _ in weights_of(ALL, folders[rank]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class TestRanks(unittest.TestCase):
    """Needs no GPU."""

    @pytest.mark.guard(mutation="another group is passed to InstantTensor")
    def test_any_parallelism_passes_the_group_that_loads_together(self):
        # Turns red when ranks that read other weights wait for each other.
        cases = [(None, None), ("all", "mine"), (None, "mine"), ("mine", None)]
        with tempfile.TemporaryDirectory() as folder:
            write(folder, a=tensors_of("x"), b=tensors_of("y"))
            results = run_ranks(2, load_in_groups, folder, cases)
        for rank, result in enumerate(results):
            together, alone = ((0, 1), ["x", "y"]), ((rank,), ["x", "y"])
            self.assertEqual(result, [together, together, alone, alone])

    @pytest.mark.feature
    def test_ranks_that_see_other_checkpoints_all_raise(self):
        # Turns red when one rank waits in a collective read for the others.
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            write(one, a=tensors_of("x", "y"))
            write(two, a=tensors_of("x"))
            try:
                results = run_ranks(2, load_own, [one, two], timeout=30.0)
            except TimeoutError as error:
                self.fail(str(error))
        for result in results:
            self.assertIn("rank 1 would load something else than rank 0", str(result))


if __name__ == "__main__":
    unittest.main()
