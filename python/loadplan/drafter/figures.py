"""How far a quantised head is from the unquantised one, in figures that cannot flatter.

All are on rows that the calibration did not see. See docs/drafter-figures.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import files

_LOST = 0.999
"""From this relative error on, nothing of the weight is left; 1.0 is all zeros."""


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """``kl`` in nats per row; errors relative to the unquantised; ``top1`` a share.

    ``error`` is of the logits, ``weight_error`` of the weight (Frobenius norms),
    ``top1`` how often both heads name the same token.
    """

    kl: float
    error: float
    weight_error: float
    top1: float
    rows: int


def compare(
    blocks: Iterable[torch.Tensor],
    weight: torch.Tensor,
    quantised: dict[str, torch.Tensor],
    *,
    progress: files.Progress = files.no_progress,
) -> dict[str, Figures]:
    """Figures of each of the ``quantised`` weights against ``weight``.

    ``blocks`` has hidden states ``[n, width]``, ``weight`` and each of ``quantised``
    ``[rows, width]``. The divergence is KL(unquantised || quantised) over the rows of
    the head, in FP64 from FP32 logits.
    """
    reference = weight.float()
    names = list(quantised)
    kl, lost, top1 = (dict.fromkeys(names, 0.0) for _ in range(3))
    whole, count = 0.0, 0
    for block in blocks:
        states = block.float()
        logits = states @ reference.T
        logs = logits.double().log_softmax(-1)
        whole += logits.double().square().sum().item()
        for name in names:
            other = states @ quantised[name].float().T
            others = other.double().log_softmax(-1)
            kl[name] += (logs.exp() * (logs - others)).sum().item()
            lost[name] += (other - logits).double().square().sum().item()
            top1[name] += (other.argmax(-1) == logits.argmax(-1)).sum().item()
        count += states.shape[0]
        progress(states.shape[0])
    if not count:
        raise LoadPlanError("no held-out rows, expected some; capture more rows")
    size = reference.double().norm().item()
    return {
        name: Figures(
            kl=kl[name] / count,
            error=(lost[name] / whole) ** 0.5 if whole else float("nan"),
            weight_error=(quantised[name].double() - reference.double()).norm().item()
            / size
            if size
            else float("nan"),
            top1=top1[name] / count,
            rows=count,
        )
        for name in names
    }


def check_weight(name: str, weight: torch.Tensor, quantised: torch.Tensor) -> None:
    """Raises LoadPlanError where a quantised weight lost what it stands for.

    llmcompressor tells nobody when it writes zeros: for the whole weight where the
    Hessian is zero, for single inputs where those are.
    """
    if not torch.isfinite(quantised).all():
        bad = int((~torch.isfinite(quantised)).sum())
        raise LoadPlanError(
            f"{name}: {bad} of {quantised.numel()} values are not finite, expected all"
            "; is the unquantised head sound?"
        )
    if not quantised.any():
        raise LoadPlanError(
            f"{name}: the quantised head is all zeros, expected the head; capture "
            "again, the rows gave nothing to calibrate by"
        )
    dead = ~quantised.any(0) & weight.any(0)
    if dead.any():
        raise LoadPlanError(
            f"{name}: {int(dead.sum())} of {weight.shape[1]} inputs have only zeros "
            "in the quantised head, expected none; capture more rows"
        )


def check(figures: dict[str, Figures]) -> None:
    """Raises LoadPlanError where the figures say that something is wrong.

    ``figures`` may have ``rtn`` and ``gptq``.
    """
    for name, found in figures.items():
        for what, value in dataclasses.asdict(found).items():
            if not value == value or value in (float("inf"), float("-inf")):
                raise LoadPlanError(
                    f"{name}: {what} is {value}, expected a finite number; are the "
                    "captured rows sound?"
                )
        if found.kl == 0 or found.weight_error == 0:
            raise LoadPlanError(
                f"{name}: KL is {found.kl} and the weight's error "
                f"{found.weight_error}, expected more than 0: four bits cannot hold "
                "this head, so it was compared with itself"
            )
        for what, value in (("error", found.error), ("weight", found.weight_error)):
            if value >= _LOST:
                raise LoadPlanError(
                    f"{name}: the relative error ({what}) is {value:.4f}, expected "
                    "well below 1, which is a head of zeros; capture again"
                )
    if {"rtn", "gptq"} <= set(figures):
        if figures["gptq"].kl > figures["rtn"].kl:
            raise LoadPlanError(
                f"GPTQ is worse than rounding: KL {figures['gptq'].kl:.6f} against "
                f"{figures['rtn'].kl:.6f} on {figures['gptq'].rows} held-out rows, "
                "expected less; capture more rows, of text like what will be served"
            )
