"""One picture of an inspection: the bytes by route, and what memory they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.checkpoint.estimates import ARRIVING, BUFFERS, RING, TABLES, WEIGHTS
from loadplan.core.header import LoadPlanError
from loadplan.units import gib

if TYPE_CHECKING:
    from loadplan.checkpoint.estimates import Memory
    from loadplan.inspection.loads import Inspection, Load

# Okabe and Ito's colours, which colour-blind people tell apart.
_ROUTES = {
    "stream": ("#0072B2", "STREAM: whole files to every GPU"),
    "read": ("#56B4E9", "READ: to every GPU, read apart"),
    "host": ("#E69F00", "HOST: stays in host memory"),
    "skip": ("#BBBBBB", "SKIP: read by nobody"),
}
_PARTS = {
    WEIGHTS: "#009E73",
    RING: "#D55E00",
    ARRIVING: "#CC79A7",
    TABLES: "#E69F00",
    BUFFERS: "#999999",
}
_SIDES = ("stock", "loadplan")
_VERDICTS = {True: "fits", False: "does not fit", None: ""}
_TOO_MUCH = "#B00020"
_GIB = 1 << 30


def check(path: Path) -> None:
    """Refuse, before any work is done, a picture that could not be written.

    Raises:
        LoadPlanError: matplotlib or the folder is missing, or the ending is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise LoadPlanError(
            f"{path}: cannot be drawn ({error}), expected matplotlib; 'pip install "
            "matplotlib' or leave --plot out"
        ) from error
    if path.suffix.lstrip(".").lower() not in FigureCanvasAgg.filetypes:
        raise LoadPlanError(
            f"{path}: ends in {path.suffix!r}, expected an image like FILE.png"
        )
    if not path.parent.is_dir():
        raise LoadPlanError(
            f"{path}: no folder {str(path.parent)!r}, expected one; make it first"
        )


def draw(inspection: Inspection, path: Path) -> None:
    """Write the picture to ``path``, which ``check`` accepts; the ending is its format.

    Raises:
        LoadPlanError: see ``check``.
    """
    check(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = inspection.loads
    figure = Figure(figsize=(13, 1.2 + 4.3 * len(loads)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(inspection), fontsize=15, fontweight="bold")
    rows = figure.subplots(len(loads), 3, squeeze=False, width_ratios=(1.15, 1, 1))
    for load, (routes, gpu, host) in zip(loads, rows, strict=True):
        with_draft = "" if load.what == "model" else f", with the {load.what}"
        _bars(
            routes,
            title=f"Where the {load.what}'s load sends the bytes",
            stacks=_route_stacks(load),
            colours={label: colour for colour, label in _ROUTES.values()},
            notes=[
                f"{gib(nbytes)}\nto each GPU"
                for nbytes in (load.stock_bytes, load.device_bytes)
            ],
        )
        for axes, place, key in ((gpu, "GPU", "gpu"), (host, "host", "host")):
            memories = [getattr(load, f"{side}_{key}") for side in ("stock", "plan")]
            _bars(
                axes,
                title=f"Peak memory of each {place}{with_draft}",
                stacks=[memory.parts for memory in memories],
                colours=_PARTS,
                notes=[f"{gib(m.total)}\n{_VERDICTS[m.fits]}" for m in memories],
            )
            _mark(axes, memories, place=place)
    figure.savefig(path, dpi=110)


def _title(inspection: Inspection) -> str:
    machine = inspection.machine
    name = Path(inspection.checkpoint).resolve().name
    gpus = "1 GPU" if machine.tp == 1 else f"{machine.tp} GPUs"
    return (
        f"{name}: {gib(inspection.nbytes)} in {inspection.files} files for {gpus}, "
        "stock engine beside loadplan"
    )


def _route_stacks(load: Load) -> list[dict[str, int]]:
    labels = {route: label for route, (_, label) in _ROUTES.items()}
    planned = {labels[route]: load.routes[route].nbytes for route in _ROUTES}
    return [{labels["stream"]: load.stock_bytes}, planned]


def _bars(
    axes: Any,
    *,
    title: str,
    stacks: Sequence[dict[str, int]],
    colours: dict[str, str],
    notes: Sequence[str],
) -> None:
    """Two stacked bars with sizes in them and notes below, stock on the left."""
    places = [f"{side}\n{note}" for side, note in zip(_SIDES, notes, strict=True)]
    highest = max(sum(stack.values()) for stack in stacks) or 1
    for label, colour in colours.items():
        heights = [stack.get(label, 0) for stack in stacks]
        if not any(heights):
            continue
        bottoms = [_below(stack, label) for stack in stacks]
        axes.bar(
            places,
            [height / _GIB for height in heights],
            bottom=[bottom / _GIB for bottom in bottoms],
            color=colour,
            edgecolor="white",
            width=0.55,
            label=label,
        )
        for x, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
            if height > 0.05 * highest:
                middle = (bottom + height / 2) / _GIB
                axes.text(x, middle, gib(height), ha="center", va="center", color="w")
    axes.set_title(title)
    axes.set_ylabel("GiB")
    axes.set_ylim(0, 1.1 * highest / _GIB)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)


def _below(stack: dict[str, int], label: str) -> int:
    """How high ``stack`` is where ``label`` begins."""
    below = 0
    for other, height in stack.items():
        if other == label:
            break
        below += height
    return below


def _mark(axes: Any, memories: Sequence[Memory], *, place: str) -> None:
    """Draw what there is, where it is in sight, and point out what is too much."""
    limit = memories[0].limit
    if limit is not None and limit / _GIB < axes.get_ylim()[1]:
        axes.axhline(limit / _GIB, color=_TOO_MUCH, linestyle="--", linewidth=1.2)
        axes.text(
            0.5,
            limit / _GIB,
            f"{gib(limit)}\nof a {place}",
            color=_TOO_MUCH,
            ha="center",
            va="bottom",
        )
    for label, memory in zip(axes.get_xticklabels(), memories, strict=True):
        if memory.problem:
            label.set_color(_TOO_MUCH)
            label.set_fontweight("bold")
