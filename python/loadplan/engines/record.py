"""RECORD, the list of an installed wheel's files with their hashes and sizes.

What ``apply`` does to it can be computed back: lines of changed files are replaced in
their place, lines of new files stand in front, so that nothing depends on how the file
ends. Lines that do not look like an installer's are left as they are.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping

_LINE = re.compile(
    rb"(?P<path>[^,\r\n]+),sha256=(?P<digest>[\w-]{43}),\d+(?P<end>\r?\n?)"
)


def rewrite(
    record: bytes,
    *,
    changed: Mapping[str, bytes],
    known: Collection[str],
    new: Mapping[str, bytes],
    own: Collection[str],
    own_folder: str,
) -> bytes:
    """RECORD after the engine's files became ``changed`` and ``new``.

    Args:
        changed: By path, the content of every file that patches touch.
        known: The hex sha256 that a line of a changed file may have now; a line with
            another one was not written by an installer or by loadplan, and stays.
        new: By path, the content of every file that the engine's wheel does not have.
        own: The paths that only loadplan writes, those of ``new`` among them.
        own_folder: All paths below it are loadplan's too.
    """
    lines = []
    end = b"\r\n" if b"\r\n" in record.partition(b"\n")[0] + b"\n" else b"\n"
    for line in record.splitlines(keepends=True):
        match = _LINE.fullmatch(line)
        path = match["path"].decode(errors="replace") if match else ""
        if path in own or path.startswith(own_folder + "/"):
            continue
        if path in changed and _hexadecimal(match["digest"]) in known:
            line = _line(path, changed[path], match["end"])
        lines.append(line)
    front = [_line(path, content, end) for path, content in new.items()]
    return b"".join(front + lines)


def _line(path: str, content: bytes, end: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    text = f"{path},sha256={digest.decode().rstrip('=')},{len(content)}"
    return text.encode() + end


def _hexadecimal(digest: bytes) -> str:
    return base64.urlsafe_b64decode(digest + b"=").hex()
