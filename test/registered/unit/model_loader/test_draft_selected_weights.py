"""A draft reads only its own weights under --load-format instanttensor.

The released DefaultModelLoader runs over checkpoints that a target and its draft share,
with a small module that declares its weights and with the released drafts, built whole
and tiny. InstantTensor and the device are fakes; bytes are counted.
"""

import json
import logging
import os
import struct
import tempfile
import unittest
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_deepseek_v41 import (
    BF16,
    model_config_of,
    run_ranks,
    tensor_bytes,
    write_shards,
)
from tiny_drafts import (
    DRAFTS,
    bytes_read,
    counted_reads,
    load_drafts,
    opened_files,
    shared_checkpoint,
)
from torch import nn

from loadplan.standin.gpu import fake_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_executor.model_runner_components.load_model_utils import (
    build_load_config,
)
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.glm5_next_nextn import Glm5NextForConditionalGenerationNextN
from sglang.srt.runtime_context import get_context, get_server_args
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

LOGGER = "sglang.srt.model_loader.draft_weights"
OWN = {f"draft.{part}": (BF16, (512, 512)) for part in ("a", "b")}
TARGET = {f"layers.{i}": (BF16, (2048, 512)) for i in range(4)}
MOST = 1.02  # times the draft's own bytes may be read, and headers


class Draft(nn.Module):
    """Two weights of its own and one that it takes from its target."""

    def __init__(self):
        super().__init__()
        for name in ("a", "b", "shared"):
            setattr(self, name, nn.Parameter(torch.zeros(512, 512, dtype=BF16)))

    def wanted_weight(self, name):
        return name.startswith("draft.")

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if Draft.wanted_weight(self, name):
                parameters[name.removeprefix("draft.")].data.copy_(tensor)


class Undeclared(Draft):
    wanted_weight = None


@contextmanager
def logged(level):
    """What the glue of drafts logs at one level."""
    lines, logger = [], logging.getLogger(LOGGER)
    handler, before = logging.Handler(), logger.level
    handler.addFilter(lambda record: record.levelno == level)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class SelectionCase(CustomTestCase):
    free_memory = 80 << 30

    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)
        self.folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.stack.enter_context(get_context().override_server_args())
        self.journal = self.stack.enter_context(fake_gpu(free_memory=self.free_memory))

    def write(self, unindexed=(), **shards):
        """Write shards; afterwards `self.content` has the draft's bytes by name."""
        content = write_shards(self.folder, shards, unindexed=unindexed)
        self.content = {name: content[name] for name in OWN if name in content}

    def load(self, model=None):
        model = model or Draft()
        self.journal.calls.clear()
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        weights = loader._get_all_weights(model_config_of(self.folder), model)
        with counted_reads() as reads:
            loaded = {name: tensor_bytes(tensor) for name, tensor in weights}
            return SimpleNamespace(
                loaded=loaded,
                nbytes=bytes_read(self.journal, reads),
                opened=[os.path.basename(f) for f in opened_files(self.journal, reads)],
            )

    def assert_reads_its_own(self, load, *, opened):
        """Exactly the draft's weights, bit for bit, and hardly a byte more."""
        self.assertEqual(sorted(load.loaded), sorted(self.content))
        self.assertEqual(load.loaded, self.content)
        self.assertLessEqual(load.nbytes, MOST * sum(map(len, self.content.values())))
        self.assertEqual(
            load.opened, [f"model-{label}.safetensors" for label in opened]
        )

    def assert_refused(self, *texts):
        message = "nothing was raised"
        try:
            self.load()
        except ValueError as error:
            message = str(error)
        for text in texts:
            self.assertIn(text, message)
        self.assertEqual(self.journal.calls, [])


