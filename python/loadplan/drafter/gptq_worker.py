"""Run llmcompressor's GPTQ on the head in a folder, in llmcompressor's environment.

    python -I gptq_worker.py FOLDER

``FOLDER/in.safetensors`` has ``weight`` ``[rows, width]``, ``hessian``
``[width, width]``, ``scale`` and ``zero_point`` per group, all FP32 but the last, int8,
and for NVFP4 ``global_scale`` FP32 ``[1]``; ``FOLDER/job.json`` the arguments of
compressed-tensors' QuantizationArgs as ``weights``. ``FOLDER/out.safetensors`` gets
``weight``, FP32, on the grid, and ``fallback``, U8, one for each part of the rows.
Each line of stdout is the number of rows just done. This file imports nothing of ours:
that environment has other versions of everything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Rows do not depend on each other; parts bound the memory and give progress.
ROWS = 4096


def main(folder: Path) -> None:
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from safetensors.torch import load_file, save_file

    job = json.loads((folder / "job.json").read_text())
    given = load_file(folder / "in.safetensors")
    arguments = QuantizationArgs(**job["weights"])
    weight, hessian = given["weight"], given["hessian"]
    parts, fallback = [], []
    for begin in range(0, weight.shape[0], ROWS):
        rows = slice(begin, begin + ROWS)
        # It writes to what it is given.
        quantised, _, fell_back = quantize_weight(
            weights=weight[None, rows].clone(),
            hessians=hessian[None].clone(),
            scale=given["scale"][None, rows].clone(),
            zero_point=given["zero_point"][None, rows].clone(),
            global_scale=given.get("global_scale"),
            quant_args=arguments,
        )
        parts.append(quantised[0])
        fallback.append(fell_back.any().to(torch.uint8))
        print(parts[-1].shape[0], flush=True)
    out = {"weight": torch.cat(parts), "fallback": torch.stack(fallback)}
    save_file(out, folder / "out.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
