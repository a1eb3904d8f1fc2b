"""The bytes of a packed head, read by a decoder that shares nothing with its writer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loadplan.drafter import packing
from loadplan.drafter.scheme import Scheme

SCHEMES = [
    Scheme("int4", 32, True),
    Scheme("int4", 16, False),
    Scheme("nvfp4", 16, True),
]


def decode(packed: dict[str, torch.Tensor], scheme: Scheme) -> np.ndarray:
    """The FP32 weight, from the formats' descriptions, one number after the other."""
    if scheme.kind == "nvfp4":
        return _decode_nvfp4(packed)
    words = packed["weight_packed"].numpy().astype(np.uint32)
    rows, width = packed["weight_shape"].tolist()
    scale = packed["weight_scale"].float().numpy()
    weight = np.zeros((rows, width), np.float32)
    for row in range(rows):
        for column in range(width):
            number = int(words[row, column // 8]) >> (4 * (column % 8)) & 0xF
            group = column // scheme.group_size
            zero = 8
            if not scheme.symmetric:
                word = int(packed["weight_zero_point"][row // 8, group]) & 0xFFFFFFFF
                zero = word >> (4 * (row % 8)) & 0xF
            weight[row, column] = np.float32(number - zero) * scale[row, group]
    return weight


def _decode_nvfp4(packed: dict[str, torch.Tensor]) -> np.ndarray:
    codes = packed["weight_packed"].numpy()
    # E2M1: two bits of exponent with bias 1, one of mantissa, subnormal below 1.
    magnitudes = [0.0, 0.5] + [
        2.0 ** (e - 1) * (1 + m / 2) for e in (1, 2, 3) for m in (0, 1)
    ]
    values = np.array(magnitudes + [-m for m in magnitudes], np.float32)
    weight = np.stack([values[codes & 0xF], values[codes >> 4]], axis=-1)
    weight = weight.reshape(codes.shape[0], -1)
    scale = np.vectorize(_e4m3)(packed["weight_scale"].view(torch.uint8).numpy())
    scale = scale.astype(np.float32) / packed["weight_global_scale"].numpy()
    return weight * np.repeat(scale, 16, axis=1)


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def weight(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.kind}-{s.symmetric}")
@pytest.mark.parametrize("rows", [8, 13])
def test_packed_bytes_decode_to_the_same_bytes(scheme: Scheme, rows: int) -> None:
    """Red when compressed-tensors packs in another order, sign or scale."""
    head = weight(rows, 64)
    scales = packing.find_scales(head, scheme)
    packed = packing.pack(head, scales, scheme, dtype=head.dtype)
    ours = decode(packed, scheme)
    theirs = packing.unpack(packed, scheme).numpy()
    assert (ours + 0.0).tobytes() == (theirs + 0.0).tobytes()
    assert np.linalg.norm(ours - head.float().numpy()) < 0.15 * head.float().norm()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.kind}-{s.symmetric}")
def test_a_decoder_notices_one_flipped_bit(scheme: Scheme) -> None:
    """Red when the decoder above stops looking at every byte."""
    head = weight(8, 64)
    scales = packing.find_scales(head, scheme)
    packed = packing.pack(head, scales, scheme, dtype=head.dtype)
    before = decode(packed, scheme)
    packed["weight_packed"].view(torch.uint8)[5, 11] ^= 1
    assert (decode(packed, scheme) != before).sum() == 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.kind}-{s.symmetric}")
def test_geometry_is_what_is_packed(scheme: Scheme) -> None:
    """Red when a tensor gets another dtype or shape than verify expects."""
    from loadplan.drafter import quantize

    head = weight(13, 64)
    scales = packing.find_scales(head, scheme)
    packed = packing.pack(head, scales, scheme, dtype=head.dtype)
    expected = packing.geometry(scheme, rows=13, width=64)
    assert quantize.problem_of(packed, expected) == ""


def test_parts_of_a_large_head_are_packed_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a cut between parts changes a byte, for zero points above all."""
    scheme = Scheme("int4", 16, False)
    head = weight(29, 64)
    scales = packing.find_scales(head, scheme)
    whole = packing.pack(head, scales, scheme, dtype=head.dtype)
    monkeypatch.setattr(packing, "_ROWS", 8)
    parts = packing.pack(head, scales, scheme, dtype=head.dtype)
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), parts[name].view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.kind}-{s.symmetric}")
def test_what_rounds_is_what_the_file_holds(scheme: Scheme) -> None:
    """Red when GPTQ works with finer scales than an engine will read."""
    head = weight(16, 64)
    scales = packing.find_scales(head, scheme)
    packed = packing.pack(head, scales, scheme, dtype=head.dtype)
    held = packing.scales_of(packed, scheme)
    assert torch.equal(held.scale, scales.scale)
    assert torch.equal(held.zero_point, scales.zero_point)
