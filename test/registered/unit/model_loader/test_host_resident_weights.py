"""Host-resident weights under --load-format instanttensor.

The released DefaultModelLoader runs over small checkpoints; InstantTensor and the
device are fakes that keep a journal of what reached them.
"""

import json
import os
import tempfile
import unittest
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from loadplan.standin.gpu import Journal, fake_gpu
from loadplan.standin.mapped import mapped_bytes
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    WeightUpdater,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import instanttensor_weights_iterator
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

TABLE = "layers.1.engram.embed.weight"
SCALE = "layers.1.engram.embed.scale"
DENSE = "layers.0.attn.wq_a.weight"
GATE = "layers.1.engram.wkv.weight"
DENSE_SCALE = "layers.0.attn.wq_a.scale"
PATTERNS = (".engram.embed.",)


def random_bytes(shape, dtype, *, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(
        dtype
    )


def checkpoint_tensors():
    return {
        TABLE: random_bytes((64, 32), torch.float8_e4m3fn, seed=1),
        SCALE: random_bytes((64, 1), torch.float8_e8m0fnu, seed=2),
        GATE: random_bytes((8, 64), torch.bfloat16, seed=3),
        DENSE: random_bytes((16, 16), torch.float8_e4m3fn, seed=4),
        "norm.weight": random_bytes((16,), torch.bfloat16, seed=5),
        DENSE_SCALE: random_bytes((4, 4), torch.float8_e8m0fnu, seed=9),
    }


def raw(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


class Declaring(torch.nn.Module):
    """A model that declares host-resident weights, as the loader reads it."""

    def __init__(self, patterns, **attributes):
        super().__init__()
        self.host_resident_weight_patterns = patterns
        for name, value in attributes.items():
            setattr(self, name, value)


class Load(msgspec.Struct, kw_only=True):
    """What one load yielded and what reached InstantTensor and the device."""

    pairs: list
    journal: Journal

    @property
    def names(self):
        return [name for name, _ in self.pairs]

    @property
    def on_device(self):
        return {name for name, tensor in self.pairs if self.journal.on_device(tensor)}

    @property
    def streamed_files(self):
        return [os.path.basename(f) for call in self.journal.calls for f in call.files]


class LoaderCase(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.stack.enter_context(get_context().override_server_args())
        self.journal = self.stack.enter_context(fake_gpu())

    def write(self, **files):
        """Write shards of (name, ...) lists of the table above, and an index."""
        tensors, weight_map = checkpoint_tensors(), {}
        for stem, names in files.items():
            path = Path(self.folder, f"{stem}.safetensors")
            save_file({n: tensors[n] for n in names}, path, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(names, path.name)
        index = Path(self.folder, "model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": weight_map}))
        return {name: raw(tensors[name]) for name in weight_map}

    def loader(self, load_format="instanttensor", **config):
        return DefaultModelLoader(LoadConfig(load_format=load_format, **config))

    def model_config(self, hf_config=None):
        return SimpleNamespace(
            model_path=self.folder,
            revision=None,
            hf_config=hf_config or SimpleNamespace(architectures=["DeepseekV4"]),
        )

    def load(self, model, *, loader=None, model_config=None):
        loader = loader or self.loader()
        config = model_config or self.model_config()
        pairs = list(loader._get_all_weights(config, model))
        return Load(pairs=pairs, journal=self.journal)

    def assert_exact(self, load, expected):
        self.assertEqual(sorted(load.names), sorted(expected))
        self.assertEqual({n: raw(t) for n, t in load.pairs}, expected)


class TestHostResidentWeights(LoaderCase):
    @pytest.mark.feature
    def test_only_declared_tensors_stay_on_the_host(self):
        # Turns red when the split is by file, or drops the patterns on the way.
        expected = self.write(a=[DENSE, "norm.weight"], b=[TABLE, SCALE], c=[GATE])
        load = self.load(Declaring(PATTERNS))
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, set(expected) - {TABLE, SCALE})
        self.assertEqual(load.streamed_files, ["a.safetensors", "c.safetensors"])

    @pytest.mark.feature
    def test_tensors_that_share_the_table_file_reach_the_device(self):
        # Turns red when a mixed file is streamed whole or left on the host whole.
        expected = self.write(a=[DENSE], b=[TABLE, SCALE, GATE, "norm.weight"])
        load = self.load(Declaring(PATTERNS))
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, set(expected) - {TABLE, SCALE})
        self.assertEqual(load.streamed_files, ["a.safetensors"])

    @pytest.mark.feature
    def test_host_resident_tensors_come_last_with_their_row_source(self):
        # Turns red when two request streams compete for the disk again.
        self.write(a=[TABLE, SCALE], b=[DENSE])
        load = self.load(Declaring(PATTERNS))
        self.assertEqual(set(load.names[-2:]), {TABLE, SCALE})
        rows = torch.empty(3, 32, dtype=torch.float8_e4m3fn)
        source = getattr(dict(load.pairs)[TABLE], "row_source", None)
        self.assertIsNotNone(source)
        source.read_rows_into(rows, 7)
        self.assertEqual(raw(rows), raw(checkpoint_tensors()[TABLE][7:10]))

    @pytest.mark.feature
    def test_without_mmap_only_tables_are_mapped_and_no_page_is_touched(self):
        # An unaware weight loader uses the whole tensor, Engram's only the row source;
        # red when the first brings mapped pages in, or the second costs a copy.
        unaware = [GATE, DENSE, DENSE_SCALE]
        expected = self.write(a=unaware, b=[TABLE, SCALE], c=["norm.weight"])
        model = Declaring((".engram.", ".wq_a."))
        with get_context().override_server_args(weight_loader_disable_mmap=True):
            load = self.load(model)
        self.assertEqual(load.on_device, {"norm.weight"})
        weights = dict(load.pairs)
        for name in [*unaware, "norm.weight"]:
            self.assertEqual(raw(weights[name]), expected[name])
        for name in (TABLE, SCALE):
            rows = torch.empty_like(weights[name])
            weights[name].row_source.read_rows_into(rows, 0)
            self.assertEqual(raw(rows), expected[name])
        self.assertEqual(mapped_bytes(self.folder), {"b.safetensors": 0})

    @pytest.mark.feature
    def test_instanttensor_is_not_called_without_device_weights(self):
        # Turns red when an empty file list reaches InstantTensor.
        expected = self.write(a=[TABLE, SCALE])
        load = self.load(Declaring(PATTERNS))
        self.assert_exact(load, expected)
        self.assertEqual((load.on_device, self.journal.calls), (set(), []))

    @pytest.mark.guard(mutation="the branch hands over another file list or options")
    def test_nothing_declared_is_one_stock_call(self):
        # Turns red when the plan costs a clean checkpoint its fast path.
        expected = self.write(b=[TABLE, SCALE], a=[DENSE, GATE, "norm.weight"])
        extra = {"chunk_size": 1 << 20, "backend": ["AIO", "BUFFERED"]}
        load = self.load(
            Declaring(None), loader=self.loader(model_loader_extra_config=extra)
        )
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, set(expected))
        (call,) = self.journal.calls
        self.assertEqual(
            list(call.files),
            [f"{self.folder}/a.safetensors", f"{self.folder}/b.safetensors"],
        )
        self.assertEqual(str(call.device), "cuda:0")
        self.assertIsNone(call.process_group)
        backend = [member.name for member in call.kwargs["backend"]]
        self.assertEqual(backend, extra["backend"])
        kwargs = {k: v for k, v in call.kwargs.items() if k != "backend"}
        self.assertEqual(kwargs, {"copy": True, "chunk_size": 1 << 20})

    @pytest.mark.feature
    def test_the_callers_file_list_stays_as_it_was(self):
        # InstantTensor sorts its argument in place; red when it gets the caller's.
        self.write(b=[DENSE], a=["norm.weight"])
        files = [f"{self.folder}/{stem}.safetensors" for stem in ("b", "a")]
        try:
            from sglang.srt.model_loader.planned_weights import (
                planned_weights_iterator,
            )
        except ImportError as error:
            self.fail(str(error))
        weights = planned_weights_iterator(
            files,
            hf_folder=self.folder,
            source=DefaultModelLoader.Source(self.folder, None),
            stream_weights=instanttensor_weights_iterator,
            extra_config={},
            load_group=None,
        )
        self.assertEqual({name for name, _ in weights}, {DENSE, "norm.weight"})
        self.assertEqual([os.path.basename(f)[0] for f in files], ["b", "a"])

    @pytest.mark.guard(mutation="planned_weights_iterator plans before it is iterated")
    def test_nothing_is_opened_before_the_first_next(self):
        # Turns red when building the iterator reads headers.
        self.write(a=[DENSE])
        Path(self.folder, "a.safetensors").write_bytes(b"no header")
        weights = self.loader()._get_weights_iterator(
            DefaultModelLoader.Source(self.folder, None)
        )
        with self.assertRaises((ValueError, TypeError)):
            next(iter(weights))

    @pytest.mark.guard(mutation="the disable switch is not looked at")
    def test_disabled_is_stock(self):
        # Turns red when LOADPLAN_DISABLE no longer gives the engine's own behaviour.
        expected = self.write(a=[DENSE], b=[TABLE, SCALE, GATE])
        with mock.patch.dict(os.environ, {"LOADPLAN_DISABLE": "1"}):
            load = self.load(Declaring(PATTERNS))
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, set(expected))
        self.assertEqual(len(self.journal.calls), 1)

    @pytest.mark.guard(mutation="the plan is made for every load format")
    def test_other_load_formats_are_untouched(self):
        # Turns red when the patterns change the safetensors format.
        expected = self.write(a=[DENSE], b=[TABLE, SCALE, GATE])
        load = self.load(Declaring(PATTERNS), loader=self.loader("safetensors"))
        self.assert_exact(load, expected)
        self.assertEqual((load.on_device, self.journal.calls), (set(), []))
        self.assertFalse(any(hasattr(t, "row_source") for _, t in load.pairs))


