"""The bytes of a tensor: the same everywhere, different from all others."""

from __future__ import annotations

import numpy as np

from loadplan.synth.content import content


def test_any_range_equals_the_same_range_of_the_whole() -> None:
    """Red if content depends on where a read starts or how long it is."""
    whole = content(3, "layers.1.engram.embed.weight", 0, 5000)
    for start, stop in ((0, 1), (1, 2), (31, 33), (32, 64), (17, 4999), (77, 77)):
        part = content(3, "layers.1.engram.embed.weight", start, stop)
        assert part.dtype == np.uint8 and part.shape == (stop - start,)
        assert part.tobytes() == whole[start:stop].tobytes()


def test_content_is_the_same_on_every_machine_and_release() -> None:
    """Red if generator, key or byte order changes: old checkpoints stop verifying."""
    assert content(0, "embed.weight", 0, 16).tobytes().hex() == (
        "c089117c73fecf243db2d723cca0cce8"
    )
    assert content(7, "embed.weight", 10**11 + 5, 10**11 + 21).tobytes().hex() == (
        "39fbde6692ddee9f77c17e548eac7509"
    )


def test_content_differs_by_name_seed_and_position() -> None:
    """Red if two tensors, seeds or blocks share bytes, which would hide a mix-up."""
    blocks = {
        content(seed, name, start, start + 32).tobytes()
        for seed in (0, 1)
        for name in ("a", "b", "1:a")
        for start in range(0, 3200, 32)
    }
    assert len(blocks) == 2 * 3 * 100
