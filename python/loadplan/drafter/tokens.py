"""Token sequences from a file: the text or the tokens that a model is fed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from loadplan.core.header import LoadPlanError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
# Characters that are tokenised at once, cut at the end of a line.
_TEXT_BLOCK = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    """What the model is fed, and for each position the token that came next."""

    tokens: tuple[int, ...]
    next: tuple[int, ...]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a checkpoint's folder; nothing is downloaded.

    Raises:
        LoadPlanError: transformers finds none there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise LoadPlanError(
            f"{folder}: no tokenizer that transformers reads ({error}), expected "
            "tokenizer.json; name a folder that has it by --tokenizer"
        ) from error


def tokenizer_identity(folder: Path) -> str:
    """A SHA-256 over the files of the tokenizer in ``folder``."""
    found = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            found.update(f"{name} {path.stat().st_size}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def read_streams(
    path: Path, tokenizer_folder: Path, *, length: int = _TEXT_BLOCK
) -> Iterator[list[int]]:
    """Runs of tokens: each list of a token file, or pieces of one text in order.

    A piece of text has ``length`` positions and one token more, and begins with what
    the tokenizer puts before a text.

    ``.json`` and ``.jsonl`` hold tokens, everything else is UTF-8 text.

    Raises:
        LoadPlanError: neither tokens nor text.
    """
    if path.suffix in (".json", ".jsonl"):
        yield from _read_lists(path)
        return
    tokenizer = load_tokenizer(tokenizer_folder)
    prefix = _prefix(tokenizer)
    text = itertools.chain.from_iterable(
        tokenizer(block, add_special_tokens=False).input_ids for block in _blocks(path)
    )
    size = max(length + 1 - len(prefix), 1)
    while part := list(itertools.islice(text, size)):
        yield prefix + part


def read_sequences(
    path: Path, tokenizer_folder: Path, *, rows: int, length: int, vocabulary: int
) -> list[Sequence]:
    """Sequences of at most ``length`` positions with ``rows`` positions in all.

    Raises:
        LoadPlanError: fewer than that, or a token outside of the vocabulary.
    """
    found: list[Sequence] = []
    left = rows
    for stream in read_streams(path, tokenizer_folder, length=length):
        for begin in range(0, len(stream) - 1, length):
            part = stream[begin : begin + length + 1][: left + 1]
            wrong = next((t for t in part if not 0 <= t < vocabulary), None)
            if wrong is not None:
                raise LoadPlanError(
                    f"{path}: token {wrong}, expected 0 to {vocabulary - 1}; it is "
                    "another tokenizer's"
                )
            if len(part) < 2:
                continue
            found.append(Sequence(tuple(part[:-1]), tuple(part[1:])))
            left -= len(part) - 1
            if not left:
                return found
    raise LoadPlanError(
        f"{path}: gives {rows - left} rows, expected {rows}; take more text or ask for "
        "fewer by --rows"
    )


def count(streams: Iterable[list[int]], vocabulary: int) -> list[int]:
    """How often each token is in ``streams``; tokens outside are not counted."""
    counts = [0] * vocabulary
    for stream in streams:
        for token in stream:
            if 0 <= token < vocabulary:
                counts[token] += 1
    return counts


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text, such as a token for its beginning."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    for begin in range(len(whole)):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin]
    return []


def _blocks(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            held: list[str] = []
            size = 0
            for line in file:
                held.append(line)
                size += len(line)
                if size >= _TEXT_BLOCK:
                    yield "".join(held)
                    held, size = [], 0
            if held:
                yield "".join(held)
    except (UnicodeDecodeError, OSError) as error:
        raise LoadPlanError(f"{path}: {error}, expected UTF-8 text") from error


def _read_lists(path: Path) -> Iterator[list[int]]:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                lists = [json.loads(line) for line in file if line.strip()]
            else:
                lists = json.load(file)
    except (ValueError, OSError) as error:
        raise LoadPlanError(f"{path}: {error}, expected token ids as JSON") from error
    if isinstance(lists, list) and lists and all(type(t) is int for t in lists):
        lists = [lists]
    if not isinstance(lists, list) or not all(
        isinstance(tokens, list) and all(type(t) is int for t in tokens)
        for tokens in lists
    ):
        raise LoadPlanError(f"{path}: expected a list of token ids, or lists of them")
    yield from lists
