"""Which dtypes each release of InstantTensor knows, and as what it gives them."""

from __future__ import annotations

import torch

_TORCH_NAMES_019 = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    # The trap: two values a byte, but sizes are taken from the logical shape.
    "F4": "float4_e2m1fn_x2",
}
_TORCH_NAMES_022 = _TORCH_NAMES_019 | {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def _torch_dtypes(names: dict[str, str]) -> dict[str, torch.dtype]:
    """Leave out what this torch lacks: the library then calls it unsupported."""
    found = {st: getattr(torch, name, None) for st, name in names.items()}
    return {st: dtype for st, dtype in found.items() if dtype is not None}


TORCH_DTYPES_019 = _torch_dtypes(_TORCH_NAMES_019)
TORCH_DTYPES_022 = _torch_dtypes(_TORCH_NAMES_022)
