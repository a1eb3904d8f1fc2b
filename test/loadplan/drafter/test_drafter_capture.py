"""Captured rows: the real head's input, and every way to catch nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import drafter_checkpoint as tiny
import pytest
import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import capture, rows, tokens
from loadplan.drafter.capture_transformers import TransformersEngine
from loadplan.drafter.capture_vllm import in_order, unwatch, watch
from loadplan.drafter.capture_vllm import take as take_rows


class FakeEngine:
    """States that tell their tokens; counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def states(self, batch: list[tuple[int, ...]]) -> list[torch.Tensor]:
        self.asked += batch
        return [
            torch.tensor(sequence)[:, None].repeat(1, tiny.WIDTH).float() + 1
            for sequence in batch
        ]

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("capture") / "model")


def options(model: Path, text: Path, **changed: object) -> capture.Options:
    given = {"model": model, "text": text, "rows": 90, "length": 20, "shard_rows": 40}
    return capture.Options(**(given | changed))


def take(options: capture.Options, out: Path, engine: object) -> dict:
    return capture.capture(options, out, open_engine=lambda _: engine, version="1")


def test_rows_are_what_enters_the_head(model: Path, text: Path, tmp_path: Path) -> None:
    """Red when another module is hooked, or rows change their order or dtype."""
    out = tmp_path / "rows"
    manifest = capture.capture(options(model, text, rows=70, length=32), out)
    found = rows.read_capture(out)
    from transformers import AutoModelForCausalLM

    expected = []
    reference = AutoModelForCausalLM.from_pretrained(str(model), dtype="auto").eval()
    with torch.inference_mode():
        for s in tokens.read_sequences(
            text, model, rows=70, length=32, vocabulary=tiny.VOCABULARY
        ):
            given = torch.tensor([s.tokens])
            expected.append(reference.model(input_ids=given).last_hidden_state[0])
    states = torch.cat(list(found.blocks(0, 70)))
    # A batch may be summed in another order than a sequence alone.
    assert states.dtype == torch.bfloat16
    assert torch.allclose(states, torch.cat(expected), rtol=0.05, atol=0.05)
    assert (manifest["rows"], manifest["width"], manifest["dtype"]) == (70, 128, "BF16")
    assert manifest["engine"]["name"] == "transformers"
    assert len(manifest["model"]["sha256"]) == len(manifest["tokenizer"]["sha256"])


def test_next_tokens_are_the_text(model: Path, text: Path, tmp_path: Path) -> None:
    """Red when a row and the token that follows it come apart."""
    out = tmp_path / "rows"
    take(options(model, text), out, FakeEngine())
    found = rows.read_capture(out)
    assert [header["hidden_states"].shape[0] for _, header in found.shards] == [
        40,
        40,
        10,
    ]
    plain = next(tokens.read_streams(text, model))
    followers = found.next_tokens().tolist()
    states = torch.cat(list(found.blocks(0, 90)))[:, 0].long() - 1
    # 21 tokens make 20 rows, and the last of them is no row.
    expected = [i for i in range(200) if i % 21 != 20][:90]
    assert states.tolist() == [plain[i] for i in expected]
    assert followers == [plain[i + 1] for i in expected]


