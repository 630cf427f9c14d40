"""What the author of a method, a policy or a stream writes against: `from everfed.method import Part, Client, Step`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from everfed.core.context import Facts
from everfed.core.data import Data, Schedule, Table
from everfed.core.handle import Client, Server
from everfed.core.layout import AddsParameters, Entry, Layout
from everfed.core.message import MODEL, Cached, Model, PerClient, State, Values
from everfed.core.method import Method, compose
from everfed.core.metric import Metric, Scored
from everfed.core.optimizer import Optimizer
from everfed.core.option import TrainOptions, option
from everfed.core.part import (
    BOUNDARIES,
    CLASSES,
    EAGER,
    HELD_OUT,
    HISTORY,
    PLAIN,
    SHARED,
    STALE,
    TASK_ID,
    TOGETHER,
    WHOLE,
    Aggregator,
    Part,
    Personal,
    Protection,
    Tables,
    overrides,
)
from everfed.core.phase import (
    ALWAYS,
    BEGIN,
    END,
    FIRST,
    ON_REQUEST,
    Cohort,
    Collect,
    Mean,
    Phase,
    Reducer,
    Sum,
    Tells,
    When,
    every,
)
from everfed.core.replica import Gradient
from everfed.core.step import Batch, Step, Substep
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.methods.replay.memory import Policy, Pool
    from everfed.streams.incremental import IncrementalStream
    from everfed.streams.planned import PlannedStream

_ABOVE = {  # names of packages that import this module themselves, looked up when they are used
    "IncrementalStream": "everfed.streams.incremental",
    "PlannedStream": "everfed.streams.planned",
    "Policy": "everfed.methods.replay.memory",
    "Pool": "everfed.methods.replay.memory",
}

__all__ = [
    "ALWAYS",
    "BEGIN",
    "BOUNDARIES",
    "CLASSES",
    "EAGER",
    "END",
    "FIRST",
    "HELD_OUT",
    "HISTORY",
    "MODEL",
    "ON_REQUEST",
    "PLAIN",
    "SHARED",
    "STALE",
    "TASK_ID",
    "TOGETHER",
    "WHOLE",
    "AddsParameters",
    "Aggregator",
    "Batch",
    "Cached",
    "Client",
    "Cohort",
    "Collect",
    "CompositionError",
    "Data",
    "Entry",
    "Facts",
    "Fitted",
    "Gradient",
    "IncrementalStream",
    "Layout",
    "Mean",
    "Method",
    "Metric",
    "Model",
    "Optimizer",
    "Part",
    "PerClient",
    "Personal",
    "Phase",
    "PlannedStream",
    "Policy",
    "Pool",
    "Protection",
    "Reducer",
    "RoundPlan",
    "Schedule",
    "Scored",
    "Server",
    "State",
    "Step",
    "Stream",
    "Substep",
    "Sum",
    "Table",
    "Tables",
    "Tells",
    "TrainOptions",
    "Tree",
    "Values",
    "When",
    "compose",
    "every",
    "option",
    "overrides",
]


def __getattr__(name: str) -> Any:
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ABOVE[name]), name)
