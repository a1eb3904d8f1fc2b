"""Hidden states at the head of a model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError


class TransformersEngine:
    """A causal language model from ``folder``, on a GPU where there is one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype="auto", local_files_only=True
        )
        self.watch(model.eval().to(self._device))

    def watch(self, model: Any) -> None:
        """Hook the input of the model's head.

        Raises:
            LoadPlanError: the model has no head.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise LoadPlanError(
                f"{type(model).__name__} has no output head, expected a causal "
                "language model"
            )
        self._model, self._caught = model, []
        head.register_forward_pre_hook(self._catch)

    def states(self, batch: list[tuple[int, ...]]) -> list[torch.Tensor]:
        self._caught.clear()
        given = torch.tensor(batch, device=self._model.device)
        with torch.inference_mode():
            self._model(input_ids=given, use_cache=False)
        if not self._caught:
            width = self._model.get_input_embeddings().weight.shape[-1]
            return [torch.empty(0, width) for _ in batch]
        caught = torch.cat(
            [c.reshape(len(batch), -1, c.shape[-1]) for c in self._caught], 1
        )
        return list(caught)

    def close(self) -> None:
        del self._model, self._caught

    def _catch(self, _: Any, given: tuple[torch.Tensor, ...]) -> None:
        self._caught.append(given[0].detach().cpu())
