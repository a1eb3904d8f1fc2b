"""Hidden states at the head of a model in vLLM.

vLLM computes logits of a prompt only where its log probabilities are asked for, and its
models call the head inside their LogitsProcessor. That module is hooked: which class
runs the model has changed between releases, and hooks on it caught nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError

_ROWS = "_loadplan_rows"
_HOOKED = "LogitsProcessor"


class VllmEngine:
    """A model from ``folder``, fed one sequence of at most ``length`` at a time."""

    def __init__(self, folder: Path, *, length: int) -> None:
        # The hook is a function of this package: a worker that is a process of its own
        # gets it by name.
        os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM, SamplingParams

        self._engine = LLM(
            model=str(folder),
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=length + 1,
            # A prompt is one step: its rows come in one order.
            max_num_batched_tokens=max(length + 1, 256),
            max_num_seqs=1,
        )
        self._sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        self._hooks = sum(self._engine.apply_model(watch))

    def states(self, batch: list[tuple[int, ...]]) -> list[torch.Tensor]:
        return [self._states(tokens) for tokens in batch]

    def close(self) -> None:
        self._engine.apply_model(unwatch)
        del self._engine

    def _states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        self._engine.apply_model(take)
        prompt = {"prompt_token_ids": list(tokens)}
        self._engine.generate([prompt], self._sampling, use_tqdm=False)
        # Every rank of tensor parallelism has the same rows.
        caught = self._engine.apply_model(take)[0]
        return in_order(caught, len(tokens))


def watch(model: Any) -> int:
    """Hook the head's input in ``model``, in its worker; return how many hooks."""
    rows: list[torch.Tensor] = []
    setattr(model, _ROWS, (rows, []))

    def catch(_: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        states = options["hidden_states"] if len(given) < 2 else given[1]
        rows.append(states.detach().to("cpu", copy=True))

    hooks = [
        module.register_forward_pre_hook(catch, with_kwargs=True)
        for module in model.modules()
        if any(kind.__name__ == _HOOKED for kind in type(module).__mro__)
    ]
    if not hooks:
        raise LoadPlanError(
            f"{type(model).__name__} has no {_HOOKED}, expected the module that calls "
            "the head; capture with --engine transformers"
        )
    getattr(model, _ROWS)[1].extend(hooks)
    return len(hooks)


def take(model: Any) -> list[torch.Tensor]:
    """Hand over what was caught since the last call."""
    rows, _ = getattr(model, _ROWS)
    caught = list(rows)
    rows.clear()
    return caught


def unwatch(model: Any) -> None:
    """Take the hooks away."""
    _, hooks = getattr(model, _ROWS)
    for hook in hooks:
        hook.remove()
    delattr(model, _ROWS)


def in_order(caught: list[torch.Tensor], count: int) -> torch.Tensor:
    """The rows of a prompt of ``count`` tokens in its order.

    The last position is computed alone, to sample from, and first: the log
    probabilities of the others come after it.
    """
    if not caught:
        return torch.empty(0, 0)
    if len(caught) > 1 and caught[0].shape[0] == 1:
        caught = [*caught[1:], caught[0]]
    return torch.cat(caught)
