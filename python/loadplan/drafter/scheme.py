"""How a head is quantised, and how a checkpoint's configuration says so.

The configuration is compressed-tensors': ``config_groups`` with ``targets`` (a module's
name, ``re:`` and a pattern, or a class) and ``weights``, and ``ignore``.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

from loadplan.core.header import LoadPlanError

METHOD = "compressed-tensors"
GROUP = "drafter_head"
"""The name of the group that this tool adds."""

_FORMATS = {"int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
_MIXED = "mixed-precision"
_NVFP4_GROUP = 16
_DEFAULT_GROUP = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """``kind`` is int4 or nvfp4; ``group_size`` elements of a row share a scale."""

    kind: str
    group_size: int
    symmetric: bool

    @property
    def format(self) -> str:
        """compressed-tensors' name of the packing."""
        return _FORMATS[self.kind]

    def weights(self) -> dict[str, Any]:
        """The arguments of compressed-tensors' QuantizationArgs."""
        if self.kind == "nvfp4":
            return {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": self.group_size,
                "symmetric": True,
                "dynamic": False,
            }
        return {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "dynamic": False,
        }

    def check(self, *, width: int) -> None:
        """Raises LoadPlanError where a row of ``width`` cannot be cut into groups."""
        # Eight 4-bit numbers fill the 32-bit word that a row is packed into.
        if width % self.group_size or width % 8:
            raise LoadPlanError(
                f"rows of {width} elements do not fall into groups of "
                f"{self.group_size} and words of 8, expected a divisor; pass another "
                "--group-size"
            )


def quantization_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """What config.json says about quantisation, None where it says nothing."""
    found = config.get("quantization_config") or config.get("compression_config")
    return found if isinstance(found, dict) and found else None


def check_method(quantization: dict[str, Any] | None) -> None:
    """Raises LoadPlanError where the checkpoint's format is not compressed-tensors."""
    method = METHOD if quantization is None else quantization.get("quant_method")
    if method != METHOD:
        raise LoadPlanError(
            f"quant_method is {method!r}, expected {METHOD!r} or no quantisation: an "
            "engine reads one method per checkpoint; convert it first"
        )


def choose(
    quantization: dict[str, Any] | None,
    head: str,
    *,
    kind: str,
    group_size: int | None = None,
    symmetric: bool | None = None,
) -> Scheme:
    """The scheme for the head: what is given, else what the checkpoint uses itself.

    Raises:
        LoadPlanError: NVFP4 with groups of another size or a zero point.
    """
    check_method(quantization)
    if kind == "nvfp4":
        if group_size not in (None, _NVFP4_GROUP) or symmetric is False:
            raise LoadPlanError(
                f"NVFP4 has groups of {_NVFP4_GROUP} and no zero point; leave out "
                "--group-size and --asymmetric"
            )
        return Scheme("nvfp4", _NVFP4_GROUP, True)
    own = _own_int4(quantization, head)
    if group_size is None:
        group_size = own.get("group_size") or _DEFAULT_GROUP
    if symmetric is None:
        symmetric = own.get("symmetric", True)
    return Scheme("int4", group_size, symmetric)


def with_head(
    quantization: dict[str, Any] | None, head: str, scheme: Scheme
) -> dict[str, Any]:
    """The configuration with the head under ``scheme``, everything else as it was."""
    check_method(quantization)
    new = copy.deepcopy(quantization or {})
    groups = new.setdefault("config_groups", {})
    own = {
        "format": scheme.format,
        "input_activations": None,
        "output_activations": None,
        "targets": [f"re:.*{re.escape(head.rpartition('.')[2])}$"],
        "weights": scheme.weights(),
    }
    groups.pop(GROUP, None)
    for name in [name for name in groups if _names(groups[name], head)]:
        targets = [t for t in groups[name]["targets"] if not _is_name_of(t, head)]
        if targets:
            groups[name]["targets"] = targets
        else:
            del groups[name]
    old = new.get("format")
    formats = {group.get("format") or old for group in groups.values()}
    # First: of the groups that match a module, engines take the first one.
    new["config_groups"] = {GROUP: own} | {
        name: {**group, "format": group.get("format") or old}
        for name, group in groups.items()
    }
    formats.add(scheme.format)
    new["format"] = scheme.format if len(formats) == 1 else _MIXED
    new["ignore"] = [t for t in new.get("ignore") or [] if not _is_name_of(t, head)]
    new["quant_method"] = METHOD
    new.setdefault("quantization_status", "compressed")
    return new


def of_head(quantization: dict[str, Any] | None, head: str) -> Scheme | None:
    """The scheme that the configuration gives the head, None for a floating one.

    Raises:
        LoadPlanError: it is none of those that this tool knows.
    """
    if quantization is None:
        return None
    if any(_is_name_of(target, head) for target in quantization.get("ignore") or []):
        return None
    for name, group in (quantization.get("config_groups") or {}).items():
        if _names(group, head):
            return _scheme(name, group)
    return None


def _scheme(name: str, group: dict[str, Any]) -> Scheme:
    weights = group.get("weights") or {}
    size, symmetric = weights.get("group_size"), weights.get("symmetric", True)
    if weights.get("num_bits") == 4 and isinstance(size, int) and size > 0:
        if weights.get("type", "int") == "int":
            return Scheme("int4", size, bool(symmetric))
        if weights.get("type") == "float" and size == _NVFP4_GROUP:
            return Scheme("nvfp4", size, True)
    raise LoadPlanError(
        f"the head's group {name!r} has weights {weights}, expected int4 in groups or "
        "NVFP4"
    )


def _own_int4(quantization: dict[str, Any] | None, head: str) -> dict[str, Any]:
    """The weights' arguments of the head's group, else of any group with int4."""
    groups = list(((quantization or {}).get("config_groups") or {}).values())
    groups.sort(key=lambda group: not _names(group, head))
    for group in groups:
        weights = group.get("weights") or {}
        if weights.get("num_bits") == 4 and weights.get("type", "int") == "int":
            return weights
    return {}


def _names(group: dict[str, Any], head: str) -> bool:
    return any(_is_name_of(target, head) for target in group.get("targets") or [])


def _is_name_of(target: str, head: str) -> bool:
    if not target.startswith("re:"):
        return target in (head, head.rpartition(".")[2])
    try:
        return re.match(target[3:], head) is not None
    except re.error as error:
        raise LoadPlanError(
            f"the quantisation's target {target!r} is no pattern: {error}"
        ) from error
