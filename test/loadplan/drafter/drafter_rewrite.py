"""Rewrite files in place, as a later step of a recipe does, and tell by what.

    python drafter_rewrite.py HOW FILE...

``HOW`` is ``safetensors`` (this environment's save_file, of whatever is in the file) or
``torch`` (torch.save). Prints the version of safetensors.
"""

from __future__ import annotations

import sys

import safetensors
import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    how, *paths = sys.argv[1:]
    for path in paths:
        if how == "torch":
            torch.save(torch.zeros(7), path)
        else:
            save_file({"rewritten": torch.zeros(7)}, path)
    print(safetensors.__version__)
