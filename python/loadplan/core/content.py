"""What lies under a shard's name, told from its first bytes: a download gone wrong.

A reader that takes them for a header's length says "header too large", which helps
nobody. Nothing of the core is imported here.
"""

from __future__ import annotations

import os
import stat

_HEAD_BYTES = 512

_PAGE = (
    "an HTML page, as a server sends in place of a file; download it again, signed in "
    "where that is asked for"
)
_CONVERT = "convert it to safetensors, or use the engine's own loader for it"

# Texts by how they begin, in lower case.
_TEXTS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a git-LFS pointer, not the file that it stands for; 'git lfs pull' fetches it",
    ),
    (b"<!doctype html", _PAGE),
    (b"<html", _PAGE),
    (b"<?xml", "an XML text, as a server sends for an error; download it again"),
    (b"{", "a JSON text, no shard; download it again"),
)
# Other formats of weights by their magic numbers. torch.save's are those of
# torch/serialization.py: a zip archive, before that a pickle of a magic number.
_FORMATS = (
    (b"GGUF", "a GGUF file; use the engine's own loader for it"),
    (b"PK\x03\x04", f"a zip archive, as torch.save writes it; {_CONVERT}"),
    (b"\x80\x02\x8a\nl\xfc\x9cF", f"a pickle, as torch.save wrote it; {_CONVERT}"),
    (b"\x89HDF\r\n", f"an HDF5 file; {_CONVERT}"),
)


def stranger(path: str) -> str:
    """What the file at ``path`` is and what to do, empty where that is not known.

    Never raises; only a regular file is opened.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    if not head:
        return "an empty file; download it again"
    if not any(head):
        return "zero bytes at its begin, a download that was cut off; download it again"
    if len(head) >= 8 and not any(head[4:8]):
        return ""  # a header's length, which is below 100 MB
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for begin, words in _FORMATS:
        if head.startswith(begin):
            return words
    for begin, words in _TEXTS:
        if text.startswith(begin):
            return words
    return ""