class TestWhatIsRead(SelectionCase):
    @pytest.mark.feature
    def test_shard_of_its_own_is_streamed_and_no_other_opened(self):
        # Turns red when a file without a wanted tensor is read beyond its header.
        self.write(draft=OWN, target=TARGET)
        self.assert_reads_its_own(self.load(), opened=["draft"])
        self.assertEqual(len(self.journal.calls), 1)

    @pytest.mark.feature
    def test_mixed_shards_are_read_by_the_drafts_bytes_alone(self):
        # Turns red when a shard that is mostly the target's is streamed whole.
        both = TARGET | OWN
        names = sorted(both)
        self.write(
            a={n: both[n] for n in names[::2]}, b={n: both[n] for n in names[1::2]}
        )
        self.assert_reads_its_own(self.load(), opened=["a", "b"])
        self.assertEqual(self.journal.calls, [])

    @pytest.mark.feature
    def test_system_counts_no_more_bytes_than_we_do(self):
        # Turns red when bytes are read past the counted reads.
        self.write(a=TARGET | OWN)
        self.load()  # What is imported on the way is read here.

        def bytes_so_far():
            text = Path("/proc/self/io").read_text()
            return int(text.split("rchar:")[1].split()[0])

        one = bytes_so_far()
        Path(self.folder, "model-a.safetensors").read_bytes()
        two = bytes_so_far()
        load = self.load()
        three = bytes_so_far()
        self.assertEqual(sorted(load.loaded), sorted(self.content))
        own = sum(map(len, self.content.values()))
        whole = os.path.getsize(f"{self.folder}/model-a.safetensors")
        # A sandbox may count nothing; then the counted reads have to do.
        if two - one >= whole:
            self.assertLessEqual(three - two, MOST * own + 65536)

    @pytest.mark.feature
    def test_file_outside_the_index_is_found_by_the_draft(self):
        # Turns red when a draft that the index forgot is not loaded.
        self.write(target=TARGET, mtp=OWN, unindexed=["mtp"])
        self.assert_reads_its_own(self.load(), opened=["mtp"])

    @pytest.mark.guard(mutation="unindexed files are added for every model")
    def test_file_outside_the_index_is_not_the_targets(self):
        # Turns red when a model that declares nothing sees an unindexed file.
        self.write(target=TARGET, mtp=OWN, unindexed=["mtp"])
        load = self.load(Undeclared())
        self.assertEqual(sorted(load.loaded), sorted(TARGET))

    @pytest.mark.feature
    def test_copy_outside_the_index_does_not_count(self):
        # Turns red when a consolidated file stands in for the indexed shards.
        self.write(draft=OWN, target=TARGET)
        whole = {name: torch.zeros(1) for name in (*OWN, "other")}
        save_file(whole, f"{self.folder}/consolidated.safetensors")
        self.assert_reads_its_own(self.load(), opened=["draft"])

    @pytest.mark.feature
    def test_broken_file_outside_the_index_is_named_and_left_out(self):
        # Turns red when the rest of a download ends the load, or goes unsaid.
        self.write(draft=OWN, target=TARGET)
        Path(self.folder, "rest.safetensors").write_bytes(b"\xff" * 64)
        with logged(logging.WARNING) as lines:
            load = self.load()
        self.assert_reads_its_own(load, opened=["draft"])
        self.assertEqual(len(lines), 1)
        self.assertIn("rest.safetensors", lines[0])

    @pytest.mark.feature
    def test_odd_tensor_of_the_target_is_never_looked_at(self):
        # Turns red when what torch cannot hold ends the load of a draft beside it.
        self.write(draft={"draft.a": OWN["draft.a"]}, target=TARGET)
        payload = bytes(range(8))
        entries = {
            "layers.9": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]},
            "draft.b": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]},
        }
        text = json.dumps(entries).encode()
        path = Path(self.folder, "model-odd.safetensors")
        path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
        self.content["draft.b"] = payload[6:]
        try:
            load = self.load()
        except ValueError as error:
            self.fail(str(error))
        self.assert_reads_its_own(load, opened=["draft", "odd"])

    @pytest.mark.feature
    def test_one_line_tells_how_much_is_read_and_by_whose_rule(self):
        # Turns red when a log does not show whether the draft reads everything.
        self.write(a=TARGET | OWN)
        with logged(logging.INFO) as lines:
            self.load()
        own = sum(map(len, self.content.values()))
        self.assertEqual(len(lines), 1)
        self.assertIn(f"{own} of {9 * own} bytes", lines[0])
        self.assertIn("Draft.wanted_weight", lines[0])


class TestRefusals(SelectionCase):
    @pytest.mark.feature
    def test_rule_that_accepts_nothing_is_an_error(self):
        # Turns red when a draft starts with nothing loaded.
        self.write(target=TARGET)
        self.assert_refused("Draft.wanted_weight", self.folder, "none of 4 tensors")

    @pytest.mark.feature
    def test_indexed_weight_that_no_file_yields_is_listed(self):
        # The engine lists no subfolder; red when the draft starts without them.
        self.write(draft={"draft.a": OWN["draft.a"]}, target=TARGET)
        os.mkdir(f"{self.folder}/sub")
        write_shards(f"{self.folder}/sub", {"b": {"draft.b": OWN["draft.b"]}})
        index = Path(self.folder, "model.safetensors.index.json")
        whole = json.loads(index.read_text())
        whole["weight_map"]["draft.b"] = "sub/model-b.safetensors"
        index.write_text(json.dumps(whole))
        self.assert_refused("['draft.b']", "Draft.wanted_weight")


