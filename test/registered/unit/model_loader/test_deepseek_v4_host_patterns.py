"""DeepSeek-V4 names its Engram tables to the loader while they are on the host."""

import os
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang.srt.elastic_ep import expert_backup_manager
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

MODELS = (
    DeepseekV4ForCausalLM,
    DeepseekV4ForCausalLMDSpark,
    DeepseekV4ForCausalLMNextN,
)
ON_HOST = {"SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1"}
PATTERNS = (".engram.embed.",)


def declared(model_class):
    """What the class declares, asked without building the model."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    return getattr(model, "host_resident_weight_patterns", None)


def source_of_backup():
    """What the backup of experts asks the loader for."""
    manager = object.__new__(expert_backup_manager.ExpertBackupManager)
    manager.load_format = "instanttensor"
    manager.model_config = SimpleNamespace(
        model_path="any", revision=None, dtype=torch.bfloat16
    )

    class Asked(Exception):
        pass

    with mock.patch.object(expert_backup_manager, "get_model_loader") as made:
        read = made.return_value._get_weights_iterator
        read.side_effect = Asked
        try:
            manager.backup_weights_from_disk()
        except Asked:
            pass
    return read.call_args.args[0]


class TestDeepseekV4HostPatterns(CustomTestCase):
    def setUp(self):
        super().setUp()
        context = get_context().override_server_args()
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)

    @pytest.mark.feature
    def test_target_and_drafts_declare_tables_that_are_on_the_host(self):
        # Turns red when one class stops asking where the tables are.
        with mock.patch.dict(os.environ, ON_HOST):
            found = {model.__name__: declared(model) for model in MODELS}
        self.assertEqual(found, {model.__name__: PATTERNS for model in MODELS})

    @pytest.mark.feature
    def test_argument_counts_like_the_variables(self):
        # Turns red when the tables move and the loader is not told.
        try:
            context = get_context().override_server_args(
                engram_config='{"placement": "cpu"}'
            )
            with context:
                found = [declared(model) for model in MODELS]
        except (AttributeError, TypeError, ValueError) as error:
            self.fail(str(error))
        self.assertEqual(found, [PATTERNS] * len(MODELS))

    @pytest.mark.guard(mutation="the patterns are declared wherever the tables are")
    def test_tables_on_the_device_are_not_declared(self):
        # Turns red when a table in device memory takes the slow way.
        self.assertEqual([declared(model) for model in MODELS], [None] * len(MODELS))
        source = source_of_backup()
        self.assertIsNone(getattr(source, "host_resident_weight_patterns", None))

    @pytest.mark.feature
    def test_backup_of_experts_declares_them_too(self):
        # It builds no model that could; turns red when it streams a table.
        with mock.patch.dict(os.environ, ON_HOST):
            source = source_of_backup()
        found = getattr(source, "host_resident_weight_patterns", None)
        self.assertEqual(found, PATTERNS)


if __name__ == "__main__":
    unittest.main()
