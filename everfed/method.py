"""Everything that the author of a method or a stream writes against: `from everfed.method import Part, Step`."""

from __future__ import annotations

from everfed.core.context import Context, Facts, TrainOptions
from everfed.core.data import Data
from everfed.core.layout import Entry, Layout
from everfed.core.message import MODEL, Each, Message, Once
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import (
    BOUNDARIES,
    CLASSES,
    HELD_OUT,
    HISTORY,
    TASK_ID,
    TOGETHER,
    Part,
    Protection,
    Tables,
    options_of,
    overrides,
    refuse_personal,
)
from everfed.core.phase import ALWAYS, BEGIN, END, FIRST, Cohort, Model, Phase, Position, Slots, State, every
from everfed.core.reduce import Collect, Mean, Reducer, Sum
from everfed.core.schedule import Schedule, Table
from everfed.core.step import Batch, Step, Substep
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Fitted, Trainer
from everfed.core.tree import Tree, on_device
from everfed.errors import CompositionError

__all__ = [
    "ALWAYS",
    "BEGIN",
    "BOUNDARIES",
    "CLASSES",
    "END",
    "FIRST",
    "HELD_OUT",
    "HISTORY",
    "MODEL",
    "TASK_ID",
    "TOGETHER",
    "Batch",
    "Cohort",
    "Collect",
    "CompositionError",
    "Context",
    "Data",
    "Each",
    "Entry",
    "Facts",
    "Fitted",
    "Layout",
    "Mean",
    "Message",
    "Method",
    "Model",
    "Once",
    "Optimizer",
    "Part",
    "Phase",
    "Position",
    "Protection",
    "Reducer",
    "RoundPlan",
    "Schedule",
    "Slots",
    "State",
    "Step",
    "Stream",
    "Substep",
    "Sum",
    "Table",
    "Tables",
    "TrainOptions",
    "Trainer",
    "Tree",
    "compose",
    "every",
    "on_device",
    "options_of",
    "overrides",
    "refuse_personal",
]
