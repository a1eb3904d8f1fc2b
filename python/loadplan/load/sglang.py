"""The patched SGLang for one load, on a single rank."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import tqdm

from loadplan.core.plan import LoadPlan
from loadplan.standin.gpu import fake_gpu
from loadplan.standin.placeholders import kernel_placeholders


class _SilentTqdm(tqdm.tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})


class Sglang:
    """The patched SGLang for one load, on a single rank."""

    name = "sglang"

    def __init__(self, checkpoint: Path, *, engram_config: str | None):
        from sglang.srt.configs.deepseek_v41 import DeepseekV41Config
        from sglang.srt.configs.load_config import LoadConfig, LoadFormat
        from sglang.srt.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
        )
        from sglang.srt.model_loader import weight_utils
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.runtime_context import SpawnRanks, get_context, publish
        from sglang.srt.server_args import ServerArgs

        device = "cuda" if torch.cuda.is_available() else "cpu"
        arguments = ServerArgs(
            model_path="dummy",
            device=device,
            load_format="instanttensor",
            engram_config=engram_config,
        )
        publish(arguments, role="loadplan", ranks=SpawnRanks(world_rank=0))
        get_context().override("loadplan", model_path=str(checkpoint))
        if not torch.distributed.is_initialized():
            # A single rank exchanges nothing that would need NCCL.
            self._rendezvous = tempfile.TemporaryDirectory()
            init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"file://{self._rendezvous.name}/rendezvous",
                backend="gloo",
            )
            initialize_model_parallel(backend="gloo")

        # One progress bar is enough: ours counts bytes on every route.
        weight_utils.tqdm = _SilentTqdm
        values = json.loads((checkpoint / "config.json").read_text())
        with torch.device(device):
            self._model = _tables_model(DeepseekV41Config(**values))
        self._model_config = SimpleNamespace(
            model_path=str(checkpoint),
            revision=None,
            hf_config=SimpleNamespace(architectures=values.get("architectures", [""])),
        )
        self._loader, self._default_loader = (
            DefaultModelLoader(LoadConfig(load_format=load_format))
            for load_format in (LoadFormat.INSTANTTENSOR, LoadFormat.AUTO)
        )

    def tables(self) -> str:
        """Where the Engram tables live, as the server logs it."""
        from sglang.srt.layers.engram_config import resolve_engram_tables

        return str(resolve_engram_tables())

    def plan(self) -> LoadPlan:
        """The plan that the engine's glue makes, without running it."""
        from sglang.srt.model_loader.planned_weights import plan_weights

        (resolved,) = self._loader.resolve_model_weights(
            self._model_config, self._model
        )
        return plan_weights(
            list(resolved.weight_files),
            hf_folder=resolved.hf_folder,
            source=resolved.source,
            options={},
            group=None,
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._loader._get_all_weights(self._model_config, self._model)

    def default_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._default_loader._get_all_weights(self._model_config, self._model)

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Load ``tensor`` into a table, if it is one; the engine's loader does it."""
        parameter = self._model.tables.get(name)
        if parameter is None:
            return False
        parameter.weight_loader(parameter, tensor)
        return True

    def finish(self) -> dict[str, torch.Tensor]:
        """End the load as the engine does; the tables by checkpoint name."""
        for layer_id, embedding in self._model.embeddings.items():
            embedding.finish_load(label=f"layer {layer_id}")
        return {name: table.data for name, table in self._model.tables.items()}


def _tables_model(config: Any) -> torch.nn.Module:
    """A module that holds just the Engram tables of ``config``.

    The pattern property is the real model class's own, so that what is declared here is
    what serving declares.
    """
    from sglang.srt.layers.engram import EngramEmbedding, EngramLayout
    from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM

    class Tables(torch.nn.Module):
        host_resident_weight_patterns = (
            DeepseekV4ForCausalLM.host_resident_weight_patterns
        )

        def __init__(self) -> None:
            super().__init__()
            layout = EngramLayout.from_config(config)
            self.embeddings: dict[int, EngramEmbedding] = {}
            self.tables: dict[str, torch.nn.Parameter] = {}
            for index, layer_id in enumerate(layout.layer_ids if layout else ()):
                embedding = EngramEmbedding(
                    layout.num_embeddings[index],
                    layout.head_dim,
                    layer_id,
                    column_bounds=layout.column_bounds(index),
                )
                self.embeddings[layer_id] = embedding
                for part in ("weight", "scale"):
                    name = f"layers.{layer_id}.engram.embed.{part}"
                    self.tables[name] = getattr(embedding, part)

    return Tables()


@contextlib.contextmanager
def open_engine(checkpoint: Path, *, engram_config: str | None) -> Iterator[Sglang]:
    """SGLang from ``sys.path``, on the GPU or on the stub of one."""
    with kernel_placeholders() if torch.cuda.is_available() else fake_gpu():
        yield Sglang(checkpoint, engram_config=engram_config)
