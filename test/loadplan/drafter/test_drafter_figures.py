"""The figures by hand, and every head that must be refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import figures

GOOD = figures.Figures(kl=0.1, error=0.1, weight_error=0.1, top1=0.9, rows=10)


def test_figures_of_two_tokens_by_hand() -> None:
    """Red when the divergence changes its direction, its unit or its mean."""
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    other = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    state = torch.tensor([[1.0, 0.0], [0.0, 0.5]])
    found = figures.compare([state[:1], state[1:]], head, {"x": other})["x"]
    # Of the first row: (e, 1) against (1, 1); of the second both are the same but 0.5.
    p = torch.tensor([1.0, 0.0]).softmax(0).double()
    first = float((p * (p.log() - torch.tensor(0.5).log())).sum())
    p = torch.tensor([0.0, 0.5]).softmax(0).double()
    q = torch.tensor([0.5, 0.5]).softmax(0).double()
    second = float((p * (p.log() - q.log())).sum())
    assert found.kl == pytest.approx((first + second) / 2, rel=1e-6)
    assert found.error == pytest.approx(((1 + 0.25) / (1 + 0.25)) ** 0.5)
    assert found.weight_error == pytest.approx(1.0)
    assert found.rows == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kl": 0.0}, "compared with itself"),
        ({"weight_error": 0.0}, "compared with itself"),
        ({"error": 1.0}, "well below 1"),
        ({"weight_error": 1.0}, "well below 1"),
        ({"kl": float("nan")}, "finite"),
        ({"error": float("inf")}, "finite"),
    ],
)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_broken_figure_is_an_error(
    changed: dict[str, float], said: str, method: str
) -> None:
    """Red when a figure that only a broken head has is let through."""
    figures.check({"rtn": GOOD, "gptq": GOOD})
    both = {"rtn": GOOD, "gptq": GOOD} | {method: dataclasses.replace(GOOD, **changed)}
    with pytest.raises(LoadPlanError, match=said):
        figures.check(both)


def test_gptq_that_is_worse_than_rounding_is_an_error() -> None:
    """Red when a calibration that did harm is written."""
    worse = dataclasses.replace(GOOD, kl=0.11)
    with pytest.raises(LoadPlanError, match="worse than rounding"):
        figures.check({"rtn": GOOD, "gptq": worse})
    figures.check({"rtn": worse, "gptq": GOOD})


def test_a_weight_of_zeros_or_nan_is_an_error() -> None:
    """Red when what a zero Hessian leaves is taken for a head."""
    weight = torch.ones(4, 8)
    for broken, said in (
        (torch.zeros(4, 8), "all zeros"),
        (weight * torch.tensor([1.0] * 7 + [0.0]), "1 of 8 inputs"),
        (weight * float("nan"), "not finite"),
    ):
        with pytest.raises(LoadPlanError, match=said):
            figures.check_weight("gptq", weight, broken)
    figures.check_weight("gptq", weight, weight)


def test_no_held_out_rows_are_an_error() -> None:
    """Red when a mean over nothing is told as a figure."""
    with pytest.raises(LoadPlanError, match="no held-out rows"):
        figures.compare([], torch.ones(2, 2), {"rtn": torch.ones(2, 2)})
