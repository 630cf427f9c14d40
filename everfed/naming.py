"""Names in recipes: a user's own code as `package.module:Name`, options by name, and what was probably meant by a wrong
name."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from everfed.errors import SettingError

Made = TypeVar("Made")
# where modules, and objects (`module:Name`), that recipes and saved models may name have moved to; the longest prefix
# counts, and a move may lead to the next one
_MOVED = {
    "everfed.parts": "everfed.methods",
    "everfed.parts.aggregate.average": "everfed.methods.aggregate.fedavg",
    "everfed.parts.memory": "everfed.methods.replay",
    "everfed.parts.memory.buffer": "everfed.methods.replay.memory",
    "everfed.parts.memory.replay": "everfed.methods.replay.er",
    "everfed.parts.personal.ala": "everfed.methods.personal.fedala",
    "everfed.parts.personal.dbe": "everfed.methods.personal.feddbe",
    "everfed.parts.regularise.curvature": "everfed.methods.regularise.fedcurv",
    "everfed.parts.regularise.proximal": "everfed.methods.regularise.fedprox",
    "everfed.parts.regularise.synaptic": "everfed.methods.regularise.si",
    "everfed.parts.selection": "everfed.methods.replay",
    "everfed.parts.shared": "everfed.methods.common",
    "everfed.monitor": "everfed.methods.monitor",
    "everfed.detection": "everfed.data.detection",
    "everfed.methods.monitor.drift": "everfed.methods.monitor",
    "everfed.methods.monitor.features": "everfed.methods.monitor",
    "everfed.methods.replay.gradient_rows": "everfed.methods.replay.sample_gradients",
    "everfed.methods.replay.gss_policies": "everfed.methods.replay.gss",
    "everfed.methods.replay.policies": "everfed.methods.replay.random_selection",
    "everfed.methods.replay.policies:Herding": "everfed.methods.replay.herding:Herding",
    "everfed.methods.replay.policies:ReFed": "everfed.methods.replay.refed:ReFed",
    "everfed.methods.replay.policy": "everfed.methods.replay.memory",
}
_ALLOWED: ContextVar[tuple[str, ...] | None] = ContextVar("allowed", default=None)  # None: every module


class NameProblem(SettingError):
    """`package.module:Name` that does not lead to an object."""


class NotAllowed(NameProblem):
    """A name that what others wrote may not use here."""


@contextmanager
def restricted(modules: Sequence[str]) -> Iterator[None]:
    """In the body only these modules, and those inside them, may be named; for recipes that others wrote."""
    token = _ALLOWED.set(tuple(modules))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def _require_allowed(module: str, name: str, key: str) -> None:
    allowed = _ALLOWED.get()
    if allowed is not None and not any(module == one or module.startswith(f"{one}.") for one in allowed):
        raise NotAllowed(
            f"{key} = {name!r}: the module {module!r} is not allowed here (policy code of `everfed join`; "
            "allow_code of everfed.load and `everfed export`)"
        )


def _require_defined_here(found: Any, module: str, name: str, key: str) -> None:
    """What a module of everfed's has imported for its own use may not be named in what others wrote."""
    home = str(getattr(found, "__module__", module))
    if _ALLOWED.get() is not None and module.startswith("everfed.") and not home.startswith("everfed."):
        raise NotAllowed(f"{key} = {name!r} is not everfed's own, but of {home!r}")


def split_names(text: str | None) -> list[str]:
    """The names of a list with commas, as on the command line; none where there is no list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean a, b or c?`: the three known names that come nearest."""
    found = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=0.0)
    *others, last = found
    return f" Did you mean {', '.join(others)} or {last}?" if others else f" Did you mean {last}?"


def current_name(name: str) -> str:
    """What `package.module:Name`, or a module, is called today, if it is one of everfed's that moved."""
    for old in sorted(_MOVED, key=len, reverse=True):
        if name == old or name.startswith((f"{old}.", f"{old}:")):
            return current_name(_MOVED[old] + name[len(old) :])
    return name


def load_object(name: str, key: str) -> Any:
    """The object called `name`; `key` is the recipe key that holds it. The current folder is searched too."""
    module_name, _, attribute = current_name(name).partition(":")
    if not module_name or not attribute:
        raise NameProblem(f"{key} must look like package.module:Name; got {name!r}")
    _require_allowed(module_name, name, key)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise NameProblem(f"{key} = {name!r}: module {module_name!r} cannot be imported: {error}") from error
    if not hasattr(module, attribute):
        public = ", ".join(n for n in dir(module) if not n.startswith("_"))
        raise NameProblem(f"{key} = {name!r}: module {module_name!r} has no {attribute!r}; it has {public}")
    found = getattr(module, attribute)
    _require_defined_here(found, module_name, name, key)
    return found


def with_options(
    cls: type[Made], options: Mapping[str, Any], prefix: str, of: str = "", error: type[ValueError] = ValueError
) -> Made:
    """The dataclass `cls` with these options. Raises `error`, which names the key as `prefix`.OPTION. of: what has the
    options, where the message should name it."""
    allowed = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key in options:
        if key not in allowed:
            raise error(f"{prefix}.{key} is not an option{of}; it has {', '.join(allowed) or 'none'}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as problem:
        raise error(f"{prefix}.{problem}") from problem
