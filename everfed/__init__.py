"""everfed: continual federated learning. One shared model across many clients whose data never leaves them.

    import everfed

    result = everfed.run(everfed.read_recipe("demo", method="fedgp+der"))
    model = everfed.load(result.folder).model

Importing everfed is light: what needs torch is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everfed.api import LoadedRun, Result, check, load, resume, run
    from everfed.core.method import Method, compose
    from everfed.core.part import Part
    from everfed.errors import RecipeError, UserError
    from everfed.recipe import Recipe
    from everfed.recipe import read as read_recipe

__version__ = metadata.version("everfed")

# name here -> (module, name there)
_PUBLIC = {
    "LoadedRun": ("everfed.api", "LoadedRun"),
    "Method": ("everfed.core.method", "Method"),
    "Part": ("everfed.core.part", "Part"),
    "Recipe": ("everfed.recipe", "Recipe"),
    "RecipeError": ("everfed.errors", "RecipeError"),
    "Result": ("everfed.api", "Result"),
    "UserError": ("everfed.errors", "UserError"),
    "check": ("everfed.api", "check"),
    "compose": ("everfed.core.method", "compose"),
    "load": ("everfed.api", "load"),
    "read_recipe": ("everfed.recipe", "read"),
    "resume": ("everfed.api", "resume"),
    "run": ("everfed.api", "run"),
}

__all__ = [
    "LoadedRun",
    "Method",
    "Part",
    "Recipe",
    "RecipeError",
    "Result",
    "UserError",
    "__version__",
    "check",
    "compose",
    "load",
    "read_recipe",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
