"""``loadplan drafter vocab``: the ids that a draft keeps."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, numbers
from loadplan.commands.drafter.shared import (
    MOST,
    add_held_out_rows,
    add_tokenizer,
    say,
    with_libraries,
)

if TYPE_CHECKING:
    pass


def add(steps: Any) -> None:
    command = common.add_command(
        steps,
        "vocab",
        summary="the ids that the draft's head keeps",
        text="Choose the most frequent tokens for a draft's head. Special and added "
        "tokens are always kept.\nThe coverage is told on text that was not counted: "
        "--held-out, or the end of the capture.",
        example="loadplan drafter vocab MODEL --capture rows --rows 32768 --out ids.st",
    )
    command.add_argument("model", type=Path, help="a checkpoint's folder")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--capture", type=Path, metavar="DIR", help="count its tokens")
    source.add_argument(
        "--counts",
        type=Path,
        metavar="FILE",
        help="JSON: a count for each id, or an object from id to count",
    )
    command.add_argument(
        "--rows",
        type=numbers.whole(1, MOST),
        required=True,
        metavar="K",
        help="ids to keep",
    )
    command.add_argument(
        "--held-out",
        type=Path,
        metavar="FILE",
        help="text or token ids for the coverage; needed with --counts",
    )
    add_held_out_rows(command)
    command.add_argument("--out", type=Path, required=True, help="a new file")
    add_tokenizer(command)
    common.add_json(command)
    command.set_defaults(run=with_libraries(_run))


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.core.header import LoadPlanError
    from loadplan.drafter import checkpoint, rows, tokens, vocab

    size = checkpoint.read_checkpoint(arguments.model).vocabulary
    if size is None:
        raise LoadPlanError(f"{arguments.model}: config.json has no vocab_size")
    folder = arguments.tokenizer or arguments.model
    tokenizer = tokens.load_tokenizer(folder)
    held_out = None
    if arguments.held_out is not None:
        held_out = tokens.count(tokens.read_streams(arguments.held_out, folder), size)
    if arguments.capture is not None:
        capture = rows.read_capture(arguments.capture)
        counts, rest = vocab.capture_counts(capture, size, arguments.held_out_rows)
        if held_out is None:
            held_out = rest
        else:
            counts = [a + b for a, b in zip(counts, rest, strict=True)]
    else:
        if held_out is None:
            raise LoadPlanError("no --held-out, expected text that --counts has not")
        counts = vocab.read_counts(arguments.counts, size)
    kept = vocab.choose(
        counts,
        held_out,
        always=vocab.always_kept(tokenizer),
        number=arguments.rows,
    )
    vocab.write(arguments.out, kept, vocabulary=size, tokenizer=folder)
    about = dataclasses.asdict(kept) | {"ids": kept.ids.tolist(), "vocabulary": size}
    say(
        arguments,
        about,
        f"{arguments.out}: {len(kept.ids)} of {size} ids, {kept.always} special or "
        f"added, {kept.unseen} never seen\ncoverage {kept.coverage:.4%} of "
        f"{kept.held_out} held-out tokens",
    )
    return 0
