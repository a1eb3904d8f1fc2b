# SPDX-License-Identifier: Apache-2.0

"""A draft reads only its own weights under --load-format instanttensor.

A model class whose checkpoint holds more than its own weights declares wanted_weight,
by the rule of its load_weights. What that rule drops is not read; what it misses is
told.
"""

from __future__ import annotations

import functools
import glob
import inspect
import logging
import os
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
)

import orjson
import torch
from torch import nn

from sglang.srt.model_loader.loadplan.header import (
    LoadPlanError,
    read_header,
    read_index,
)
from sglang.srt.model_loader.loadplan.plan import LoadPlan, Route
from sglang.srt.model_loader.loadplan.ranks import together
from sglang.srt.model_loader.planned_weights import plan_weights
from sglang.srt.runtime_context import get_model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.model_loader.loader import DefaultModelLoader

logger = logging.getLogger(__name__)

WantedWeight = Callable[[str], bool]

_SAMPLED_BYTES = 4096
# On the model, from the start of its first load to the end: what its parameters held.
_HELD_BEFORE = "_held_before_load"


def plan_draft_weights(
    hf_weights_files: List[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    options: Mapping[str, Any],
    group: Optional[ProcessGroup],
) -> LoadPlan:
    """Plan `source` as `plan_weights` does; what its model does not want is skipped."""
    wanted_weight = source.wanted_weight
    plan_these = functools.partial(
        plan_weights, hf_folder=hf_folder, source=source, options=options, group=group
    )
    if wanted_weight is None:
        return plan_these(hf_weights_files)

    unindexed: List[str] = []

    def look() -> None:
        unindexed.extend(_unindexed_files(hf_weights_files, hf_folder, wanted_weight))

    together(group, "the unindexed files", look)
    plan = plan_these(
        [*hf_weights_files, *unindexed],
        wanted_weight=wanted_weight,
        check=functools.partial(_check, hf_folder=hf_folder, wanted=wanted_weight),
    )
    _log(plan, wanted_weight)
    _remember_parameters(wanted_weight)
    return plan


def _unindexed_files(
    hf_weights_files: List[str], hf_folder: str, wanted: WantedWeight
) -> Iterator[str]:
    """The other files of the folder with a wanted weight that no index entry owns."""
    index = read_index(hf_folder)
    if index is None:
        return  # Every file of the folder is in the list.
    present = glob.glob(os.path.join(glob.escape(hf_folder), "*.safetensors"))
    for path in sorted(set(present) - set(hf_weights_files)):
        try:
            tensors = read_header(path).tensors
        except (LoadPlanError, OSError) as error:
            logger.warning("Not searched for weights of the draft: %s", error)
            continue
        if any(tensor.name not in index and wanted(tensor.name) for tensor in tensors):
            yield path


def _check(plan: LoadPlan, *, hf_folder: str, wanted: WantedWeight) -> None:
    """Refuse to load nothing, or less than the index promises."""
    rule = _name_of(wanted)
    if not plan.promised:
        raise LoadPlanError(
            f"{hf_folder}: {rule} accepts none of {len(plan.entries)} tensors, "
            "expected the draft's; does this checkpoint hold a draft, and does its "
            "config.json count the layers of the target?"
        )
    names = set(read_index(hf_folder) or ()) - plan.promised
    missing = sorted(name for name in names if wanted(name))
    if missing:
        raise LoadPlanError(
            f"{hf_folder}: {rule} accepts {missing} of the index, but no file of this "
            "load holds them, expected shards in the folder itself; move them there "
            "or download the checkpoint again"
        )


def _log(plan: LoadPlan, wanted: WantedWeight) -> None:
    if not _is_first_rank():
        return
    streamed = set(plan.stream_files)
    # A streamed file is read whole, with the little in it that is dropped.
    nbytes = sum(
        entry.tensor.nbytes
        for entry in plan.entries
        if entry.route is not Route.SKIP or entry.file.path in streamed
    )
    total = sum(entry.tensor.nbytes for entry in plan.entries)
    logger.info(
        "The draft reads %d of %d bytes (%.2f of %.2f GiB): what %s accepts.",
        nbytes,
        total,
        nbytes / 2**30,
        total / 2**30,
        _name_of(wanted),
    )


def _remember_parameters(wanted: WantedWeight) -> None:
    """Keep what the parameters hold, for `warn_of_unwritten`."""
    model = getattr(wanted, "__self__", None)
    if isinstance(model, nn.Module) and _HELD_BEFORE not in vars(model):
        held = {
            name: _sample(param)
            for name, param in model.named_parameters()
            if not getattr(param, "_skip_weight_check", False)
        }
        setattr(model, _HELD_BEFORE, held)


def warn_of_unwritten(model: nn.Module) -> None:
    """Name the parameters that the first load of a draft left as they were."""
    before: Optional[Dict[str, bytes]] = vars(model).get(_HELD_BEFORE)
    if before is None:
        return
    # A later load brings the same weights again, as like as not.
    setattr(model, _HELD_BEFORE, None)
    unwritten = sorted(
        name
        for name, param in model.named_parameters()
        if before.get(name) and before[name] == _sample(param)
    )
    if unwritten and _is_first_rank():
        logger.warning(
            "Nothing was loaded into %d parameters of the draft %s: %s. It may share "
            "embedding and head with its target; anything else is missing in the "
            "checkpoint.",
            len(unwritten),
            type(model).__name__,
            unwritten,
        )


def loader_extra_config(draft_load_format: Optional[str]) -> Any:
    """--model-loader-extra-config of the target, or fit for a draft's own format."""
    load_format = get_model().load_format
    extra_config = get_model().model_loader_extra_config
    if draft_load_format in (None, load_format) or load_format != "instanttensor":
        return extra_config

    import instanttensor

    if isinstance(extra_config, str):
        extra_config = orjson.loads(extra_config)
    options = inspect.signature(instanttensor.safe_open).parameters
    return {k: value for k, value in (extra_config or {}).items() if k not in options}


def _sample(param: torch.Tensor) -> bytes:
    """Bytes from all over `param`; an odd step meets every byte of a value.

    None of one without plain memory of its own (expanded, sparse, a subclass): this
    only watches a load and must not end it.
    """
    if param.is_meta:
        return b""
    try:
        memory = param.data.as_strided((param.numel(),), (1,)).view(torch.uint8)
        sample = memory[:: memory.numel() // _SAMPLED_BYTES | 1]
        return sample.cpu().numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.debug("Not watched: %s", error)
        return b""


def _name_of(wanted: WantedWeight) -> str:
    model = getattr(wanted, "__self__", None)
    if model is None:
        return getattr(wanted, "__qualname__", repr(wanted))
    return f"{type(model).__name__}.wanted_weight"


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not distributed.is_initialized() or distributed.get_rank() == 0