class TestLastFivePercent(SelectionCase):
    free_memory = 4 << 30  # of 80 GiB; InstantTensor's default ring takes as much

    @pytest.mark.feature
    def test_draft_takes_about_its_own_size_of_device_memory(self):
        # Turns red when the ring for a small draft takes the memory that is left.
        self.write(draft=OWN, target=TARGET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.assert_reads_its_own(self.load(), opened=["draft"])
        (call,) = self.journal.calls
        ring = call.kwargs.get("io_depth", 512) * (8 << 20)
        self.assertLessEqual(ring, 32 << 20)


class TestUnwritten(SelectionCase):
    def load_into(self, model):
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        weights = loader._get_all_weights(model_config_of(self.folder), model)
        with logged(logging.WARNING) as lines:
            loader.load_weights_and_postprocess(model, weights, torch.device("cpu"))
        return lines

    @pytest.mark.feature
    def test_what_nothing_wrote_is_one_warning_that_lists_it(self):
        # Turns red when a draft lacks weights and nobody says so.
        self.write(draft={"draft.a": OWN["draft.a"]}, target=TARGET)
        lines = self.load_into(Draft())
        self.assertEqual(len(lines), 1)
        self.assertIn("['b', 'shared']", lines[0])

    @pytest.mark.feature
    def test_reload_of_the_same_weights_is_no_second_warning(self):
        # Turns red when an update in place takes equal weights for missing ones.
        self.write(draft=OWN, target=TARGET)
        model = Draft()
        first = self.load_into(model)
        self.assertEqual(len(first), 1)
        self.assertIn("['shared']", first[0])
        self.assertEqual(self.load_into(model), [])

    @pytest.mark.feature
    def test_parameters_without_plain_memory_do_not_end_the_load(self):
        # Turns red when what only watches a load raises over one it cannot look at.
        self.write(draft=OWN, target=TARGET)
        model = Draft()
        odd = torch.zeros(1, dtype=BF16).expand(512, 512)
        model.tied = nn.Parameter(odd, requires_grad=False)
        sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (512, 512))
        model.sparse = nn.Parameter(sparse, requires_grad=False)
        lines = self.load_into(model)
        self.assertEqual(len(lines), 1)
        self.assertIn("['shared']", lines[0])

    @pytest.mark.guard(mutation="every model is looked at")
    def test_model_that_declares_nothing_is_not_looked_at(self):
        # Turns red when a target that ties its head is warned of.
        self.write(draft=OWN)
        self.assertEqual(self.load_into(Undeclared()), [])


class TestDraftsOwnFormat(SelectionCase):
    def config(self, draft_format):
        arguments = get_server_args()
        return build_load_config(
            server_args=arguments,
            load_format=draft_format,
            tp_rank=0,
            remote_instance_weight_transporter_engine=None,
            remote_instance_weight_transporter_session_id="",
            draft_model_idx=None,
            weight_cache_mode="off",
            weight_cache_socket=None,
        )

    @pytest.mark.feature
    def test_explicit_format_wins_and_drops_what_only_instanttensor_knows(self):
        # Turns red when the target's ring size ends the load of its draft.
        options = {"io_depth": 4, "num_threads": 2}
        for given in (options, json.dumps(options)):
            arguments = {"load_format": "instanttensor"}
            arguments["model_loader_extra_config"] = given
            with get_context().override_server_args(**arguments):
                try:
                    loader = DefaultModelLoader(self.config("safetensors"))
                except ValueError as error:
                    self.fail(str(error))
                config = loader.load_config
                self.assertEqual(config.load_format, "safetensors")
                self.assertEqual(config.model_loader_extra_config, {"num_threads": 2})
                for same in (None, "instanttensor"):
                    kept = self.config(same).model_loader_extra_config
                    self.assertEqual(kept, options)
            self.assertEqual(options, {"io_depth": 4, "num_threads": 2})


