"""``config.json`` of a checkpoint: the little that is asked of it, or a named error.

A load reads it in the engine, late; what cannot be read there is told early here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadplan.core.header import LoadPlanError
from loadplan.core.small_file import read_json

CONFIG_NAME = "config.json"
_EXPECTED = "a model's configuration, a JSON object in UTF-8"
# The largest known have some 100 KB.
_MOST_BYTES = 16 << 20


def read_config(folder: Path) -> dict[str, Any] | None:
    """The configuration in ``folder``, None where there is none.

    Raises:
        LoadPlanError: it is no regular file, no JSON object, or too large.
    """
    return read_json(
        str(folder / CONFIG_NAME),
        expected=_EXPECTED,
        most=_MOST_BYTES,
        error=LoadPlanError,
    )


def hidden_layers(folder: Path) -> int | None:
    """``num_hidden_layers`` of the (text) model, None if nothing tells.

    Only DeepSeek-V3's naming of a draft needs it.

    Raises:
        LoadPlanError: as for ``read_config``, or a value of another type.
    """
    config = read_config(folder)
    if config is None:
        return None
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, dict):
        raise _wrong(folder, "text_config", inner, "a JSON object")
    value = (config if inner is None else inner).get("num_hidden_layers")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(folder, "num_hidden_layers", value, "a whole number, 0 or more")
    return value


def _wrong(folder: Path, key: str, value: object, expected: str) -> LoadPlanError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return LoadPlanError(
        f"{folder / CONFIG_NAME}: {key} is {shown}, expected {expected}; download it "
        "again"
    )
