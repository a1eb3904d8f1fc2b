"""Which ids a draft keeps."""

from __future__ import annotations

import json
from pathlib import Path

import drafter_checkpoint as tiny
import pytest
import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import tokens, vocab


def test_special_tokens_and_the_most_frequent_are_kept() -> None:
    """Red when the order, a tie or a special token is decided otherwise."""
    counts = [5, 0, 9, 5, 1, 0]
    held_out = [1, 1, 1, 1, 0, 4]
    kept = vocab.choose(counts, held_out, always={5}, number=3)
    assert kept.ids.tolist() == [0, 2, 5]
    assert kept.ids.dtype == torch.int64
    assert kept.coverage == 6 / 8
    assert (kept.always, kept.unseen, kept.held_out) == (1, 0, 8)


def test_rows_are_filled_up_with_tokens_never_seen() -> None:
    """Red when fewer ids come back than were asked for."""
    kept = vocab.choose([0, 3, 0, 0], [0, 1, 0, 0], always=set(), number=3)
    assert kept.ids.tolist() == [0, 1, 2]
    assert kept.unseen == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": 1}, "2 .the special and added tokens"),
        ({"number": 9}, "9 rows"),
        ({"always": {7}}, "this model's tokenizer"),
        ({"counts": [0] * 4}, "no token was counted"),
        ({"held_out": [0] * 4}, "no held-out token"),
    ],
)
def test_what_cannot_be_kept_is_an_error(change: dict, said: str) -> None:
    """Red when ids that do not fit the head are written."""
    given = {"counts": [1] * 4, "held_out": [1] * 4, "always": {0, 1}, "number": 3}
    given |= change
    with pytest.raises(LoadPlanError, match=said):
        vocab.choose(
            given["counts"],
            given["held_out"],
            always=given["always"],
            number=given["number"],
        )


def test_special_and_added_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Red when an added token that is not special is forgotten."""
    model = tiny.write_model(tmp_path / "model")
    always = vocab.always_kept(tokens.load_tokenizer(model))
    assert set(tiny.SPECIAL) <= always


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"400": 1}', '{"1": -1}', "[1.5]", "3", "{", '{"1": true}']
)
def test_counts_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    """Red when a broken file of counts is taken for zeros."""
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(LoadPlanError, match="counts"):
        vocab.read_counts(path, 320)


def test_counts_come_as_a_list_or_by_id(tmp_path: Path) -> None:
    """Red when one of the two forms is read otherwise."""
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([0, 2, 5]))
    assert vocab.read_counts(path, 4) == [0, 2, 5, 0]
    path.write_text(json.dumps({"2": 5, "1": 2}))
    assert vocab.read_counts(path, 4) == [0, 2, 5, 0]


def test_written_ids_are_read_back_and_never_overwritten(tmp_path: Path) -> None:
    """Red when the file changes its form, or an old one is replaced."""
    model = tiny.write_model(tmp_path / "model")
    kept = vocab.choose([3, 2, 1], [1, 1, 1], always=set(), number=2)
    path = tmp_path / "ids.st"
    vocab.write(path, kept, vocabulary=3, tokenizer=model)
    assert vocab.read(path, 3).tolist() == [0, 1]
    with pytest.raises(LoadPlanError, match="is there already"):
        vocab.write(path, kept, vocabulary=3, tokenizer=model)
    with pytest.raises(LoadPlanError, match="expected 0 to 0"):
        vocab.read(path, 1)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.tensor([0, 1, 1]), "ids twice"),
        (torch.tensor([1, 0]), "not sorted"),
        (torch.tensor([-1, 0]), "ids from -1"),
        (torch.tensor([0, 9]), "to 9"),
        (torch.tensor([0, 1], dtype=torch.int32), "expected int64"),
        (torch.tensor([[0]]), "expected int64"),
    ],
)
def test_ids_that_cannot_be_are_told(ids: torch.Tensor, said: str) -> None:
    """Red when ids reach a variant that are none."""
    assert said in vocab.problem_of(ids, 5)
