"""Odd checkpoints under --load-format instanttensor: right bytes, or a clear refusal.

Each case is a kind of checkpoint that users met. What official safetensors loads must
arrive bit for bit; what it refuses is refused by name before anything is read. The
files are written by hand, since no library would write them.
"""

import json
import math
import os
import shutil
import struct
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from loadplan.standin.gpu import fake_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

BITS = {"F4": 4, "F6_E2M3": 6, "BF16": 16, "F32": 32}
PLAIN = [("plain", "U8", (8,))]


def write_shard(
    path, tensors, *, listing=None, offsets=None, metadata=None, payload=None, salt=0
):
    """Write (name, dtype, shape) tensors; by default packed and listed in this order."""
    entries, end, size = {}, 0, 0
    for index, (name, dtype, shape) in enumerate(tensors):
        begin, end = end, end + math.prod(shape) * BITS.get(dtype, 8) // 8
        span = [begin, end] if offsets is None else list(offsets[index])
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": span}
        end, size = span[1], max(size, span[1])
    header = {name: entries[name] for name in listing or entries}
    if metadata is not None:
        header = {"__metadata__": metadata, **header}
    text = json.dumps(header).encode()
    if payload is None:
        payload = bytes((7 * i + 3 + salt) % 251 for i in range(size))
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def raw(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def official(*paths):
    found = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {name: raw(file.get_tensor(name)) for name in file.keys()}
    return found


class OddCase(CustomTestCase):
    free_memory = 80 << 30

    def setUp(self):
        super().setUp()
        stack = ExitStack()
        self.addCleanup(stack.close)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(get_context().override_server_args())
        self.journal = stack.enter_context(fake_gpu(free_memory=self.free_memory))

    def shard(self, name, tensors=PLAIN, **kwargs):
        return write_shard(self.folder / f"{name}.safetensors", tensors, **kwargs)

    def index(self, **weight_map):
        text = json.dumps({"weight_map": weight_map})
        (self.folder / "model.safetensors.index.json").write_text(text)

    def clear(self):
        for path in self.folder.iterdir():
            path.unlink()
        self.journal.calls.clear()

    def weights(self):
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        hf_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
        config = SimpleNamespace(
            model_path=str(self.folder), revision=None, hf_config=hf_config
        )
        return loader._get_all_weights(config, torch.nn.Module())

    def assert_loads(self, expected, *, on_device=True):
        try:
            pairs = list(self.weights())
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        self.assertEqual(sorted(name for name, _ in pairs), sorted(expected))
        self.assertEqual({name: raw(tensor) for name, tensor in pairs}, expected)
        if on_device:
            for name, tensor in pairs:
                self.assertTrue(self.journal.on_device(tensor), name)

    def assert_refused(self, *texts):
        message = "nothing was raised"
        try:
            list(self.weights())
        except Exception as error:
            message = str(error)
        for text in texts:
            self.assertIn(text, message)
        self.assertEqual(self.journal.calls, [])


class TestRightBytes(OddCase):
    @pytest.mark.feature
    def test_empty_shard_in_any_place_is_left_out(self):
        # Turns red when an empty shard reaches InstantTensor, whose load it ends.
        for metadata in (None, {"format": "pt"}):
            for empty in ("a", "b", "c"):
                self.clear()
                names = {"a", "b", "c"} - {empty}
                self.shard(empty, [], metadata=metadata)
                paths = [self.shard(n, [(n, "U8", (8,))]) for n in sorted(names)]
                with self.subTest(metadata=metadata, empty=empty):
                    self.assert_loads(official(*paths))

    @pytest.mark.feature
    def test_zero_byte_tensor_arrives_with_its_shape_in_any_listing(self):
        # Turns red when InstantTensor's rule about the order of a header decides.
        tensors = [("a", "U8", (2,)), ("b", "U8", (2,)), ("z", "U8", (0, 4))]
        for listing in ("abz", "azb", "zab"):
            for offsets in (None, [(0, 2), (2, 4), (2, 2)], [(0, 2), (2, 4), (0, 0)]):
                self.clear()
                path = self.shard("m", tensors, listing=listing, offsets=offsets)
                with self.subTest(listing=listing, offsets=offsets):
                    self.assert_loads(official(path))

    @pytest.mark.guard(mutation="a shape or an offset is rounded")
    def test_scalars_and_odd_offsets_keep_shape_and_bytes(self):
        # Turns red when [] becomes [1] or an unaligned tensor moves.
        tensors = [("o", "I8", (1,)), ("s", "F32", ()), ("v", "F32", (1,))]
        self.assert_loads(official(self.shard("m", tensors)))

    @pytest.mark.feature
    def test_index_decides_which_copy_of_a_tensor_counts(self):
        # Turns red when a stale copy wins, or arrives beside the right one.
        self.shard("a", [("x", "U8", (4,)), ("y", "U8", (600,))])
        owner = self.shard("b", [("x", "F32", (4,))], salt=9)
        self.index(x="b.safetensors", y="a.safetensors")
        expected = official(self.folder / "a.safetensors") | official(owner)
        self.assert_loads(expected)

    @pytest.mark.guard(mutation="files beside the index are added")
    def test_consolidated_file_and_second_split_beside_the_index_never_count(self):
        # Turns red when the target reads a file that its index does not name.
        paths = [self.shard(f"model-{i}-of-2", [(f"t{i}", "U8", (8,))]) for i in (1, 2)]
        both = [("t1", "U8", (8,)), ("t2", "U8", (8,))]
        self.shard("consolidated", both, salt=1)
        self.shard("model-1-of-3", [("t1", "U8", (8,))], salt=2)
        self.shard("mtp", [("draft", "U8", (8,))])
        self.index(t1=paths[0].name, t2=paths[1].name)
        self.assert_loads(official(*paths))

    @pytest.mark.feature
    def test_two_links_to_one_file_are_read_once(self):
        # Turns red when a tensor arrives twice because its file has two names.
        path = self.shard("a")
        (self.folder / "b.safetensors").symlink_to(path)
        self.assert_loads(official(path))
        self.assertEqual(len(self.journal.calls[0].files), 1)

    @pytest.mark.guard(mutation="the file behind a link must be called .safetensors")
    def test_link_of_a_hub_cache_counts_by_its_own_name(self):
        # Turns red when a blob without the ending is refused.
        with tempfile.TemporaryDirectory() as blobs:
            blob = write_shard(Path(blobs, "0a1b"), PLAIN)
            (self.folder / "model.safetensors").symlink_to(blob)
            self.assert_loads(official(blob))

    @pytest.mark.guard(mutation="hidden files are listed")
    def test_apple_double_file_is_never_opened(self):
        # Turns red when macOS leftovers end a load.
        path = self.shard("model")
        double = bytes([0, 5, 0x16, 7, 0, 2, 0, 0]) + b"x" * 92
        (self.folder / "._model.safetensors").write_bytes(double)
        self.assert_loads(official(path))

    @pytest.mark.feature
    def test_shard_in_memory_beside_shards_on_disk(self):
        # Turns red when both are given to one InstantTensor call.
        memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.addCleanup(shutil.rmtree, memory)
        paths = [self.shard("disk", [("d", "U8", (64,))])]
        paths.append(write_shard(memory / "m.safetensors", [("m", "U8", (8,))]))
        (self.folder / "m.safetensors").symlink_to(paths[1])
        self.assert_loads(official(*paths))

    @pytest.mark.feature
    def test_any_metadata_loads_the_same_bytes(self):
        # Turns red when a checkpoint of another framework is turned away.
        for metadata in (None, {}, {"format": "pt"}, {"format": "mlx"}):
            self.clear()
            path = self.shard("m", metadata=metadata)
            with self.subTest(metadata=metadata):
                self.assert_loads(official(path))

    @pytest.mark.feature
    def test_sub_byte_tensor_arrives_packed_and_without_its_neighbour(self):
        # Turns red when F4 goes through InstantTensor, which doubles it.
        for tensors in (
            [("s", "F8_E8M0", (3,)), ("w", "F4", (2, 8)), ("n", "F8_E8M0", (8,))],
            [("w", "F4", (2, 8))],
        ):
            self.clear()
            path = self.shard("m", tensors)
            with self.subTest(tensors=len(tensors)):
                self.assert_loads(official(path))
                (loaded,) = [t for n, t in self.weights() if n == "w"]
                self.assertEqual(tuple(loaded.shape), (2, 4))

    @pytest.mark.guard(mutation="a yielded tensor is a view of memory that is reused")
    def test_consumer_that_keeps_every_tensor_has_the_right_bytes(self):
        # Turns red when a kept tensor changes under its owner.
        paths = [
            self.shard(stem, [(f"{stem}{i}", "U8", (64,)) for i in range(3)], salt=salt)
            for salt, stem in enumerate("ab")
        ]
        kept = dict(self.weights())
        self.assertEqual({n: raw(t) for n, t in kept.items()}, official(*paths))

    @pytest.mark.feature
    def test_early_stop_is_one_warning_and_closes_the_load(self):
        # Turns red when a consumer that breaks leaves something running or silent.
        self.shard("m", [(f"t{i}", "U8", (8,)) for i in range(6)])
        weights = self.weights()
        next(weights)
        with self.assertLogs(level="WARNING") as logs:
            weights.close()
        self.assertIn("stopped after 1 of 6 tensors", logs.output[0])


class TestRefusals(OddCase):
    @pytest.mark.feature
    def test_what_official_safetensors_refuses_is_refused_by_name_unread(self):
        # Turns red when our verdict is kinder, or the reason is lost in a thread.
        pair = [("a", "U8", (4,)), ("b", "U8", (4,))]
        damages = {
            "truncated": {"payload": b"x" * 7},
            "trailing": {"payload": b"x" * 10},
            "gap": {"offsets": [(0, 4), (6, 10)]},
            "gap-before": {"offsets": [(2, 6), (6, 10)]},
            "overlap": {"offsets": [(0, 4), (2, 6)]},
        }
        for damage, kwargs in damages.items():
            self.clear()
            self.shard("good")
            self.shard("broken", pair, **kwargs)
            with self.subTest(damage=damage):
                self.assert_refused("broken.safetensors: refused by safetensors")

    @pytest.mark.feature
    def test_six_bit_tensor_is_refused_by_name_before_any_read(self):
        # Turns red when it is found out in the middle of a load.
        self.shard("m", [*PLAIN, ("six", "F6_E2M3", (4,))])
        self.assert_refused("m.safetensors", "'six'", "F6_E2M3")

    @pytest.mark.feature
    def test_same_name_in_two_files_without_index_is_refused_with_both(self):
        # Turns red when one of two copies is taken silently.
        self.shard("a")
        self.shard("b", salt=1)
        self.assert_refused("'plain'", "a.safetensors", "b.safetensors", "index")

    @pytest.mark.feature
    def test_index_that_promises_a_tensor_its_shard_lacks_is_refused(self):
        # Turns red when a stale index leaves a weight uninitialised.
        self.shard("a")
        self.index(plain="a.safetensors", gone="a.safetensors")
        self.assert_refused("a.safetensors", "'gone'", "stale index")

    @pytest.mark.guard(mutation="the engine's own check of the shards is bypassed")
    def test_missing_shard_of_the_index_is_the_engines_error(self):
        # Turns red when an incomplete download loads what is there.
        self.shard("a")
        self.index(plain="a.safetensors", x="b.safetensors")
        self.assert_refused("b.safetensors", "missing")
        (self.folder / "b.safetensors").symlink_to(self.folder / "blob")
        self.assert_refused("b.safetensors", "missing")

    @pytest.mark.feature
    def test_dangling_link_without_index_is_refused_by_name(self):
        # Turns red when the reason is lost in a thread of InstantTensor.
        self.shard("a")
        (self.folder / "b.safetensors").symlink_to(self.folder / "blob")
        self.assert_refused("b.safetensors", "a link to", "not there")

    @pytest.mark.feature
    def test_checkpoint_of_empty_shards_is_refused(self):
        # Turns red when nothing at all loads as if it were a checkpoint.
        self.shard("a", [])
        self.shard("b", [], metadata={})
        self.assert_refused("no tensor in 2 file(s)")

    @pytest.mark.feature
    def test_index_that_leaves_the_folder_is_refused(self):
        # Turns red when a downloaded index chooses which files are read.
        self.shard("a")
        with tempfile.TemporaryDirectory() as other:
            outside = write_shard(Path(other, "x.safetensors"), [("x", "U8", (8,))])
            shard = os.path.relpath(outside, self.folder)
            self.index(plain="a.safetensors", x=shard)
            self.assert_refused("names shard", "..")


class TestLittleMemory(OddCase):
    free_memory = 4 << 20

    @pytest.mark.feature
    def test_tensor_that_the_ring_could_not_hold_stays_on_the_host(self):
        # 3 MiB with 4 MiB free, of which the ring may take half; red when it is
        # streamed, which the library refuses.
        table = self.shard("table", [("table", "U8", (3 << 20,)), ("x", "U8", (8,))])
        self.assert_loads(official(table), on_device=False)
        placed = {n: self.journal.on_device(t) for n, t in self.weights()}
        self.assertEqual(placed, {"table": False, "x": True})


class TestMuchMemory(OddCase):
    @pytest.mark.feature
    def test_small_load_asks_for_a_small_ring(self):
        # The default ring is 4 GiB for 8 bytes; red when it is asked for again.
        self.assert_loads(official(self.shard("m")))
        (call,) = self.journal.calls
        self.assertLessEqual(call.kwargs.get("io_depth", 512), 3)
        self.assertEqual(set(call.kwargs) - {"io_depth"}, {"copy"})


if __name__ == "__main__":
    unittest.main()
