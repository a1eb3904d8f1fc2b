"""What a synthetic checkpoint looks like, and the file that says so."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from loadplan.core.header import LoadPlanError

OPTIONS_NAME = "loadplan-synth.json"

_FORMAT = 1  # of OPTIONS_NAME and of everything that follows from the options

_MIN_SIZE = 8 << 20
_FRACTIONS = (0.05, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What a synthetic checkpoint looks like; equal options give equal bytes.

    Args:
        size: bytes of all tensors, met within 15 %; at least 8 MiB.
        engram_fraction: share of ``size`` that lies in the two Engram tables.
        seed: 64-bit seed of the content; names and shapes do not depend on it.
        mixed_engram: the tables lie in files that hold other tensors too, instead of
            in one file each.
        index: write ``model.safetensors.index.json``.
        draft: include the DSpark draft, ``mtp.*``.
        shards: number of safetensors files, the tables' included; None: one for each
            GiB, 4 to 46, and one for each table.

    Raises:
        LoadPlanError: a value is out of its range.
    """

    size: int = 64 << 20
    engram_fraction: float = 0.4
    seed: int = 0
    mixed_engram: bool = False
    index: bool = True
    draft: bool = True
    shards: int | None = None

    def __post_init__(self) -> None:
        low, high = _FRACTIONS
        fewest = 1 if self.mixed_engram else 3
        for name, good, rule in (
            ("size", self.size >= _MIN_SIZE, f"at least {_MIN_SIZE} bytes (8 MiB)"),
            (
                "engram_fraction",
                low <= self.engram_fraction <= high,
                f"{low} to {high}",
            ),
            ("seed", 0 <= self.seed < 1 << 64, "0 to 2**64 - 1"),
            (
                "shards",
                self.shards is None or self.shards >= fewest,
                f"at least {fewest} files with mixed_engram {self.mixed_engram}",
            ),
        ):
            if not good:
                raise LoadPlanError(
                    f"{name}: got {getattr(self, name)!r}, expected {rule}"
                )


def read_options(folder: Path) -> SynthOptions | None:
    """Return the options that a finished ``folder`` was made with, None if not ours.

    Raises:
        LoadPlanError: the file is unreadable or of another format version.
    """
    path = Path(folder) / OPTIONS_NAME
    return parse_options(path) if path.exists() else None


def option_values(options: SynthOptions) -> dict[str, object]:
    """What ``parse_options`` reads again, as a value for JSON."""
    return {"format": _FORMAT, "options": dataclasses.asdict(options)}


def parse_options(path: Path) -> SynthOptions:
    """Return the options that ``path`` holds.

    Raises:
        LoadPlanError: it is unreadable or of another format version.
    """
    try:
        values = json.loads(path.read_text())
        if values["format"] != _FORMAT:
            raise ValueError(f"format {values['format']!r}")
        return SynthOptions(**values["options"])
    except (ValueError, TypeError, KeyError) as error:
        raise LoadPlanError(
            f"{path}: got {error}, expected the options of a synthetic checkpoint of "
            f"format {_FORMAT}; remove the folder and make it again"
        ) from error