class Headless(torch.nn.Module):
    """A model that multiplies by its head's weight without calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(tiny.VOCABULARY, tiny.WIDTH)
        self.head = torch.nn.Linear(tiny.WIDTH, tiny.VOCABULARY, bias=False)
        self.device = torch.device("cpu")

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        return self.embedding(input_ids) @ self.head.weight.T


def test_a_hook_that_never_fires_writes_nothing(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Red when no rows become a capture: the head would be quantised to zeros."""
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.watch(Headless())
    with pytest.raises(LoadPlanError, match="caught 0 of 20 rows"):
        take(options(model, text), tmp_path / "rows", engine)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s[:-1], "caught 19 rows"),
        (lambda s: s[:0], "caught 0 of 20"),
        (lambda s: s[:, :-1], "of shape .20, 127."),
        (lambda s: s[0], "of shape .128."),
        (lambda s: s * float("nan"), "20 of 20 rows hold NaN"),
        (lambda s: s / torch.tensor([0.0] + [1.0] * 127), "hold NaN or Inf"),
        (lambda s: s * (torch.arange(20) != 7)[:, None], "1 of 20 rows are all zeros"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_bad_rows_write_nothing(
    model: Path, text: Path, tmp_path: Path, spoil, said: str, first: bool
) -> None:
    """Red when rows that are none are kept, in the first shard or in a later one."""

    class Spoilt(FakeEngine):
        def states(self, batch):
            found = super().states(batch)
            bad = first or len(self.asked) > 2
            return [spoil(found[0]), *found[1:]] if bad else found

    with pytest.raises(LoadPlanError, match=said):
        take(options(model, text, batch=2), tmp_path / "rows", Spoilt())
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_refused_before_the_model_is_loaded(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Red when fewer rows than asked become a capture."""
    asked = options(model, text, rows=9000)
    with pytest.raises(LoadPlanError, match="gives 38.. rows, expected 9000"):
        capture.capture(asked, tmp_path / "rows", open_engine=None, version="1")
    assert not list(tmp_path.iterdir())


def test_token_files_are_fed_as_they_are(model: Path, tmp_path: Path) -> None:
    """Red when lists are joined, or a foreign token is fed."""
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([[1, 2, 3], [4], [5, 6]]))
    found = tokens.read_sequences(path, model, rows=3, length=8, vocabulary=10)
    assert [(s.tokens, s.next) for s in found] == [((1, 2), (2, 3)), ((5,), (6,))]
    with pytest.raises(LoadPlanError, match="token 5, expected 0 to 4"):
        tokens.read_sequences(path, model, rows=3, length=8, vocabulary=5)
    path.write_text('[[1, "2"]]')
    with pytest.raises(LoadPlanError, match="list of token ids"):
        tokens.read_sequences(path, model, rows=3, length=8, vocabulary=5)


def test_a_killed_capture_goes_on_behind_its_last_shard(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Red when a resumed run repeats rows, or its bytes differ from a whole run's."""
    asked = options(model, text, batch=1)
    take(asked, tmp_path / "whole", FakeEngine())

    class Killed(FakeEngine):
        def states(self, batch):
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().states(batch)

    with pytest.raises(KeyboardInterrupt):
        take(asked, tmp_path / "rows", Killed())
    assert not (tmp_path / "rows").exists()
    other = options(model, text, batch=1, rows=80)
    with pytest.raises(LoadPlanError, match="another rows, tokens"):
        take(other, tmp_path / "rows", FakeEngine())
    engine = FakeEngine()
    take(asked, tmp_path / "rows", engine)
    assert [len(sequence) for sequence in engine.asked] == [20, 20, 10]
    whole, resumed = tmp_path / "whole", tmp_path / "rows"
    assert sorted(os.listdir(tmp_path)) == ["rows", "whole"]
    for path in whole.iterdir():
        assert path.read_bytes() == (resumed / path.name).read_bytes()


def test_a_capture_whose_bytes_were_changed_is_refused(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Red when another shard, or NaN in one, is calibrated on."""
    out = tmp_path / "rows"
    take(options(model, text), out, FakeEngine())
    found = rows.read_capture(out)
    path, tensors = found.shards[1]
    with path.open("r+b") as file:
        file.seek(tensors["hidden_states"].begin)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(LoadPlanError, match="not all finite"):
        list(rows.read_capture(out).blocks(0, 90))
    path.write_bytes(found.shards[2][0].read_bytes())
    with pytest.raises(LoadPlanError, match="capture again"):
        rows.read_capture(out)


def test_vllm_rows_are_put_into_the_order_of_the_prompt() -> None:
    """Red when the row that is sampled from, computed first, stays first."""
    states = torch.arange(5.0)[:, None]
    caught = [states[4:], states[:3], states[3:4]]
    assert in_order(caught, 5).flatten().tolist() == [0, 1, 2, 3, 4]
    assert in_order([states[:1]], 1).flatten().tolist() == [0]
    assert in_order([], 5).shape[0] == 0


class LogitsProcessor(torch.nn.Module):
    """By the name of the module that calls the head in vLLM."""

    def forward(self, head: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ head


def test_the_hook_of_vllm_is_on_the_model() -> None:
    """Red when the hook needs a runner, misses a way to call, or stays behind."""
    model = torch.nn.Module()
    model.logits_processor = LogitsProcessor()
    head, states = torch.eye(4), torch.arange(8.0).reshape(2, 4)
    assert watch(model) == 1
    model.logits_processor(head, states)
    model.logits_processor(head, hidden_states=states + 1)
    # What is caught is a copy: vLLM uses its buffers again.
    expected = [states.clone(), states + 1]
    states.zero_()
    caught = take_rows(model)
    assert all(torch.equal(*pair) for pair in zip(caught, expected, strict=True))
    assert take_rows(model) == []
    unwatch(model)
    model.logits_processor(head, states)
    with pytest.raises(AttributeError):
        take_rows(model)
    with pytest.raises(LoadPlanError, match="has no LogitsProcessor"):
        watch(torch.nn.Linear(2, 2))
