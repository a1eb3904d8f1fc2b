"""The engine-neutral core: headers, the plan, and the readers that carry it out."""

from .header import (
    FileHeader,
    LoadPlanError,
    TensorHeader,
    read_header,
    read_headers,
    read_index,
)
from .plan import LoadPlan, PlannedTensor, Route, RouteTotal, make_plan
from .read import SafetensorsRowSource, ShortFileError
from .stream import run_plan

VERSION = "0.1.0"

__all__ = [
    "FileHeader",
    "LoadPlan",
    "LoadPlanError",
    "PlannedTensor",
    "Route",
    "RouteTotal",
    "SafetensorsRowSource",
    "ShortFileError",
    "TensorHeader",
    "VERSION",
    "make_plan",
    "read_header",
    "read_headers",
    "read_index",
    "run_plan",
]