class TestReleasedDrafts(CustomTestCase):
    def setUp(self):
        super().setUp()
        self.stack = ExitStack()
        self.addCleanup(self.stack.close)

    def load(self, tp_size, *cases):
        try:
            return run_ranks(tp_size, load_drafts, cases)
        except RuntimeError as error:
            self.fail(str(error))

    def checkpoint(self, kind, layout):
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        return folder, shared_checkpoint(folder, DRAFTS[kind](), layout)

    def assert_reads_its_own(self, load, own):
        self.assertEqual(load.names, sorted(own))
        nbytes = sum(map(len, own.values()))
        self.assertLessEqual(load.nbytes, MOST * nbytes)

    @pytest.mark.feature
    def test_every_draft_reads_what_its_load_weights_keeps(self):
        # Turns red when a rule and the load_weights of its class part ways.
        kinds = [kind for kind in DRAFTS if "layers.7" not in kind]
        for kind in kinds:
            with self.subTest(kind=kind):
                folders = [
                    self.checkpoint(kind, layout)
                    for layout in ("own", "mixed", "unindexed")
                ]
                (folder, own), *_ = folders
                cases = [(folder, kind, "safetensors", None)]
                cases += [(f, kind, "instanttensor", None) for f, _ in folders]
                ((reference, *loads),) = self.load(1, *cases)
                shared = {"model.embed_tokens.weight", "lm_head.weight"}
                self.assertLessEqual(
                    {n for n in reference.unset if not n.endswith("_scale")}, shared
                )
                for load, (_, own) in zip(loads, folders, strict=True):
                    self.assert_reads_its_own(load, own)
                opened = [len(load.opened) for load in loads]
                self.assertEqual(opened, [1, 2, 1])
                alone, mixed, unindexed = loads
                self.assertEqual(alone.digests, reference.digests)
                self.assertEqual(unindexed.digests, reference.digests)
                self.assertEqual(mixed.unset, reference.unset)

    @pytest.mark.feature
    def test_ranks_load_the_draft_together(self):
        # Turns red when the draft's files or routes are not agreed upon.
        folder, own = self.checkpoint("DSpark", "mixed")
        formats = ("safetensors", "instanttensor")
        cases = [(folder, "DSpark", name, None) for name in formats]
        for reference, load in self.load(2, *cases):
            self.assert_reads_its_own(load, own)
            self.assertEqual(load.digests, reference.digests)

    @pytest.mark.feature
    def test_load_weights_drops_by_the_very_same_rule(self):
        # The format reads all; red when load_weights has a copy of the rule.
        for kind, change in (
            ("V3 NextN", "keep nothing"),
            ("V4 NextN", "keep nothing"),
            ("V4 NextN as layers.7", "layer 7"),
            ("DSpark", "NPU"),
        ):
            with self.subTest(kind=kind, change=change):
                folder, _ = self.checkpoint(kind, "own")
                plain = (folder, kind, "safetensors", None)
                changed = (folder, kind, "safetensors", change)
                ((before, after),) = self.load(1, plain, changed)
                self.assertNotEqual(before.unset, after.unset)


class TestDeclarations(CustomTestCase):
    @pytest.mark.feature
    def test_dspark_answers_by_the_remap_of_its_platform(self):
        # Turns red when an NPU's own vocabulary is not read, or read twice.
        model = DeepseekV4ForCausalLMDSpark.__new__(DeepseekV4ForCausalLMDSpark)
        nn.Module.__init__(model)
        model.confidence_head, model.num_stages = None, 2
        model.uses_own_vocab_modules = True
        wanted = getattr(model, "wanted_weight", None)
        self.assertIsNotNone(wanted)
        names = [f"mtp.{i}.{part}.weight" for i in (0, 1) for part in ("embed", "head")]
        module = "sglang.srt.models.deepseek_common.draft_names"
        with mock.patch(f"{module}._is_npu", True):
            found = [wanted(name) for name in (*names, "embed.weight")]
        self.assertEqual(found, [True, False, False, True, False])
        self.assertTrue(wanted("mtp.0.attn.wq_a.scale"))
        for name in ("layers.0.attn.wq_a.scale", "mtp.1.confidence_head.proj.weight"):
            self.assertFalse(wanted(name), name)

    @pytest.mark.guard(mutation="a subclass with its own load_weights inherits a rule")
    def test_draft_with_a_rule_of_its_own_inherits_none(self):
        # Turns red when another draft is filtered by DeepSeek's names.
        draft = Glm5NextForConditionalGenerationNextN
        self.assertIsNot(draft.load_weights, DeepseekV3ForCausalLMNextN.load_weights)
        self.assertIsNone(getattr(draft, "wanted_weight", None))


if __name__ == "__main__":
    unittest.main()
