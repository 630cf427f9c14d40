"""everfed: continual federated learning. One shared model across many clients whose data never leaves them.

    import everfed

    result = everfed.run("demo", method="fedgp+der")
    table = everfed.compare("demo", ["fedavg", "der", "fedgp+der"], seeds=[0, 1])

What the author of a method or a stream needs is in `everfed.method`.

Importing everfed is light: what needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everfed import streams
    from everfed.api import LoadedRun, check, forget, load, resume, run
    from everfed.errors import CompositionError, RecipeError, UserError
    from everfed.experiments import Comparison, compare, sweep
    from everfed.experiments.papers.reproducing import reproduce
    from everfed.recipe import Recipe
    from everfed.recipe import read as read_recipe
    from everfed.reports.html import write as report
    from everfed.reports.result import Result

__version__ = "1.0.0"

_PLACES = {  # name -> module, and what it is called there
    "Comparison": "experiments:Comparison",
    "CompositionError": "errors:CompositionError",
    "LoadedRun": "api:LoadedRun",
    "Recipe": "recipe:Recipe",
    "RecipeError": "errors:RecipeError",
    "Result": "reports.result:Result",
    "UserError": "errors:UserError",
    "check": "api:check",
    "compare": "experiments:compare",
    "forget": "api:forget",
    "load": "api:load",
    "method": "method:",
    "read_recipe": "recipe:read",
    "report": "reports.html:write",
    "reproduce": "experiments.papers.reproducing:reproduce",
    "resume": "api:resume",
    "run": "api:run",
    "streams": "streams:",
    "sweep": "experiments:sweep",
}

__all__ = [
    "Comparison",
    "CompositionError",
    "LoadedRun",
    "Recipe",
    "RecipeError",
    "Result",
    "UserError",
    "__version__",
    "check",
    "compare",
    "forget",
    "load",
    "read_recipe",
    "report",
    "reproduce",
    "resume",
    "run",
    "streams",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    found = import_module(f"everfed.{module}")
    globals()[name] = value = getattr(found, attribute) if attribute else found
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
