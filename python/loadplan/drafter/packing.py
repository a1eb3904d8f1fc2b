"""Scales, rounding and packing of a head, all of it compressed-tensors' own.

int4 (``pack-quantized``): ``weight_packed`` I32 ``[rows, width / 8]``, the element of a
row with the lowest index in the lowest bits, as value + 8; ``weight_scale``
``[rows, groups]`` in the head's dtype; ``weight_shape`` I64 ``[2]``; with a zero point
also ``weight_zero_point`` I32 ``[rows / 8, groups]``, packed along the rows.

NVFP4 (``nvfp4-pack-quantized``): ``weight_packed`` U8 ``[rows, width / 2]``, E2M1, the
even element in the low half; ``weight_scale`` F8_E4M3 ``[rows, width / 16]``;
``weight_global_scale`` F32 ``[1]``. A value is E2M1 * scale / global scale.
"""

from __future__ import annotations

import dataclasses

import torch

from loadplan.drafter.scheme import Scheme

# Rows that are worked on at once: bounds the memory for a large vocabulary.
_ROWS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """What rounds a head: all FP32, ``zero_point`` int8, the first two per group."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None


def find_scales(weight: torch.Tensor, scheme: Scheme) -> Scales:
    """The scales for ``weight`` ``[rows, width]``, from each group's extremes.

    They are those that the file will hold, rounded to its dtype.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = scheme.weights()
    if scheme.kind == "nvfp4":
        weights |= {"scale_dtype": torch.float8_e4m3fn}
    args = QuantizationArgs(**weights)
    groups = weight.reshape(weight.shape[0], -1, scheme.group_size)
    low, high = groups.amin(-1).float(), groups.amax(-1).float()
    global_scale = None
    if scheme.kind == "nvfp4":
        global_scale = generate_gparam(low.min(), high.max())
    scale, zero_point = calculate_qparams(low, high, args, global_scale)
    if scheme.kind == "int4":
        scale = scale.to(weight.dtype)
    return Scales(scale.float(), zero_point.to(torch.int8), global_scale)


def pack(
    weight: torch.Tensor, scales: Scales, scheme: Scheme, *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The head's tensors as the file has them; ``dtype`` is the unquantised head's.

    ``weight`` is rounded to the nearest, so that a weight that is on the grid already,
    as GPTQ leaves it, is packed as it is.
    """
    parts: list[dict[str, torch.Tensor]] = []
    compressor, arguments = _compressor(scheme)
    for begin in range(0, weight.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        state = {
            "weight": weight[rows].float(),
            "weight_scale": scales.scale[rows],
            "weight_zero_point": scales.zero_point[rows],
        }
        if scales.global_scale is not None:
            state["weight_global_scale"] = scales.global_scale
        parts.append(compressor.compress(state, arguments))
    packed = {
        name: torch.cat([part[name] for part in parts]).contiguous()
        for name in ("weight_packed", "weight_scale", "weight_zero_point")
        if name in parts[0]
    }
    if scheme.kind == "int4":
        packed["weight_scale"] = packed["weight_scale"].to(dtype)
        packed["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
    else:
        packed["weight_global_scale"] = parts[0]["weight_global_scale"]
    return packed


def unpack(packed: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The FP32 weight ``[rows, width]`` that the head's tensors stand for."""
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    if scheme.kind == "int4":
        compressor, arguments = _compressor(scheme)
        state = packed | {"weight_scale": packed["weight_scale"].float()}
        return compressor.decompress(state, arguments)["weight"].detach().float()
    # Their own decompress goes through BF16.
    rows, half = packed["weight_packed"].shape
    values = unpack_fp4_from_uint8(
        packed["weight_packed"], rows, half * 2, dtype=torch.float32
    )
    return dequantize(
        x_q=values,
        scale=packed["weight_scale"].float(),
        global_scale=packed["weight_global_scale"],
        dtype=torch.float32,
    )


def scales_of(packed: dict[str, torch.Tensor], scheme: Scheme) -> Scales:
    """The scales in a head's tensors, in the form that rounds with them."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    scale = packed["weight_scale"].float()
    zero_point = torch.zeros(scale.shape, dtype=torch.int8)
    if "weight_zero_point" in packed:
        zero_point = unpack_from_int32(
            packed["weight_zero_point"], 4, scale.shape, packed_dim=0
        )
    return Scales(scale, zero_point, packed.get("weight_global_scale"))


def geometry(
    scheme: Scheme, *, rows: int, width: int
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """The dtypes that each tensor of a packed head may have, and its shape."""
    groups = width // scheme.group_size
    if scheme.kind == "nvfp4":
        return {
            "weight_packed": (("U8",), (rows, width // 2)),
            "weight_scale": (("F8_E4M3",), (rows, groups)),
            "weight_global_scale": (("F32",), (1,)),
        }
    found: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        "weight_packed": (("I32",), (rows, -(-width // 8))),
        "weight_scale": (("BF16", "F16", "F32"), (rows, groups)),
        "weight_shape": (("I64", "I32"), (2,)),
    }
    if not scheme.symmetric:
        found["weight_zero_point"] = (("I32",), (-(-rows // 8), groups))
    return found


def same(scheme: Scheme, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two ``weight_packed`` stand for the same numbers.

    NVFP4 has two zeros, and rounding one again may give the other.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if scheme.kind == "nvfp4":
        one, other = _positive_zeros(one), _positive_zeros(other)
    return torch.equal(one, other)


def _positive_zeros(packed: torch.Tensor) -> torch.Tensor:
    low, high = packed & 0xF, packed & 0xF0
    low = low.masked_fill(low == 0x8, 0)
    return low | high.masked_fill(high == 0x80, 0)


def _compressor(scheme: Scheme):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(**scheme.weights())
    arguments = QuantizationScheme(targets=["Linear"], weights=weights)
    return BaseCompressor.get_value_from_registry(scheme.format), arguments
