"""everfed: continual federated learning. One shared model across many clients whose data never leaves them.

    import everfed

    result = everfed.run("demo", method="fedgp+der")
    table = everfed.compare("demo", ["fedavg", "der", "fedgp+der"], seeds=[0, 1])

Everything that the author of a method or a stream needs is here too: `from everfed import Part, Step`.

Importing everfed is light: what needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everfed import report
    from everfed.api import LoadedRun, check, load, resume, run
    from everfed.comparison import Comparison, compare, sweep
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
    from everfed.errors import CompositionError, RecipeError, UserError
    from everfed.recipe import Recipe
    from everfed.recipe import read as read_recipe
    from everfed.results import Result

__version__ = metadata.version("everfed")

# module -> the names that everfed takes from it
_PUBLIC = {
    "api": "LoadedRun check load resume run",
    "comparison": "Comparison compare sweep",
    "core.context": "Context Facts TrainOptions",
    "core.data": "Data",
    "core.layout": "Entry Layout",
    "core.message": "MODEL Each Message Once",
    "core.method": "Method compose",
    "core.optimizer": "Optimizer",
    "core.part": "BOUNDARIES CLASSES HELD_OUT HISTORY TASK_ID TOGETHER Part Protection Tables "
    "options_of overrides refuse_personal",
    "core.phase": "ALWAYS BEGIN END FIRST Cohort Model Phase Position Slots State every",
    "core.reduce": "Collect Mean Reducer Sum",
    "core.schedule": "Schedule Table",
    "core.step": "Batch Step Substep",
    "core.stream": "RoundPlan Stream",
    "core.trainer": "Fitted Trainer",
    "core.tree": "Tree on_device",
    "errors": "CompositionError RecipeError UserError",
    "recipe": "Recipe",
    "results": "Result",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

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
    "Comparison",
    "CompositionError",
    "Context",
    "Data",
    "Each",
    "Entry",
    "Facts",
    "Fitted",
    "Layout",
    "LoadedRun",
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
    "Recipe",
    "RecipeError",
    "Reducer",
    "Result",
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
    "UserError",
    "__version__",
    "check",
    "compare",
    "compose",
    "every",
    "load",
    "on_device",
    "options_of",
    "overrides",
    "read_recipe",
    "refuse_personal",
    "report",
    "resume",
    "run",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "read_recipe":
        value = import_module("everfed.recipe").read
    elif name == "report":  # a package that may be called
        value = import_module("everfed.report")
    elif name in _MODULES:
        value = getattr(import_module(f"everfed.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
