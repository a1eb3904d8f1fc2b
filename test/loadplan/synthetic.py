"""Small synthetic checkpoints for tests."""

from __future__ import annotations

from pathlib import Path

from loadplan.core.header import TensorHeader
from loadplan.synth.layout import layout
from loadplan.synth.options import SynthOptions

MIB = 1 << 20
SMALL = SynthOptions(size=8 * MIB)
PUBLISHED_SIZE = 475 * 10**9


def tensors_of(options: SynthOptions) -> dict[str, TensorHeader]:
    shards = layout(options)
    return {tensor.name: tensor for shard in shards for tensor in shard.tensors}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
