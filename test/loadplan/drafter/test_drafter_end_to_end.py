"""The commands as a user types them, from a checkpoint to its variant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import pytest
from safetensors.torch import load_file

from loadplan import cli

needs_llmcompressor = pytest.mark.skipif(
    bool(drafter_heads.why_no_llmcompressor()),
    reason=drafter_heads.why_no_llmcompressor(),
)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    code = cli.main(["drafter", *map(str, words)])
    told = capsys.readouterr()
    assert code == 0, told.err
    return told.out


@needs_llmcompressor
def test_from_checkpoint_to_variant(
    source: Path,
    layout: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when a step does not take what the step before it wrote, in a layout."""
    before = tiny.hashes(source)
    ids, head, draft = (tmp_path / f"{n}.st" for n in ("ids", "head", "draft"))
    captured, out = tmp_path / "rows", tmp_path / "fast"
    given = ["--text", text, "--rows", 1500, "--length", 100, "--out", captured]
    assert "1500 rows of 128 BF16" in run(capsys, "capture", source, *given)
    said = run(
        capsys, "vocab", source, "--capture", captured, "--rows", 40, "--out", ids
    )
    assert "40 of 320 ids" in said and "of 300 held-out tokens" in said
    # Each layout takes one of the formats for the model's head.
    form = {"sharded": "int4", "streamed": "nvfp4"}[layout]
    given = ["--capture", captured, "--format", form, "--out", head]
    said = run(capsys, "quantize", source, *given)
    assert f"{form} in groups of {32 if form == 'int4' else 16}, gptq" in said
    figures = [line for line in said.splitlines() if "KL" in line]
    assert [line.split()[0] for line in figures] == ["rtn", "gptq"]
    assert all("reconstruction error" in line for line in figures)
    given = ["--capture", captured, "--ids", ids, "--asymmetric", "--out", draft]
    about = json.loads(run(capsys, "quantize", source, *given, "--json"))
    assert about["figures"]["gptq"]["kl"] < about["figures"]["rtn"]["kl"]
    assert (
        load_file(draft)["draft_ids"].tolist() == load_file(ids)["draft_ids"].tolist()
    )
    said = run(capsys, "variant", source, out, "--head", head, "--draft-head", draft)
    assert f"left out: {tiny.BACKUPS[layout]}" in said
    said = run(capsys, "verify", out, "--source", source)
    assert said.splitlines()[-1] == "13 of 13"
    assert tiny.hashes(source) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["drafter"], 2, "STEP"),
        (["drafter", "captur"], 2, "did you mean 'capture'"),
        (["drafter", "verify", "x", "--sourc", "y"], 2, "did you mean '--source'"),
        (
            ["drafter", "capture", "x", "--rows", "0"],
            2,
            "expected a whole number from 1 to",
        ),
        (["drafter", "verify", "nowhere"], 1, "nowhere: no folder"),
        (["drafter", "variant", "x", "nowhere/y", "--head", "z"], 1, "folder is missi"),
    ],
)
def test_exit_codes_tell_errors_from_typos(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a typo is taken for an option, or an error ends in a traceback."""
    try:
        found = cli.main(words)
    except SystemExit as stopped:
        found = stopped.code
    assert found == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("step", ["capture", "vocab", "quantize", "variant", "verify"])
def test_help_teaches_by_an_example(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a step's help loses its example, or the example no longer parses."""
    with pytest.raises(SystemExit):
        cli.main(["drafter", step, "--help"])
    shown = capsys.readouterr().out
    example = shown.split("Example:\n")[1].splitlines()[0].split()
    parser, commands = cli.make_parser()
    cli._check_words(example[1:], parser, commands)
    assert parser.parse_args(example[1:])


def test_coverage_of_counts_needs_held_out_text(
    source: Path,
    layout: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when a coverage is told on what was counted."""
    counts, out = tmp_path / "counts.json", tmp_path / "ids.st"
    counts.write_text(json.dumps([1] * tiny.VOCABULARY))
    words = ["drafter", "vocab", str(source), "--counts", str(counts), "--rows", "200"]
    assert cli.main([*words, "--out", str(out)]) == 1
    assert "no --held-out" in capsys.readouterr().err
    words += ["--held-out", str(text), "--out", str(out)]
    assert cli.main(words) == 0
    assert "of 4000 held-out tokens" in capsys.readouterr().out


def test_a_library_that_is_missing_is_named(
    source: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Red when a missing library ends in words that name no way out."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = tmp_path / "text"
    text.write_text("text")
    words = ["drafter", "capture", str(source), "--text", str(text), "--rows", "3"]
    assert cli.main([*words, "--out", str(tmp_path / "rows")]) == 1
    assert "transformers is not installed here" in capsys.readouterr().err
