"""The engine-neutral core: headers, the plan, and the readers that carry it out."""

from .header import (
    FileHeader,
    LoadPlanError,
    TensorHeader,
    read_header,
    read_headers,
    read_index,
)
from .plan import (
    LoadPlan,
    PlannedTensor,
    Route,
    RouteTotal,
    UnloadableTensorError,
    make_plan,
)
from .ranks import Machine, plan_together, together
from .read import SafetensorsRowSource, ShortFileError
from .report import log_plan
from .ring import ring_budget, small_io_depth
from .stream import run_plan

VERSION = "0.1.0"

__all__ = [
    "FileHeader",
    "LoadPlan",
    "LoadPlanError",
    "Machine",
    "PlannedTensor",
    "Route",
    "RouteTotal",
    "SafetensorsRowSource",
    "ShortFileError",
    "TensorHeader",
    "UnloadableTensorError",
    "VERSION",
    "log_plan",
    "make_plan",
    "plan_together",
    "read_header",
    "read_headers",
    "read_index",
    "ring_budget",
    "run_plan",
    "small_io_depth",
    "together",
]
