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

from everfed import wheels
from everfed.errors import SettingError, UserError, described

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
_FOLDER: ContextVar[tuple[Path | None] | None] = ContextVar("folder", default=None)  # None: every file


class NameProblem(SettingError):
    """`package.module:Name` that does not lead to an object."""


class NotAllowed(NameProblem):
    """A name that what others wrote may not use here."""


@contextmanager
def restricted(names: Sequence[str]) -> Iterator[None]:
    """In the body only these may be named, for recipes that others wrote: modules with those inside them, and
    `module:Name` for that object alone."""
    token = _ALLOWED.set(tuple(names))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@contextmanager
def files_inside(folder: Path | None) -> Iterator[None]:
    """In the body files may be named in this folder only, None for none at all, and nothing is loaded from the network;
    for recipes that others wrote."""
    token = _FOLDER.set((folder,))
    try:
        yield
    finally:
        _FOLDER.reset(token)


def places(name: str, folder: Path | None, *others: str) -> list[Path]:
    """Where the file or folder that a recipe calls `name` may be: at that path, in the data folder, and there under the
    `others`; `wheel:NAME` is where pip put it. In what others wrote: in the folder of `files_inside`, or a wheel, and
    nowhere else. Raises NotAllowed."""
    if name.startswith(wheels.PREFIX):
        return [wheels.place_of(name)]
    allowed = _FOLDER.get()
    if allowed is None:
        own = Path(name).expanduser()
        return list(dict.fromkeys([own, *(folder / one for one in (name, *others) if folder)]))
    path = Path(name)
    if path.is_absolute() or name.startswith("~") or ".." in path.parts:
        raise NotAllowed(f"{name!r}: only files inside the client's data folder may be named here")
    (inside,) = allowed
    return [inside / one for one in (name, *others)] if inside else []


def file_named(name: str) -> Path:
    """The file of a recipe that is not looked for in the data folder; in what others wrote it is, and nowhere else.
    Raises NotAllowed."""
    found = places(name, None)
    if not found:
        raise NotAllowed(f"{name!r}: this client has no data folder, in which alone files may be named here")
    return found[0]


def require_network(name: str) -> None:
    """Raises NotAllowed where nothing may be loaded from the network."""
    if _FOLDER.get() is not None:
        raise NotAllowed(f"{name!r} would be loaded from the network, which is not allowed here")


def _require_allowed(module: str, attribute: str, name: str, key: str) -> None:
    allowed = _ALLOWED.get()
    if allowed is None or f"{module}:{attribute}" in allowed:
        return
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        raise NotAllowed(
            f"{key} = {name!r}: the module {module!r} is not allowed here, since its code would run. If you trust it, "
            f"name it: everfed.load(folder, allow_code=[{module!r}]), `everfed export --allow-code {module}`, `code` "
            "in the policy of `everfed join`"
        )


def _require_defined_here(found: Any, module: str, name: str, key: str) -> None:
    """Of everfed's own modules, what others wrote may name classes: not functions, which may open files, and not what
    a module has imported for its own use."""
    allowed, home = _ALLOWED.get(), str(getattr(found, "__module__", module))
    if allowed is None or not module.startswith("everfed.") or name in allowed:
        return
    if not home.startswith("everfed.") or not isinstance(found, type):
        raise NotAllowed(f"{key} = {name!r} is no class of everfed's own, but of {home!r}")


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
    """The object called `name`; `key` is the recipe key that holds it. The current folder is searched too; the recipe's
    is not."""
    module_name, _, attribute = current_name(name).partition(":")
    if not module_name or not attribute:
        raise NameProblem(f"{key} must look like package.module:Name; got {name!r}")
    _require_allowed(module_name, attribute, name, key)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:  # of the user's own module
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        where = f"it is neither in the current folder, {here}, nor in PYTHONPATH, nor installed"
        own = f"SyntaxError: {error}" if isinstance(error, SyntaxError) else described(error)
        why = where if absent else str(error) if isinstance(error, ImportError) else own
        raise NameProblem(f"{key} = {name!r}: module {module_name!r} cannot be imported: {why}") from error
    if not hasattr(module, attribute):
        made = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        public = [n for n in made if not n.startswith("_")]
        meant = f"{nearest(attribute, public)} It has {', '.join(public)}" if public else ""
        raise NameProblem(f"{key} = {name!r}: module {module_name!r} has no {attribute!r}.{meant}")
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
