"""``loadplan drafter``: a cheaper draft from a checkpoint that stays untouched."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import common
from loadplan.units import gib

if TYPE_CHECKING:
    from loadplan.drafter import quantize as quantizing

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
    _add_capture(steps)
    _add_vocab(steps)
    _add_quantize(steps)
    _add_variant(steps)
    _add_verify(steps)


def _add_capture(steps: Any) -> None:
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
        "--rows", type=common.count, required=True, metavar="N", help="positions"
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
        type=common.count,
        default=512,
        metavar="N",
        help="positions of one sequence, at most (default: 512)",
    )
    command.add_argument(
        "--batch",
        type=common.count,
        default=4,
        metavar="N",
        help="sequences at once, transformers only (default: 4)",
    )
    command.add_argument(
        "--shard-rows",
        type=common.count,
        default=16384,
        metavar="N",
        help="rows of a file: what a kill may cost (default: 16384)",
    )
    _add_tokenizer(command)
    common.add_json(command)
    command.set_defaults(run=_with_libraries(_capture))


def _capture(arguments: argparse.Namespace) -> int:
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
    with _rows_bar() as start:
        told = start("Capturing", arguments.rows)
        manifest = capture.capture(options, arguments.out, progress=told)
    engine = manifest["engine"]
    _say(
        arguments,
        manifest,
        f"{arguments.out}: {manifest['rows']} rows of {manifest['width']} "
        f"{manifest['dtype']} in {len(manifest['shards'])} shards, by "
        f"{engine['name']} {engine['version']}",
    )
    return 0


def _add_vocab(steps: Any) -> None:
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
        "--rows", type=common.count, required=True, metavar="K", help="ids to keep"
    )
    command.add_argument(
        "--held-out",
        type=Path,
        metavar="FILE",
        help="text or token ids for the coverage; needed with --counts",
    )
    _add_held_out_rows(command)
    command.add_argument("--out", type=Path, required=True, help="a new file")
    _add_tokenizer(command)
    common.add_json(command)
    command.set_defaults(run=_with_libraries(_vocab))


def _vocab(arguments: argparse.Namespace) -> int:
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
    _say(
        arguments,
        about,
        f"{arguments.out}: {len(kept.ids)} of {size} ids, {kept.always} special or "
        f"added, {kept.unseen} never seen\ncoverage {kept.coverage:.4%} of "
        f"{kept.held_out} held-out tokens",
    )
    return 0


def _add_quantize(steps: Any) -> None:
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
        type=common.count,
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
    _add_held_out_rows(command)
    _add_head_name(command)
    common.add_json(command)
    command.set_defaults(run=_with_libraries(_quantize))


def _quantize(arguments: argparse.Namespace) -> int:
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
    with _rows_bar() as start:
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
    _say(arguments, about, "\n".join(lines))
    return 0


def _add_variant(steps: Any) -> None:
    command = common.add_command(
        steps,
        "variant",
        summary="a copy of the checkpoint with the new heads, its shards linked",
        text="Put together the variant OUT of SRC. Shards are hard links; the one with "
        "the head and all\nthat a later step may rewrite are files of their own. OUT "
        "appears when it is whole and verified.",
        example="loadplan drafter variant MODEL FAST --head head.st "
        "--draft-head draft.st",
    )
    command.add_argument("source", type=Path, metavar="SRC", help="the checkpoint")
    command.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    command.add_argument(
        "--head", type=Path, required=True, metavar="FILE", help="from 'quantize'"
    )
    command.add_argument(
        "--draft-head",
        type=Path,
        metavar="FILE",
        help="from 'quantize --ids'; it replaces what SRC has of a draft's own",
    )
    command.add_argument(
        "--copy",
        action="store_true",
        help="copy shards that lie on another file system than OUT",
    )
    _add_head_name(command)
    common.add_json(command)
    command.set_defaults(run=_with_libraries(_variant))


def _variant(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import variant

    plan = variant.make_plan(
        arguments.source,
        arguments.out,
        arguments.head,
        draft_head=arguments.draft_head,
        copy_links=arguments.copy,
        head_name=arguments.head_name,
    )
    with common.progress_bar() as progress:

        def start(step: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(step, total=total)
            return lambda nbytes: progress.advance(task, nbytes)

        results = variant.build(plan, arguments.out, start=start)
    about = {
        "linked": plan.links,
        "copied": plan.copies,
        "rewritten": plan.rewritten,
        "left_out": plan.left_out,
        "copied_bytes": plan.copied_bytes,
        "checks": [dataclasses.asdict(result) for result in results],
    }
    left_out = ", ".join(map(common.shown, plan.left_out)) or "nothing"
    _say(
        arguments,
        about,
        f"{arguments.out}: {len(plan.links)} shards linked, {len(plan.rewritten)} "
        f"rewritten, {len(plan.copies)} files copied, {gib(plan.copied_bytes)} of its "
        f"own\nleft out: {left_out}\n{len(results)} of {len(results)} checks hold",
    )
    return 0


def _add_verify(steps: Any) -> None:
    command = common.add_command(
        steps,
        "verify",
        summary="check a variant and that its source is untouched",
        text="Check a variant, one line a check. The exit code is 1 when any fails.",
        example="loadplan drafter verify FAST --source MODEL",
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="the variant")
    command.add_argument(
        "--source",
        type=Path,
        metavar="SRC",
        help="also compare it with what it was made from",
    )
    common.add_json(command)
    command.set_defaults(run=_with_libraries(_verify))


def _verify(arguments: argparse.Namespace) -> int:
    from loadplan.drafter import verify

    results = verify.verify(arguments.folder, arguments.source)
    held = sum(result.ok for result in results)
    lines = [
        f"{'ok  ' if r.ok else 'FAIL'} {r.name}: {common.shown(r.detail)}"
        for r in results
    ]
    lines.append(f"{held} of {len(results)}")
    about = {
        "held": held,
        "of": len(results),
        "checks": [dataclasses.asdict(result) for result in results],
    }
    _say(arguments, about, "\n".join(lines))
    return 0 if held == len(results) else 1


def _with_libraries(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Tell which library a step lacks: those of this command are no requirements."""

    def checked(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ModuleNotFoundError as error:
            from loadplan.core.header import LoadPlanError

            name = (error.name or "a library").partition(".")[0].replace("_", "-")
            raise LoadPlanError(
                f"{name} is not installed here, expected it for this step; install it "
                "beside loadplan, as requirements.txt pins it"
            ) from error

    return checked


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="a folder with the tokenizer (default: the checkpoint's)",
    )


def _add_held_out_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--held-out-rows",
        type=common.count,
        metavar="N",
        help="the capture's last rows, kept for measuring (default: a fifth)",
    )


def _add_head_name(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--head-name",
        metavar="NAME",
        help="the module of the output head (default: found in the index)",
    )


def _say(arguments: argparse.Namespace, about: dict[str, Any], text: str) -> None:
    print(json.dumps(about, indent=2) if arguments.json else text)


@contextlib.contextmanager
def _rows_bar() -> Iterator[quantizing.StartProgress]:
    """Bars of rows with rows/s on stderr, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class Speed(ProgressColumn):
        def render(self, task: Any) -> str:
            speed = task.finished_speed or task.speed
            return "? rows/s" if speed is None else f"{speed:,.0f} rows/s"

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:

        def start(step: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(step, total=total)
            return lambda rows: progress.advance(task, rows)

        yield start
