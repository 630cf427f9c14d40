"""What the author of a method or a stream writes against: `from everfed.method import Part, Client, Step`."""

from __future__ import annotations

from everfed.core.context import Facts, TrainOptions
from everfed.core.data import Data, Schedule, Table
from everfed.core.handle import Client, Server
from everfed.core.layout import Entry, Layout
from everfed.core.message import MODEL, Cached, Model, PerClient, State, Values
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.option import option
from everfed.core.part import (
    BOUNDARIES,
    CLASSES,
    EAGER,
    HELD_OUT,
    HISTORY,
    PLAIN,
    SHARED,
    TASK_ID,
    TOGETHER,
    WHOLE,
    AddsParameters,
    Aggregator,
    Part,
    Personal,
    Protection,
    Tables,
    overrides,
)
from everfed.core.phase import ALWAYS, BEGIN, END, FIRST, Cohort, Collect, Mean, Phase, Reducer, Sum, When, every
from everfed.core.replica import Gradient
from everfed.core.step import Batch, Step, Substep
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.errors import CompositionError

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
    "PLAIN",
    "SHARED",
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
    "Layout",
    "Mean",
    "Method",
    "Model",
    "Optimizer",
    "Part",
    "PerClient",
    "Personal",
    "Phase",
    "Protection",
    "Reducer",
    "RoundPlan",
    "Schedule",
    "Server",
    "State",
    "Step",
    "Stream",
    "Substep",
    "Sum",
    "Table",
    "Tables",
    "TrainOptions",
    "Tree",
    "Values",
    "When",
    "compose",
    "every",
    "option",
    "overrides",
]
