# SPDX-License-Identifier: Apache-2.0

"""Which weights of a checkpoint belong to a DeepSeek draft.

load_weights drops by the functions here and wanted_weight answers from them, so that
the loader reads what load_weights keeps and nothing else.
"""

from typing import Optional

from transformers import PretrainedConfig

from sglang.srt.utils import is_npu

_is_npu = is_npu()


def nextn_layer_id(config: PretrainedConfig) -> int:
    """The layer under which a checkpoint holds its NextN draft."""
    if not hasattr(config, "num_nextn_predict_layers"):
        raise ValueError("num_nextn_predict_layers is not in the config")
    assert config.num_nextn_predict_layers == 1, "Only 1 nextn layer is supported"
    # A draft that was exported by itself holds one layer, its own.
    return 0 if config.num_hidden_layers == 1 else config.num_hidden_layers


def is_nextn_weight(name: str, layer_prefix: str) -> bool:
    """Whether a NextN draft loads `name` itself; it shares head and embedding."""
    shared = "shared_head.head" in name or "embed_tokens" in name
    return name.startswith(layer_prefix) and not shared


class DeepseekV3NextNWeights:
    """The weights of a draft that loads by DeepseekV2WeightLoaderMixin."""

    def wanted_weight(self, name: str) -> bool:
        nextn_conf = self._initialize_nextn_conf(is_nextn=True)
        return is_nextn_weight(name, nextn_conf.nextn_layer_prefix)


class DeepseekV4NextNWeights:
    """The weights of a draft that loads by DeepseekV4ForCausalLM."""

    def wanted_weight(self, name: str) -> bool:
        name = self.remap_weight_name_to_dpsk_hf_format(
            name, is_nextn=True, num_hidden_layers=self.config.num_hidden_layers
        )
        layer_prefix = f"model.layers.{nextn_layer_id(self.config)}"
        return is_nextn_weight(name, layer_prefix)


class DeepseekV4DSparkWeights:
    """The weights of a DSpark draft, by the names that its platform's remap knows."""

    def draft_weight_name(self, name: str) -> Optional[str]:
        if _is_npu:
            return self._remap_dspark_weight_name_npu(name)
        return self._remap_dspark_weight_name(name)

    def wanted_weight(self, name: str) -> bool:
        return self.draft_weight_name(name) is not None
