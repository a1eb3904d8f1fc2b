"""The patched TokenSpeed for one load, on a single rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import tqdm

from loadplan.core.header import LoadPlanError
from loadplan.core.plan import LoadPlan
from loadplan.standin.gpu import fake_gpu

_LAYOUTS = {"cpu": "shared", "gpu": "gpu"}


class _SilentTqdm(tqdm.tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})


class Tokenspeed:
    """A loader, and a model with the Engram tables of a checkpoint and nothing else."""

    name = "tokenspeed"

    def __init__(self, checkpoint: Path, *, engram_config: str | None):
        from tokenspeed.runtime.configs.load_config import LoadConfig
        from tokenspeed.runtime.model_loader import weight_utils
        from tokenspeed.runtime.model_loader.loader import DefaultModelLoader

        # One progress bar is enough: ours counts bytes on every route.
        weight_utils.tqdm = _SilentTqdm
        values = json.loads((checkpoint / "config.json").read_text())
        self._layout = _layout(engram_config)
        self._dtypes: dict[str, torch.dtype] = {}
        self._model = _tables_model(
            SimpleNamespace(**values.get("text_config", values)), self._layout
        )
        self._model_config = SimpleNamespace(model_path=str(checkpoint), revision=None)
        self._loader, self._default_loader = (
            DefaultModelLoader(LoadConfig(load_format=load_format))
            for load_format in ("instanttensor", "auto")
        )

    def tables(self) -> str:
        """Where the Engram tables live."""
        return "host memory" if self._layout == "shared" else "the GPU"

    def plan(self) -> LoadPlan:
        """The plan that the engine's glue makes, tables named as what they are.

        The model rejects its tables and then takes them itself, row by row.
        """
        from tokenspeed.runtime.model_loader.loader import DefaultModelLoader
        from tokenspeed.runtime.model_loader.loadplan.plan import Route
        from tokenspeed.runtime.model_loader.planned_weights import plan_weights

        folder, files, _ = self._loader._prepare_weights(
            self._model_config.model_path, None, fall_back_to_pt=False
        )
        plan = plan_weights(
            files,
            hf_folder=folder,
            source=DefaultModelLoader.Source(folder, None),
            wanted_weight=self._model.checkpoint_weight_name_filter,
            group=None,
        )
        route = Route.READ if self._layout == "gpu" else Route.HOST
        entries = []
        for entry in plan.entries:
            if entry.tensor.name in self._model.tables:
                self._dtypes[entry.tensor.name] = entry.tensor.torch_dtype
                entry = entry._replace(route=route, reason="Engram table")
            entries.append(entry)
        return dataclasses.replace(plan, entries=tuple(entries))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's own iterator; what its model loads itself comes last."""
        return self._weights(self._loader)

    def default_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of the default load format, the tables as the release loads them."""
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"):
            yield from self._weights(self._default_loader)

    def _weights(self, loader: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from loader._get_all_weights(self._model_config, self._model)
        self._model._load_missing_engram_tables(set())
        yield from self._model.tables.items()

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a table, which the engine has loaded already."""
        return name in self._model.tables

    def finish(self) -> dict[str, torch.Tensor]:
        """The tables by checkpoint name, in the checkpoint's dtypes."""
        return {
            name: table.data.view(self._dtypes[name])
            for name, table in self._model.tables.items()
        }


def _layout(engram_config: str | None) -> str:
    """The layout of the tables for a JSON object with a ``placement``."""
    config = json.loads(engram_config or "{}")
    placement = config.pop("placement", "gpu") if isinstance(config, dict) else None
    if placement not in _LAYOUTS or config:
        raise LoadPlanError(
            f"--engram-config is {engram_config!r}, expected for TokenSpeed only a "
            f"placement out of {sorted(_LAYOUTS)}; cpu is --engram-host-table"
        )
    return _LAYOUTS[placement]


def _tables_model(config: SimpleNamespace, layout: str) -> Any:
    """The real model class around its real tables, without all other layers."""
    from tokenspeed.runtime.distributed import Mapping
    from tokenspeed.runtime.models.deepseek_v41 import DeepseekV41ForCausalLM
    from tokenspeed.runtime.models.deepseek_v41_engram import RowShardedEngramEmbedding

    device = "cuda" if torch.cuda.is_available() and layout == "gpu" else "cpu"

    class Tables(DeepseekV41ForCausalLM):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.mapping = Mapping(rank=0, world_size=1)
            self.encoder_only = False
            self.embeddings = torch.nn.ModuleDict()
            self.tables: dict[str, torch.Tensor] = {}
            layers = zip(
                getattr(config, "engram_layer_ids", ()),
                getattr(config, "engram_num_embeddings", ()),
                strict=True,
            )
            for layer_id, rows in layers:
                embedding = RowShardedEngramEmbedding(
                    rows,
                    config.engram_head_dim,
                    self.mapping,
                    device,
                    layout != "gpu",
                    layout,
                    layer_id,
                )
                self.embeddings[str(layer_id)] = embedding
                for part in ("weight", "scale"):
                    name = f"layers.{layer_id}.engram.embed.{part}"
                    self.tables[name] = getattr(embedding, part)

        def _checkpoint_targets(self) -> dict[str, tuple[str, None]]:
            return {
                name: (f"embeddings.{name.split('.')[1]}.{name.split('.')[-1]}", None)
                for name in self.tables
            }

    return Tables()


@contextlib.contextmanager
def open_engine(checkpoint: Path, *, engram_config: str | None) -> Iterator[Tokenspeed]:
    """TokenSpeed from ``sys.path``, on the GPU or on the stub of one."""
    # It serves what TokenSpeed's imports ask for and is not installed.
    from loadplan.standin import tokenspeed  # noqa: F401

    real = torch.cuda.is_available()
    with contextlib.nullcontext() if real else fake_gpu(engine="tokenspeed"):
        yield Tokenspeed(checkpoint, engram_config=engram_config)
