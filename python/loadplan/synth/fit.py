"""The model whose tensors come nearest to a size: its scale, experts and tables."""

from __future__ import annotations

import math

from loadplan.core.header import LoadPlanError
from loadplan.synth.model import (
    EXPERT_STEP,
    STAGES,
    EngramTable,
    SynthModel,
    tensor_bytes,
)
from loadplan.synth.scale import ENGRAM_DIM, ENGRAM_ROW_BYTES, SCALES, Scale
from loadplan.synth.tensors import dense_tensors

_MIN_EXPERTS = 8
# A wider scale is taken only once it can have this many experts per layer: below,
# one expert more or less is too large a step towards the size that was asked for.
_FULL_EXPERTS = 32
_SIZE_TOLERANCE = 0.15


def fit_model(size: int, *, engram_fraction: float, draft: bool) -> SynthModel:
    """Return the model whose tensors come to about ``size`` bytes.

    Raises:
        LoadPlanError: no model of this shape comes within 15 % of ``size``.
    """
    rows = int(size * engram_fraction) // (2 * ENGRAM_ROW_BYTES)
    for scale in reversed(SCALES):
        vocab, tables = _fit_tables(scale, rows=rows)
        table_bytes = sum(table.rows * ENGRAM_ROW_BYTES for table in tables)
        experts = _fit_experts(scale, size=size - table_bytes, draft=draft)
        if experts >= _FULL_EXPERTS:
            break
    model = SynthModel(
        scale=scale,
        experts=max(experts, _MIN_EXPERTS),
        draft=draft,
        engram_vocab=vocab,
        tables=tables,
    )
    total = table_bytes + sum(map(tensor_bytes, dense_tensors(model)))
    if abs(total - size) > _SIZE_TOLERANCE * size:
        raise LoadPlanError(
            f"size: got {size} bytes with engram_fraction {engram_fraction!r}, for "
            f"which the nearest model has {total} bytes, expected a difference of at "
            f"most {_SIZE_TOLERANCE:.0%}; ask for a larger size, another fraction or "
            "no draft"
        )
    return model


def draw_primes(start: int, count: int) -> list[int]:
    """Return the ``count`` smallest primes that are at least ``start``, ascending."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        divisors = range(2, math.isqrt(candidate) + 1)
        if all(candidate % divisor for divisor in divisors):
            primes.append(candidate)
        candidate += 1
    return primes


def _fit_tables(
    scale: Scale, *, rows: int
) -> tuple[int, tuple[EngramTable, EngramTable]]:
    """Tables of about ``rows`` rows each, and the hash vocabulary they follow from."""
    columns = scale.hash_columns
    per_column = rows / columns
    # Primes lie about log(p) apart, and the two layers draw 2 * columns of them.
    vocab = max(2, int(per_column - columns * math.log(max(per_column, 2))))
    # The engine draws a layer's columns, then the next layer's, from one sequence.
    primes = draw_primes(vocab, 2 * columns)
    layer_ids = (1, 14) if scale.layers > 14 else (1, 2)
    return vocab, (
        _table(layer_ids[0], primes[:columns]),
        _table(layer_ids[1], primes[columns:]),
    )


def _table(layer_id: int, primes: list[int]) -> EngramTable:
    bounds = [0]
    for prime in primes:
        bounds.append(bounds[-1] + prime)
    return EngramTable(
        layer_id=layer_id, rows=bounds[-1], dim=ENGRAM_DIM, column_bounds=tuple(bounds)
    )


def _fit_experts(scale: Scale, *, size: int, draft: bool) -> int:
    """Routed experts per layer that bring the dense tensors near ``size`` bytes."""
    _, tables = _fit_tables(scale, rows=0)
    bare = SynthModel(
        scale=scale, experts=0, draft=draft, engram_vocab=0, tables=tables
    )
    fixed = sum(map(tensor_bytes, dense_tensors(bare)))
    blocks = scale.layers + (STAGES / 3 if draft else 0)
    wanted = (size - fixed) / (blocks * (scale.expert_bytes + 2 * scale.hidden))
    return EXPERT_STEP * round(wanted / EXPERT_STEP)
