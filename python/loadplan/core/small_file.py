"""Small text files that come with a checkpoint: read whole, or refused by name.

Whoever made a checkpoint chose what lies under the name of its index or configuration:
a FIFO would hold a load for ever and a link to /dev/zero take all memory. So a file is
opened without waiting, looked at before it is read, and read up to a limit.

Nothing of the core is imported here: the caller says which error to raise.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

# An index of 100,000 tensors has 10 MiB; the largest known have a third of that.
MOST_BYTES = 128 << 20

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def kind(mode: int) -> str:
    """What a path with the ``st_mode`` ``mode`` is, in words."""
    for matches, words in _KINDS:
        if matches(mode):
            return words
    return "a file" if stat.S_ISREG(mode) else "not a regular file"


def read_bytes(
    path: str,
    *,
    expected: str,
    way_out: str = "download it again",
    most: int = MOST_BYTES,
    error: type[Exception] = ValueError,
) -> bytes | None:
    """The content of the regular file at ``path``, None where nothing has that name.

    A link is followed; one that leads nowhere is an error, not an absent file.

    Args:
        path: The file, named by every error.
        expected: What it should be, for the error's text.
        way_out: What to do, for the error's text.
        most: Bytes that it may have.
        error: The class of what is raised.

    Raises:
        error: it is no regular file, too large, or cannot be read.
    """

    def refusal(what: str) -> Exception:
        return error(f"{path}: {what}, expected {expected}; {way_out}")

    try:
        # A FIFO without a writer would wait, a terminal would become ours.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        # A device may act on being opened.
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise refusal(kind(mode))
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            target = os.readlink(path)
            raise refusal(f"a link to {target!r}, which is not there") from None
        return None
    except OSError as problem:
        raise refusal(f"cannot be opened ({problem.strerror})") from problem
    with open(descriptor, "rb") as file:
        # What was opened counts: the name may stand for something else by now.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refusal(kind(status.st_mode))
        try:
            # Files of /proc and /sys have the size 0, others may grow meanwhile.
            content = file.read(most + 1)
        except OSError as problem:
            raise refusal(f"cannot be read ({problem.strerror})") from problem
    if len(content) > most:
        size = max(status.st_size, len(content))
        raise refusal(f"{size} B, more than the {most} B that are read")
    return content


def read_json(
    path: str,
    *,
    expected: str,
    way_out: str = "download it again",
    most: int = MOST_BYTES,
    error: type[Exception] = ValueError,
) -> dict[str, Any] | None:
    """The JSON object in the UTF-8 file at ``path``, None where nothing has that name.

    Arguments and errors are those of ``read_bytes``.

    Raises:
        error: as there, and for text that is no UTF-8, no JSON, nested too deep, no
            object, or an object that gives one key twice.
    """
    content = read_bytes(
        path, expected=expected, way_out=way_out, most=most, error=error
    )
    if content is None:
        return None

    def refusal(what: str) -> Exception:
        return error(f"{path}: {what}, expected {expected}; {way_out}")

    try:
        value = json.loads(content.decode(), object_pairs_hook=_once)
    except UnicodeDecodeError as problem:
        raise refusal(f"not UTF-8 text ({_encoding(content, problem)})") from problem
    except _TwiceError as problem:
        raise refusal(str(problem)) from None
    except RecursionError as problem:
        raise refusal("not JSON that can be read (nested too deep)") from problem
    except ValueError as problem:
        raise refusal(f"not JSON ({problem})") from problem
    if not isinstance(value, dict):
        raise refusal(f"{_name(value)}, no JSON object")
    return value


class _TwiceError(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that is given twice the last would win silently."""
    given = dict(pairs)
    if len(given) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _TwiceError(f"the key {key!r} is given twice")
            seen.add(key)
    return given


def _encoding(content: bytes, problem: UnicodeDecodeError) -> str:
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it begins as UTF-16"
    return f"byte {problem.start} is {content[problem.start]:#04x}"


def _name(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
