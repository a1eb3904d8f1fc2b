"""The ``loadplan`` command.

Exit codes: 0 done, 1 an error, bytes that differ or a load that cannot work, 2 a wrong
command line, 130 interrupted, 129 and 143 ended by a signal, 141 nobody reads stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys

from loadplan.commands import (
    doctor,
    drafter,
    endings,
    export,
    inspect,
    load,
    patch,
    synth,
    terminal,
)
from loadplan.suggest import did_you_mean

_DESCRIPTION = """\
Send every tensor of a checkpoint straight to where it will live.

loadplan patches an installed engine so that --load-format instanttensor keeps
host-resident weights (DeepSeek-V4.1's Engram tables) off the GPU.

Example:
  loadplan apply sglang
"""

# In the order of --help.
_COMMANDS = (patch, inspect, doctor, load, synth, drafter, export)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        with endings.signals_raise():
            code = _run(sys.argv[1:] if argv is None else argv)
            _flush()
            return code
    except SystemExit:
        # argparse ends so, its help and the version printed.
        with contextlib.suppress(OSError):
            _flush()
        if terminal.has_closed_pipe():
            return terminal.leave_closed_pipe()
        raise
    except BrokenPipeError as error:
        # An engine has pipes of its own, and that one of them broke is an error.
        return (
            terminal.leave_closed_pipe() if terminal.has_closed_pipe() else _fail(error)
        )
    except endings.Ended as ended:
        print(f"ERROR ended by {ended.name}", file=sys.stderr)
        return ended.code
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        # Ours and the engine's: their text is for the user, a traceback is a bug.
        code = _fail(error)
        with contextlib.suppress(OSError):
            _flush()
        return code
    except KeyboardInterrupt:
        print("ERROR interrupted", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    parser, commands = make_parser()
    _check_words(words, parser, commands)
    arguments = parser.parse_args(words)
    return arguments.run(arguments)


def _fail(error: Exception) -> int:
    print(f"ERROR {error}", file=sys.stderr)
    return 1


def _flush() -> None:
    """Write out what is printed: now its error can be told, at exit it cannot."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole command line, and each command's own by name."""
    parser = argparse.ArgumentParser(
        prog="loadplan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show it and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    return parser, commands.choices


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of one command line, as they are typed."""
    return {word for action in parser._actions for word in action.option_strings}


def _check_words(
    words: list[str],
    parser: argparse.ArgumentParser,
    commands: dict[str, argparse.ArgumentParser],
) -> None:
    """End with a suggestion at the first command or option that there is not."""
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in commands:
        near = did_you_mean(name, commands)
        parser.error(f"no command {name!r}, known: {', '.join(sorted(commands))}{near}")
    innermost = parser if name is None else _step(commands[name], words)
    known = options(parser) | options(innermost)
    if name is not None:
        known |= options(commands[name])
    for word in itertools.takewhile(lambda word: word != "--", words):
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            innermost.error(f"no option {option!r}{did_you_mean(option, known)}")


def _step(
    command: argparse.ArgumentParser, words: list[str]
) -> argparse.ArgumentParser:
    """The parser of the step that ``words`` name, of a command that has steps."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = [word for word in words if not word.startswith("-")][1:2]
            if found and found[0] not in action.choices:
                near = did_you_mean(found[0], action.choices)
                command.error(
                    f"no step {found[0]!r}, known: {', '.join(action.choices)}{near}"
                )
            return action.choices[found[0]] if found else command
    return command


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from loadplan.core import VERSION

        parser.exit(message=f"loadplan {VERSION}\n")
