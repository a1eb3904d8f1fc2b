"""The command as a user types it: exit codes, messages, and a load that is proven."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from engine_tree import make_tree

from loadplan import cli
from loadplan.commands import terminal

ROOT = Path(__file__).parents[3]
ENGINE = ROOT / "build" / "engines" / "sglang"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "COLUMNS": "100"}
    return warm.run(["-m", "loadplan", *arguments], env=environment)


def load(checkpoint: Path, *options: str, tree: str = "patched"):
    return run("load", checkpoint, "--engine-dir", ENGINE / tree, *options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synth") / "checkpoint"
    result = run("synth", folder, "--size", "8M", "--mixed-engram", "--seed", "3")
    assert result.returncode == 0, result.stderr
    return folder


def test_load_proves_a_synthetic_checkpoint_by_its_seed(checkpoint: Path) -> None:
    """Red when a byte that arrives is not the seed's, or a route is not used."""
    result = load(checkpoint, "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["wrong"] == []
    assert "seed 3" in report["reference"]
    assert "stub" in report["reader"]
    routes = report["routes"]
    assert [name for name in routes if routes[name]["tensors"]] == [
        "host",
        "read",
        "stream",
    ]
    total = sum(route["nbytes"] for route in routes.values())
    assert report["stock_device_bytes"] == total


def test_load_shows_plan_table_and_digest(checkpoint: Path) -> None:
    """Red when the output loses what the README shows."""
    result = load(checkpoint, "--engram-config", '{"placement": "gpu"}')
    assert result.returncode == 0, result.stderr
    for text in (
        "InstantTensor: a stub",
        "placement=gpu",
        "The plan, from the headers alone",
        "What arrived",
        "GB/s",
        "sha256 ",
        "The digest matches the seed 3",
    ):
        assert text in result.stdout, text


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("where", ["payload", "header", "index"])
def test_one_flipped_byte_fails_the_command_and_is_named(
    copy: Path, where: str
) -> None:
    """In weights, in metadata, in a total that nobody reads; red when one passes."""
    path = sorted(copy.glob("*.safetensors"))[0]
    if where == "index":
        path = copy / "model.safetensors.index.json"
    content = path.read_bytes()
    old, new = {
        "payload": (content[-9:], content[-9:-1] + bytes([content[-1] ^ 1])),
        "header": (b'"pt"', b'"qt"'),
        "index": (b'"total_size": ', b'"total_size": 9'),
    }[where]
    path.write_bytes(content.replace(old, new, 1))
    result = load(copy)
    assert result.returncode == 1
    assert "ERROR 1 tensor(s) or file(s) differ from the seed 3" in result.stderr
    assert "differs from" in result.stdout
    if where != "payload":
        assert path.name in result.stderr


def test_checkpoint_that_is_not_ours_is_compared_with_official_safetensors(
    copy: Path,
) -> None:
    """Red when a real checkpoint is compared with nothing."""
    (copy / "loadplan-synth.json").unlink()
    result = load(copy)
    assert result.returncode == 0, result.stderr
    assert "The digest matches official safetensors" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("load", "nowhere"), "ERROR nowhere: no such folder or file"),
        (("apply", "llama"), "ERROR no patches for engine 'llama'"),
        (("status", "sglang", "--target", "nowhere"), "no package 'sglang'"),
        (("synth", "."), "ERROR"),
    ],
)
def test_error_is_one_line_and_exit_code_1(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Red when a user sees a traceback."""
    assert cli.main(list(arguments)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_load_on_a_pristine_engine_says_what_to_do(checkpoint: Path) -> None:
    """Red when an unpatched engine fails deep inside."""
    result = load(checkpoint, tree="pristine")
    assert result.returncode == 1
    apply = f"'loadplan apply sglang --target {ENGINE / 'pristine'}'"
    assert f"sglang is not patched, or not wholly; {apply}" in result.stderr


def test_bad_engram_config_is_the_engines_own_error(checkpoint: Path) -> None:
    """Red when the argument is checked by something else than the server does."""
    result = load(checkpoint, "--engram-config", '{"placement": "disk"}')
    assert result.returncode == 1
    assert "ERROR --engram-config: cannot use" in result.stderr


def test_wrong_command_line_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when usage errors look like failed work."""
    for arguments in ([], ["synth", "out", "--size", "many"], ["serve"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
    assert "argument --size: 'many' given, expected a size" in capsys.readouterr().err


OPTIONS = {
    "": "--version",
    "apply": "--target",
    "revert": "--target",
    "status": "--json --target",
    "inspect": "--draft --engram-config --gpu-memory --host-memory --json --nodes "
    "--plot --tp",
    "doctor": "--draft --engram-config --json --nodes --pin --tp",
    "load": "--compare --engine --engine-dir --engram-config --json --log",
    "synth": "--engram-fraction --mixed-engram --no-draft --no-index --seed --shards "
    "--size",
    "export": "--out",
    "drafter": "",
}


def test_options_are_these() -> None:
    """Red when one comes or goes; change the table and the docs with it."""
    parser, commands = cli.make_parser()
    found = {"": cli.options(parser)}
    found |= {name: cli.options(command) for name, command in commands.items()}
    assert found == {
        name: {*options.split(), "-h", "--help"} for name, options in OPTIONS.items()
    }


@pytest.mark.parametrize("command", OPTIONS)
def test_every_help_shows_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when --help stops teaching."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command.split(), "--help"])
    assert exit_.value.code == 0
    assert f"Example:\n  loadplan {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inspekt x", "no command 'inspekt'"),
        ("inspekt x", "did you mean 'inspect'?"),
        ("appplly sglang", "did you mean 'apply'?"),
        ("serve", "no command 'serve', known: apply, "),
        ("inspect x --jsn", "no option '--jsn'; did you mean '--json'?"),
        ("inspect x --gpu-mem=96G", "did you mean '--gpu-memory'?"),
        ("synth x --shard 4", "did you mean '--shards'?"),
        ("--versoin", "did you mean '--version'?"),
        ("inspect x --draft dsprak", "choose from"),
    ],
)
def test_unknown_word_gets_a_suggestion(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a slip of the finger leaves a user alone, or is taken for an option."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(words.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_engine_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a user must read a list to find a swapped letter."""
    assert cli.main(["apply", "sglnag"]) == 1
    assert "; did you mean 'sglang'?" in capsys.readouterr().err


def test_words_after_two_dashes_are_no_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a folder that is named like an option cannot be given."""
    assert cli.main(["inspect", "--", "--jsn"]) == 1
    assert "--jsn: no such folder or file" in capsys.readouterr().err


# Where the words go


def piped(*arguments: str | Path, reads: int) -> tuple[int, str]:
    """Exit code and stderr of a command whose reader leaves after ``reads`` bytes."""
    command = [sys.executable, "-m", "loadplan", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(reads)
        process.stdout.close()
        error = process.stderr.read().decode()
    return process.returncode, error


@pytest.mark.parametrize("option", ["--json", "--draft=dspark", "--help"])
@pytest.mark.parametrize("reads", [0, 1])
def test_reader_that_leaves_ends_a_command_silently(
    checkpoint: Path, option: str, reads: int
) -> None:
    """As head does; red when that is an error, or Python complains at its exit."""
    code, error = piped("inspect", checkpoint, option, reads=reads)
    assert error == ""
    assert code in (0, 141)
    assert reads or code == 141


def test_broken_pipe_of_an_engine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a load that failed ends without a word."""

    def fail(arguments: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["inspect", "x"]) == 1
    assert "ERROR [Errno 32] Broken pipe" in capsys.readouterr().err


def test_engines_words_are_plain_and_apart_from_the_results(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Red when colours reach a file, or a log stands between the tables."""
    with terminal.engine_output():
        print("\x1b[38;20mblue\x1b[0m", file=sys.stderr)
        print("\x1b]0;title\x07printed")
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "\x1b[1mlogged\x1b[m"}))
    print("result")
    output = capfd.readouterr()
    assert output.out == "result\n"
    assert output.err.split() == ["blue", "printed", "logged"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("synth /proc/x/y --size 8M", "OUT: /proc/x/y: cannot be written"),
        ("inspect {} --plot /proc/x.png", "--plot: /proc/x.png: cannot be written"),
    ],
)
def test_output_that_cannot_be_written_names_its_option(
    checkpoint: Path, words: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when the error is the system's alone."""
    assert cli.main(words.format(checkpoint).split()) == 1
    assert f"ERROR {option}" in capsys.readouterr().err


# How it is told to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_cleans_up_as_an_interrupt_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """A second one too; red when ``finally`` clauses do not run to their end."""
    cleaned = []

    def run(arguments: object) -> int:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            os.kill(os.getpid(), number)
            cleaned.append(True)

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["inspect", "x"]) == 128 + number
    assert cleaned == [True]
    assert f"ERROR ended by {signal.Signals(number).name}" in capsys.readouterr().err
    assert signal.getsignal(number) is signal.SIG_DFL


def test_signal_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup does; red when a load ends with its terminal all the same."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(cli, "_run", lambda words: os.kill(os.getpid(), 1) or 0)
        assert cli.main(["inspect", "x"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


# Next steps


def test_next_steps_for_a_named_tree_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a command that is printed lacks --target, or the name needs quotes."""
    root = make_tree(tmp_path / "site packages")
    for command, state in (("status", "pristine"), ("apply", None), ("status", None)):
        assert cli.main([command, "sglang", "--target", str(root)]) == 0
        output = capsys.readouterr().out
        (step,) = re.findall("'loadplan ((?:apply|revert) .*)' ", output)
        assert shlex.split(step)[1:] == ["sglang", "--target", str(root)]
        if state is not None:
            assert "  absent    sglang/srt/model_loader/loadplan/plan.py" in output
            assert "  pristine  sglang/srt/model_loader/loader.py" in output
    assert "absent" not in output
    assert cli.main(shlex.split(step)) == 0
