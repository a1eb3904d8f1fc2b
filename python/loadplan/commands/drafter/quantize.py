"""``loadplan drafter quantize``: a head in four bits."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, numbers
from loadplan.commands.drafter.shared import (
    MOST,
    add_head_name,
    add_held_out_rows,
    rows_bar,
    say,
    with_libraries,
)

if TYPE_CHECKING:
    pass


def add(steps: Any) -> None:
    command = common.add_command(
        steps,
        "quantize",
        summary="the head in four bits, by rounding and by GPTQ",
        text="Quantise the checkpoint's unquantised head, from the backup beside its "
        "shard, in the\ncheckpoint's own int4 format or in NVFP4. Both methods are "
        "measured on held-out rows;\na head that is broken or worse than rounding is "
        "an error, and nothing is written.",
        example="loadplan drafter quantize MODEL --capture rows --out head.st",
    )
    command.add_argument("model", type=Path, help="a checkpoint's folder")
    command.add_argument("--capture", type=Path, required=True, metavar="DIR")
    command.add_argument("--out", type=Path, required=True, help="a new file")
    command.add_argument("--format", choices=("int4", "nvfp4"), default="int4")
    command.add_argument(
        "--method",
        choices=("gptq", "rtn"),
        default="gptq",
        help="which of both is written (default: gptq)",
    )
    command.add_argument(
        "--group-size",
        type=numbers.whole(1, MOST),
        metavar="N",
        help="elements that share a scale (default: the checkpoint's own, else 128)",
    )
    zero = command.add_mutually_exclusive_group()
    zero.add_argument(
        "--symmetric",
        dest="symmetric",
        action="store_true",
        default=None,
        help="no zero points (default: as the checkpoint has it)",
    )
    zero.add_argument(
        "--asymmetric",
        dest="symmetric",
        action="store_false",
        help="with zero points",
    )
    command.add_argument(
        "--ids",
        type=Path,
        metavar="FILE",
        help="make a draft's head of these rows, as 'vocab' chose them",
    )
    add_held_out_rows(command)
    add_head_name(command)
    common.add_json(command)
    command.set_defaults(run=with_libraries(_run))


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import quantize

    options = quantize.Options(
        source=arguments.model,
        capture=arguments.capture,
        kind=arguments.format,
        method=arguments.method,
        group_size=arguments.group_size,
        symmetric=arguments.symmetric,
        ids=arguments.ids,
        held_out_rows=arguments.held_out_rows,
        head_name=arguments.head_name,
    )
    with rows_bar() as start:
        about = quantize.quantize(options, arguments.out, start=start)
    lines = [
        f"{arguments.out}: {about['head']} {about['rows']} x {about['width']}, "
        f"{about['kind']} in groups of {about['group_size']}, {about['method']}, from "
        f"{about['origin']}"
    ]
    for name, found in about["figures"].items():
        lines.append(
            f"{name:4}  KL {found['kl']:.6f} nats  reconstruction error "
            f"{found['error']:.4f} of the logits, {found['weight_error']:.4f} of the "
            f"weight  same top token {found['top1']:.2%}  ({found['rows']} held-out "
            "rows)"
        )
    say(arguments, about, "\n".join(lines))
    return 0
