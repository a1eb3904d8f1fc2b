"""DeepSeek-V4.1 with its Engram tables on the host, under --load-format instanttensor.

The released target and draft classes, built whole and tiny, load through the released
DefaultModelLoader, one process per TP rank; InstantTensor and the device are fakes.
"""

import hashlib
import json
import os
import tempfile
import unittest
from unittest import mock

import pytest
import torch
from tiny_deepseek_v41 import (
    host_table_env,
    load_rank,
    model_config_of,
    run_ranks,
    tensor_bytes,
    tiny_checkpoint,
    tiny_config,
)

from loadplan.standin.gpu import fake_gpu
from sglang.srt.elastic_ep.expert_backup_manager import ExpertBackupManager
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

PATTERNS = (".engram.embed.",)
MODELS = (DeepseekV4ForCausalLM, DeepseekV4ForCausalLMDSpark)


class TestWholeModelLoad(CustomTestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def load(self, tp_size, config, *, model_class=MODELS[0], format, **kwargs):
        try:
            return run_ranks(
                tp_size, load_rank, self.folder, config, model_class, format, **kwargs
            )
        except RuntimeError as error:
            self.fail(str(error))

    def assert_tables(self, ranks, content, layout):
        """Every rank holds its own rows, or in the shared layout all rows."""
        for rank in ranks:
            self.assertTrue(rank.tables)
            for name, (row_start, rows, digest) in rank.tables.items():
                whole = content[name]
                row_bytes = 64 if name.endswith("weight") else 2
                if layout != "shared":
                    whole = whole[row_start * row_bytes :][: rows * row_bytes]
                self.assertEqual(digest, hashlib.sha256(whole).hexdigest(), name)

    @pytest.mark.feature
    def test_every_layout_and_tp_size_holds_the_checkpoints_bytes(self):
        # Turns red when a rank's rows, a dense weight or the split goes wrong.
        for own_files in (True, False):
            config = tiny_config(engram_heads=2 if own_files else 3)
            content = tiny_checkpoint(
                self.folder, config, tables_in_own_files=own_files
            )
            engram = sorted(name for name in content if ".engram.embed." in name)
            for layout in ("per_rank", "shared"):
                for tp_size in (1, 2, 4):
                    with self.subTest(own=own_files, layout=layout, tp=tp_size):
                        env = host_table_env(layout)
                        plain = self.load(
                            tp_size, config, format="safetensors", env=env
                        )
                        ranks = self.load(
                            tp_size, config, format="instanttensor", env=env
                        )
                        self.assert_tables(ranks, content, layout)
                        for rank, reference in zip(ranks, plain, strict=True):
                            self.assertEqual(rank.digests, reference.digests)
                            self.assertEqual(rank.names, sorted(content))
                            self.assertEqual(rank.on_host, engram)
                            holders = {f"model-engram-{i}.safetensors" for i in (1, 2)}
                            holders |= {f"model-layer-{i}.safetensors" for i in (1, 2)}
                            if own_files:
                                holders = {h for h in holders if "engram" in h}
                            self.assertFalse(rank.streamed & holders)

    @pytest.mark.feature
    def test_engram_config_places_and_declares_the_tables(self):
        # Turns red when the argument moves the tables and the loader does not know.
        config = tiny_config()
        content = tiny_checkpoint(self.folder, config)
        for replication, layout in (("none", "per_rank"), ("per_node", "shared")):
            with self.subTest(replication=replication):
                config_of = {"placement": "cpu", "replication": replication}
                arguments = {"engram_config": json.dumps(config_of)}
                ranks = self.load(
                    2, config, format="instanttensor", server_args=arguments
                )
                self.assert_tables(ranks, content, layout)
                for rank in ranks:
                    self.assertEqual(len(rank.on_host), 4)

    @pytest.mark.guard(mutation="the patterns are declared for tables on the device")
    def test_tables_on_the_device_are_streamed_as_ever(self):
        # Turns red when a table in device memory takes the slow way.
        config = tiny_config()
        content = tiny_checkpoint(self.folder, config)
        (rank,) = self.load(1, config, format="instanttensor")
        self.assert_tables([rank], content, None)
        self.assertEqual((rank.names, rank.on_host), (sorted(content), []))
        self.assertEqual(len(rank.streamed), 7)

    @pytest.mark.feature
    def test_draft_keeps_the_tables_off_the_device_too(self):
        # The draft reads the target's checkpoint; red when it streams the tables.
        config = tiny_config()
        content = tiny_checkpoint(self.folder, config)
        env = host_table_env("shared")
        draft = MODELS[1]
        plain = self.load(1, config, format="safetensors", model_class=draft, env=env)
        (rank,) = self.load(
            1, config, format="instanttensor", model_class=draft, env=env
        )
        self.assertEqual(rank.digests, plain[0].digests)
        tables = {name for name in content if ".engram.embed." in name}
        self.assertFalse(tables.intersection(rank.names).difference(rank.on_host))


class TestDeclaration(CustomTestCase):
    @pytest.mark.feature
    def test_models_declare_the_tables_exactly_while_they_are_on_the_host(self):
        # Turns red when one class stops asking the resolver.
        for model_class in (*MODELS, DeepseekV4ForCausalLMNextN):
            model = model_class.__new__(model_class)
            torch.nn.Module.__init__(model)
            with self.subTest(model=model_class.__name__):
                with get_context().override_server_args():
                    self.assertIsNone(
                        getattr(model, "host_resident_weight_patterns", "undeclared")
                    )
                    with mock.patch.dict(os.environ, host_table_env("per_rank")):
                        self.assertEqual(model.host_resident_weight_patterns, PATTERNS)

    @pytest.mark.feature
    def test_backup_of_experts_keeps_the_tables_off_the_device(self):
        # It builds no model that could declare them; red when a table is streamed.
        with tempfile.TemporaryDirectory() as folder:
            content = tiny_checkpoint(folder, tiny_config())
            manager = ExpertBackupManager.__new__(ExpertBackupManager)
            manager.load_format = "instanttensor"
            manager.model_config = model_config_of(folder)
            manager.idmn, manager.idmx = 0, 2
            with (
                mock.patch.dict(os.environ, host_table_env("per_rank")),
                get_context().override_server_args(),
                fake_gpu() as journal,
            ):
                failure = None
                try:
                    manager.backup_weights_from_disk()
                except ValueError as error:
                    failure = str(error)
            self.assertIsNone(failure)
            streamed = {name for call in journal.calls for name in call.files}
            self.assertFalse([file for file in streamed if "engram" in file])
            expert = "layers.0.ffn.experts.1.w2.weight"
            pointer = manager.weight_pointer_map[expert]
            start = pointer.weight_ptr - manager.continuous_buffer.data_ptr()
            stored = manager.continuous_buffer[start : start + pointer.byte_size]
            self.assertEqual(tensor_bytes(stored), content[expert])


if __name__ == "__main__":
    unittest.main()
