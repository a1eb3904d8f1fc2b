"""The bounded reader: whatever lies under the name, a content or one named error."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from loadplan.core import small_file


class RefusedError(Exception):
    pass


def read(path: Path, **options) -> object:
    return small_file.read_json(
        str(path), expected="a test", way_out="repair it", error=RefusedError, **options
    )


def test_object_is_read_and_absent_file_is_none(tmp_path: Path) -> None:
    """Red when a link is not followed or an absent file is an error."""
    (tmp_path / "real").write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    (tmp_path / "link").symlink_to("real")
    assert read(tmp_path / "link") == {"a": [1, "\u00e9"]}
    assert read(tmp_path / "none") is None
    assert read(tmp_path / "real" / "below a file") is None


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


MADE = {
    "a folder": make_folder,
    "a FIFO": os.mkfifo,
    "a socket": make_socket,
    "a character device": lambda path: path.symlink_to("/dev/zero"),
    "a link to '.*none', which is not there": lambda path: path.symlink_to("none"),
    "cannot be opened .*symbolic links": make_loop,
}


@pytest.mark.parametrize("what", MADE)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, what: str) -> None:
    """Red when one hangs, takes all memory or counts as absent."""
    MADE[what](tmp_path / "x")
    with pytest.raises(RefusedError, match=f"x: {what}.*, expected a test; repair it"):
        read(tmp_path / "x")


NESTED = b'{"a": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text .it begins as UTF-16"),
        (b'{"\xff": 1}', "not UTF-8 text .byte 2 is 0xff"),
        (NESTED, "nested too deep"),
        (b"[]", "a list, no JSON object"),
        (b"null", "null, no JSON object"),
        (b"1.5", "a number, no JSON object"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the key 'b' is given twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_object_is_refused(
    tmp_path: Path, content: bytes, what: str
) -> None:
    """Red when the file is not named, or a key that is given twice wins silently."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(RefusedError, match=f"x: .*{what}.*, expected a test; repair"):
        read(tmp_path / "x")


def test_size_is_limited(tmp_path: Path) -> None:
    """At the byte, and sparse; red when a large file is read whole or cut silently."""
    text = json.dumps({"a": 1}).encode()
    (tmp_path / "x").write_bytes(text)
    assert read(tmp_path / "x", most=len(text)) == {"a": 1}
    with pytest.raises(RefusedError, match=f"8 B, more than the {len(text) - 1} B"):
        read(tmp_path / "x", most=len(text) - 1)
    os.truncate(tmp_path / "x", 1 << 43)
    with pytest.raises(RefusedError, match=f"{1 << 43} B, more than the 134217728 B"):
        read(tmp_path / "x")


def test_file_that_cannot_be_opened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a bare PermissionError reaches the user."""
    (tmp_path / "x").write_text("{}")

    def refuse(path: str, flags: int) -> int:
        assert flags & os.O_NONBLOCK and flags & os.O_CLOEXEC
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RefusedError, match="x: cannot be opened .Permission denied"):
        read(tmp_path / "x")


def test_file_that_turns_into_a_fifo_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the opening; red when only the name is looked at."""
    (tmp_path / "x").write_text("{}")
    real = os.open

    def swap(path: str, flags: int) -> int:
        os.unlink(path)
        os.mkfifo(path)
        return real(path, flags)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(RefusedError, match="x: a FIFO, expected a test"):
        read(tmp_path / "x")