class TestRefusals(LoaderCase):
    """The engine's own errors come first, ours name the way out."""

    @pytest.mark.guard(mutation="headers are read before the platform is checked")
    def test_device_that_is_not_cuda_gives_the_engines_error(self):
        # Turns red when a broken file is reported on a machine that cannot load.
        self.write(a=[DENSE])
        Path(self.folder, "a.safetensors").write_bytes(b"no header")
        with mock.patch.object(current_platform, "device_type", "cpu"):
            with self.assertRaisesRegex(ValueError, "requires a CUDA-compatible"):
                self.load(Declaring(PATTERNS))

    @pytest.mark.guard(mutation="headers are read before the import is tried")
    def test_missing_instanttensor_gives_the_engines_error(self):
        # Turns red when the install hint is lost, also where all stays on the host.
        self.write(a=[TABLE])
        Path(self.folder, "a.safetensors").write_bytes(b"no header")
        with mock.patch.dict("sys.modules", {"instanttensor": None}):
            with self.assertRaisesRegex(ImportError, "pip install"):
                self.load(Declaring(PATTERNS))

    @pytest.mark.guard(mutation="every file is opened for its header")
    def test_other_files_are_not_opened_and_get_the_formats_error(self):
        # Turns red when a .pt file is parsed as safetensors.
        torch.save({}, Path(self.folder, "model.pt"))
        with self.assertRaisesRegex(ValueError, "only supports .safetensors"):
            self.load(Declaring(PATTERNS))

    @pytest.mark.feature
    def test_options_that_the_plan_decides_are_refused(self):
        # Turns red when a user's filter silently drops weights.
        self.write(a=[DENSE])
        for option in ("tensor_filter", "copy", "process_group"):
            loader = self.loader(model_loader_extra_config={option: None})
            with self.subTest(option=option):
                with self.assertRaises(Exception) as caught:
                    self.load(Declaring(None), loader=loader)
                self.assertIn(option, str(caught.exception))
                self.assertIn("--model-loader-extra-config", str(caught.exception))
        self.assertEqual(self.journal.calls, [])

    @pytest.mark.feature
    def test_table_on_the_host_that_nobody_declares_is_refused(self):
        # A property that raises AttributeError reads as None; red when that streams.
        self.write(a=[TABLE, SCALE], b=[DENSE])
        env = {"SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1"}
        message = ""
        with mock.patch.dict(os.environ, env):
            try:
                self.load(Declaring(None))
            except ValueError as error:
                message = str(error)
        self.assertIn("layers.1.engram.embed.", message)
        self.assertIn("host_resident_weight_patterns", message)
        self.assertEqual(self.journal.calls, [])


