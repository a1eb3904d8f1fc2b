"""``loadplan drafter capture``: the hidden states that enter the output head."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common, numbers
from loadplan.commands.drafter.shared import (
    MOST,
    add_tokenizer,
    rows_bar,
    say,
    with_libraries,
)

if TYPE_CHECKING:
    pass


def add(steps: Any) -> None:
    command = common.add_command(
        steps,
        "capture",
        summary="the hidden states that enter the output head",
        text="Feed a text to the model and write what enters its output head, row by "
        "row, as safetensors\nshards with a manifest. A killed run is continued by "
        "the same command.",
        example="loadplan drafter capture MODEL --text book.txt --rows 65536 "
        "--out rows",
    )
    command.add_argument("model", type=Path, help="a checkpoint's folder")
    command.add_argument(
        "--text",
        type=Path,
        required=True,
        metavar="FILE",
        help="UTF-8 text, or token ids: .json (a list, or lists) or .jsonl",
    )
    command.add_argument(
        "--rows",
        type=numbers.whole(1, MOST),
        required=True,
        metavar="N",
        help="positions",
    )
    command.add_argument("--out", type=Path, required=True, help="a new folder")
    command.add_argument(
        "--engine",
        choices=("transformers", "vllm"),
        default="transformers",
        help="what runs the model, installed beside loadplan (default: transformers)",
    )
    command.add_argument(
        "--length",
        type=numbers.whole(1, MOST),
        default=512,
        metavar="N",
        help="positions of one sequence, at most (default: 512)",
    )
    command.add_argument(
        "--batch",
        type=numbers.whole(1, MOST),
        default=4,
        metavar="N",
        help="sequences at once, transformers only (default: 4)",
    )
    command.add_argument(
        "--shard-rows",
        type=numbers.whole(1, MOST),
        default=16384,
        metavar="N",
        help="rows of a file: what a kill may cost (default: 16384)",
    )
    add_tokenizer(command)
    common.add_json(command)
    command.set_defaults(run=with_libraries(_run))


def _run(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import capture

    options = capture.Options(
        model=arguments.model,
        text=arguments.text,
        rows=arguments.rows,
        engine=arguments.engine,
        tokenizer=arguments.tokenizer,
        length=arguments.length,
        batch=arguments.batch,
        shard_rows=arguments.shard_rows,
    )
    with rows_bar() as start:
        told = start("Capturing", arguments.rows)
        manifest = capture.capture(options, arguments.out, progress=told)
    engine = manifest["engine"]
    say(
        arguments,
        manifest,
        f"{arguments.out}: {manifest['rows']} rows of {manifest['width']} "
        f"{manifest['dtype']} in {len(manifest['shards'])} shards, by "
        f"{engine['name']} {engine['version']}",
    )
    return 0
