"""``loadplan drafter``: a cheaper draft from a checkpoint that stays untouched."""

from __future__ import annotations

from typing import Any

from loadplan.commands import common
from loadplan.commands.drafter import capture, quantize, variant, verify, vocab

_TEXT = """\
Build a fast variant of a checkpoint: its output head in four bits, calibrated by GPTQ,
and a draft head over fewer tokens. The checkpoint itself is only read.

The steps, in their order: capture, vocab, quantize (the model's head, and once more
with --ids the draft's), variant, verify."""

_EXAMPLE = """\
loadplan drafter capture MODEL --text book.txt --rows 65536 --out rows
loadplan drafter vocab MODEL --capture rows --rows 32768 --out ids.st
loadplan drafter quantize MODEL --capture rows --out head.st
loadplan drafter quantize MODEL --capture rows --ids ids.st --out draft.st
loadplan drafter variant MODEL FAST --head head.st --draft-head draft.st
loadplan drafter verify FAST --source MODEL"""


def add(commands: Any) -> None:
    command = common.add_command(
        commands,
        "drafter",
        summary="build a checkpoint's fast variant with a cheaper draft",
        text=_TEXT,
        example=_EXAMPLE,
    )
    steps = command.add_subparsers(required=True, metavar="STEP")
    capture.add(steps)
    vocab.add(steps)
    quantize.add(steps)
    variant.add(steps)
    verify.add(steps)