class TestEveryWayIn(LoaderCase):
    """Prefixes, secondary sources, drafts and unindexed files keep working."""

    @pytest.mark.feature
    def test_prefix_is_added_to_host_resident_names(self):
        # Turns red when the patterns are matched against the prefixed name only.
        expected = self.write(a=[TABLE], b=[DENSE])
        source = DefaultModelLoader.Source(self.folder, None, prefix="target.")
        source.host_resident_weight_patterns = ("layers.1.engram.embed.",)
        pairs = list(self.loader()._get_weights_iterator(source))
        load = Load(pairs=pairs, journal=self.journal)
        self.assert_exact(load, {f"target.{n}": v for n, v in expected.items()})
        self.assertEqual(load.on_device, {f"target.{DENSE}"})

    @pytest.mark.feature
    def test_secondary_source_has_patterns_of_its_own(self):
        # Turns red when the model's patterns leak into another source, or get lost.
        expected = self.write(a=[TABLE], b=[DENSE])
        with tempfile.TemporaryDirectory() as other:
            tensors = {"vision.embed": random_bytes((4, 4), torch.bfloat16, seed=6)}
            tensors["vision.host"] = random_bytes((4, 4), torch.bfloat16, seed=7)
            for name, tensor in tensors.items():
                save_file({name: tensor}, Path(other, f"{name}.safetensors"))
            secondary = DefaultModelLoader.Source(other, None)
            secondary.host_resident_weight_patterns = ("vision.host",)
            load = self.load(Declaring(PATTERNS, secondary_weights=[secondary]))
        self.assert_exact(load, expected | {n: raw(t) for n, t in tensors.items()})
        self.assertEqual(load.on_device, {DENSE, "vision.embed"})

    @pytest.mark.feature
    def test_draft_index_filter_keeps_host_resident_tensors(self):
        # Turns red when the multi-layer draft's filter loses the lazy tensors.
        tensors = {
            "model.mtp.layers.0.x": random_bytes((4,), torch.bfloat16, seed=1),
            "model.mtp.layers.1.x": random_bytes((4,), torch.bfloat16, seed=2),
            "model.host": random_bytes((4, 4), torch.bfloat16, seed=3),
        }
        save_file(tensors, Path(self.folder, "model.safetensors"))
        loader = self.loader(draft_model_idx=1)
        load = self.load(Declaring(("model.host",)), loader=loader)
        expected = {
            "model.mtp.layers.0.x": raw(tensors["model.mtp.layers.1.x"]),
            "model.host": raw(tensors["model.host"]),
        }
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, {"model.mtp.layers.0.x"})

    @pytest.mark.feature
    def test_draft_file_outside_the_index_is_loaded(self):
        # Turns red when the index drops mtp.safetensors that the engine adds itself.
        expected = self.write(a=[TABLE], b=[DENSE])
        draft = {"model.layers.9.x": random_bytes((4,), torch.bfloat16, seed=8)}
        save_file(draft, Path(self.folder, "mtp.safetensors"))
        hf_config = SimpleNamespace(
            architectures=["Glm4MoeForCausalLM"], num_nextn_predict_layers=1
        )
        config = self.model_config(hf_config)
        load = self.load(Declaring(PATTERNS), model_config=config)
        expected |= {n: raw(t) for n, t in draft.items()}
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, {DENSE, "model.layers.9.x"})

    @pytest.mark.feature
    def test_weights_resolved_for_startup_overlap_are_split_too(self):
        # Turns red when a ResolvedSource loses the patterns of its Source.
        expected = self.write(a=[TABLE, SCALE], b=[DENSE])
        loader = self.loader()
        (resolved,) = loader.resolve_model_weights(
            self.model_config(), Declaring(PATTERNS)
        )
        pairs = list(
            loader._get_weights_iterator(
                resolved.source, resolved_source=resolved, startup_prefetch_started=True
            )
        )
        load = Load(pairs=pairs, journal=self.journal)
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, {DENSE})

    @pytest.mark.feature
    def test_reload_from_disk_asks_the_model_again(self):
        # Turns red when update_weights_from_disk streams what lives on the host.
        expected = self.write(a=[TABLE, SCALE], b=[DENSE])
        model = Declaring(PATTERNS)
        arrived = {}
        model.load_weights = lambda weights: arrived.update(weights)
        model_config = self.model_config()
        model_config.dtype, model_config.quantization = torch.bfloat16, None
        updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=model_config,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=lambda *args, **kwargs: None,
            recapture_cuda_graph=None,
            get_model_runner=None,
        )
        done, message = updater.update_weights_from_disk(self.folder, "instanttensor")
        self.assertTrue(done, message)
        load = Load(pairs=list(arrived.items()), journal=self.journal)
        self.assert_exact(load, expected)
        self.assertEqual(load.on_device, {DENSE})

    @pytest.mark.guard(mutation="Source requires the new fields")
    def test_sources_that_declare_nothing_are_one_stock_call(self):
        # As LoRA adapters and Cosmos3's vision encoder make them; red when a Source
        # without a model is planned otherwise.
        expected = self.write(a=[DENSE, "norm.weight"])
        os.remove(f"{self.folder}/model.safetensors.index.json")
        os.mkdir(f"{self.folder}/vision_encoder")
        os.rename(
            f"{self.folder}/a.safetensors",
            f"{self.folder}/vision_encoder/a.safetensors",
        )
        for source in (
            DefaultModelLoader.Source(f"{self.folder}/vision_encoder", revision=None),
            DefaultModelLoader.Source(
                model_or_path=self.folder,
                revision=None,
                prefix="",
                allow_patterns_overrides=["vision_encoder/*.safetensors"],
            ),
        ):
            self.journal.calls.clear()
            pairs = list(self.loader()._get_weights_iterator(source))
            load = Load(pairs=pairs, journal=self.journal)
            self.assert_exact(load, expected)
            self.assertEqual(load.on_device, set(expected))
            self.assertEqual(len(self.journal.calls), 1)


if __name__ == "__main__":
    unittest.main()
