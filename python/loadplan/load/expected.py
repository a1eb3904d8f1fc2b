"""What must have arrived: by a synthetic checkpoint's seed, or by its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from loadplan.core.header import TensorHeader
from loadplan.core.plan import LoadPlan, PlannedTensor, Route
from loadplan.load.digests import PIECE, Digests
from loadplan.synth.content import content, torch_dtype
from loadplan.synth.layout import layout
from loadplan.synth.options import read_options


def wanted_entries(plan: LoadPlan) -> list[PlannedTensor]:
    """What the model gets. The plan's routes are the engine's copy of ours."""
    return [entry for entry in plan.entries if entry.route.value != Route.SKIP.value]


def expected_digests(
    checkpoint: Path, plan: LoadPlan, done: Callable[[int], None]
) -> tuple[dict[str, str], str]:
    """What each tensor's digest must be, and where that knowledge comes from.

    ``done`` is called with the bytes of each tensor that was hashed.
    """
    sizes = {entry.tensor.name: entry.tensor.nbytes for entry in plan.entries}
    options = read_options(checkpoint)
    reference = "official safetensors"
    with Digests() as digests:
        if options is None:
            _add_official(digests, plan)
        else:
            reference = f"the seed {options.seed} of the synthetic checkpoint"
            for shard in layout(options):
                for spec in shard.tensors:
                    dtype = str(torch_dtype(spec.dtype))
                    pieces = _synth_pieces(options.seed, spec)
                    digests.add_pieces(spec.name, dtype, spec.shape, pieces)
        return digests.result(lambda name: done(sizes.get(name, 0))), reference


def _synth_pieces(seed: int, spec: TensorHeader) -> Iterator[Any]:
    for begin in range(0, spec.nbytes, PIECE):
        stop = min(begin + PIECE, spec.nbytes)
        yield content(seed, spec.name, begin, stop)


def _add_official(digests: Digests, plan: LoadPlan) -> None:
    paths: dict[str, list[str]] = {}
    for entry in wanted_entries(plan):
        paths.setdefault(entry.file.path, []).append(entry.tensor.name)
    for path, names in paths.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                digests.add(name, file.get_tensor(name))
