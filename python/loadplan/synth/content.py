"""The bytes of a synthetic checkpoint's tensors: they follow from seed and name."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

# Official safetensors lays tensors out by dtype in this order, then by name.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}

_PHILOX_BYTES = 32  # one step of the counter gives four 64-bit words


def content(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return bytes ``[start, stop)`` of tensor ``name`` as a new 1-D ``uint8`` array.

    Pure, and no dearer in the middle of a tensor than at its start: the generator
    counts, keyed by seed and name.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    first = start // _PHILOX_BYTES
    steps = -(-stop // _PHILOX_BYTES) - first
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=first)
    words = generator.random_raw(4 * steps).astype("<u8", copy=False)
    skip = start - first * _PHILOX_BYTES
    return words.view(np.uint8)[skip : skip + stop - start]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a tensor whose header says ``name``."""
    return DTYPES[name]
