"""What a training step may change of the parts' states: tensors, in place, of parts that define `after`.

A step may be captured and replayed, so it can neither add a key nor put another value in the place of one; and only
what such a part `changes` is copied before training, so that anything else it wrote would reach other holders of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from everfed.core.message import State
from everfed.core.part import Part, overrides
from everfed.core.tree import Tree, clone, leaves
from everfed.errors import CompositionError

Seen = dict[str, tuple[Any, int]]  # path -> what lies there, and how often it was changed in place


def private(parts: Sequence[Part], state: State) -> State:
    """The state with copies of what steps change in place; the rest, which may be large, is shared."""
    return {**state, **{name: {**state[name], **clone(own)} for name, own in changing(parts, state).items()}}


def changing(parts: Sequence[Part], state: State) -> State:
    """Of the state, what a training step changes in place."""
    found = {part.name: part.changes for part in parts if part.name in state and overrides(part, "after")}
    return {
        name: {key: value for key, value in state[name].items() if changes is None or key in changes}
        for name, changes in found.items()
    }


def seen(state: Tree) -> Seen:
    """A part's state as it is now. Nothing waits for the device."""
    return {path: (leaf, leaf._version if isinstance(leaf, Tensor) else 0) for path, leaf in leaves(state)}


def check_step(part: Part, before: Seen, state: Tree, may_change: Mapping[str, Any]) -> None:
    """Raises CompositionError for a part whose step did to its state, `before` the step, what would be lost."""
    now = seen(state)
    for path in now.keys() | before.keys():
        if path not in before:
            raise _refused(
                part,
                f"wrote the new key {path!r} of its state in a training step, where it is lost. Put its first value "
                f"there before the first step, in `start` or `plan` (`client.state[{path!r}] = ...`) or in `init`, and "
                "change that tensor in place in `after`",
            )
        if path not in now or now[path][0] is not before[path][0]:
            what = "replaced" if path in now else "removed"
            raise _refused(
                part,
                f"{what} {path!r} of its state in a training step, which cannot be captured. Change the tensor in "
                f"place: step.state[{path!r}].copy_(...), .add_(...), ...",
            )
        if now[path][1] != before[path][1] and path.partition("/")[0] not in may_change:
            why = "`changes` does not name it" if overrides(part, "after") else "it defines no `after`"
            raise _refused(
                part,
                f"changed {path!r} of its state in a training step, but {why}, so that it has no copy of its own. "
                "A part changes its state in `after`, and `changes`, where it is given, names what",
            )


def _refused(part: Part, what: str) -> CompositionError:
    return CompositionError(f"part {part.name!r} ({type(part).__qualname__}) {what}")
