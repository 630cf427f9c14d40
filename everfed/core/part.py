"""A part: one idea of a method, as options and hooks. A method is a composition of parts.

A part is a frozen dataclass without state. Its state is a dict of tensors and plain values, kept by the engine for the
server and for each client, paged to disk, checkpointed and sent. A hook outside the training step takes one handle
(`Client` or `Server`), reads and writes its own state through it, and returns its result. Every hook is optional. The
hooks of `Part` belong to the phase `train`; a phase of a part's own (`Phase`) names the functions that carry it out.

Hooks inside the training step may be captured and replayed on a GPU: static shapes, no host synchronisation, no branch
on data. Discrete draws are made ahead, in `plan`, and arrive as integer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from everfed.core.data import Table
from everfed.core.layout import AddsParameters
from everfed.core.message import Model, State, Values
from everfed.core.optimizer import Optimizer
from everfed.core.option import HasOptions
from everfed.core.phase import Phase, Reducer
from everfed.core.tree import Tree, clone, leaves
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.core.client import Reply
    from everfed.core.data import Schedule
    from everfed.core.handle import Client, Server
    from everfed.core.replica import Gradient
    from everfed.core.step import Batch, Step

Tables = dict[str, Table]
Reduced = dict[str, dict[str, Any]]  # part -> reply key -> reduced value
Weights = dict[str, dict[str, float]]

# what `needs` may name beside other parts
BOUNDARIES = "boundaries"  # must know when a task begins or ends
TASK_ID = "task_id"  # must know which task it is in
HISTORY = "history"  # reads the data of earlier tasks (an upper bound, not a method for real clients)
HELD_OUT = "held_out"  # measures on test sets (in a simulation, not a method for real clients)
TOGETHER = "together"  # all clients must change tasks in the same round
CLASSES = "classes"  # every sample must have one class: neither several labels, nor numbers, tokens or boxes
EAGER = "eager"  # its steps cannot be captured in a CUDA graph: they run as they come
SHARED = "shared"  # sends vectors over all parameters: no part may keep some of them on the clients
WHOLE = "whole"  # keeps vectors over all parameters: no part may train only some of them at a time
STALE = "stale"  # for replies that arrive rounds after the model was sent: a stream has them, or it does not
PLAIN = "plain"  # compares features of the network itself: no part may change its forward pass


class Kept(HasOptions):
    """Options that stay as they are once a method is composed of them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_composed"):
            raise changed(self, name)
        super().__setattr__(name, value)


def changed(part: Any, attribute: str) -> CompositionError:
    """The error for a part that keeps something on itself."""
    return CompositionError(
        f"part {part.name!r} ({type(part).__qualname__}) changed its attribute {attribute!r} during the run. One part "
        "serves all clients, on several processes, and is not saved: its numbers would be wrong. Keep this in "
        f"client.state[{attribute!r}] or server.state[{attribute!r}]"
    )


@dataclass(frozen=True)
class Part(Kept):
    """Base of all parts. `name` is the namespace of its state, its messages and its options."""

    name: ClassVar[str] = ""
    changes: ClassVar[frozenset[str] | None] = None  # of its state, what steps change in place; None: all of it

    # set-up -----------------------------------------------------------------------------------------------------
    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str] | None:
        """Refuse a composition by raising CompositionError; return warnings about a doubtful one."""
        return None

    def needs(self) -> AbstractSet[str]:
        """Names of parts that must come before it, and what it must know or have (BOUNDARIES, CLASSES, ...)."""
        return frozenset()

    def phases(self) -> Sequence[Phase]:
        """Phases this part adds to a round."""
        return ()

    def init(self, side: Client | Server) -> None:
        """Write the first state: of the server before the first round, of a client before it is first called. May
        refuse what cannot work by raising CompositionError."""

    # on the server ----------------------------------------------------------------------------------------------
    def broadcast(self, server: Server) -> Values:
        """What clients receive before training, beside the model."""
        return {}

    def reducers(self) -> Mapping[str, Reducer]:
        """How the values this part adds to the `train` reply are reduced."""
        return {}

    def update(self, server: Server) -> None:
        """After aggregation, in part order: read `server.reduced`, write state, change the new model, report."""

    # on the client, around training ------------------------------------------------------------------------------
    def receive(self, client: Client) -> None:
        """When a round begins: change the model to start from, add to the data. There may be no samples."""

    def start(self, client: Client) -> None:
        """Right before training on the samples of all parts; there are some. The model may be changed."""

    def plan(self, client: Client, schedule: Schedule) -> Tables | None:
        """On the host, before the first step: integer rows for every step. `client.plans`: of the parts before it."""
        return None

    def reply(self, client: Client) -> Values | None:
        """After training: values added to the `train` reply. A changed model replaces what training ended with."""
        return None

    # on the client, inside a training step -----------------------------------------------------------------------
    def batches(self, step: Step) -> dict[str, Batch]:
        """Replayed or generated samples: joined (one forward with the real batch) or separate (their own forward)."""
        return {}

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        """A changed forward pass, in training and when scored; x are network inputs, `state` and `message` the part's
        own on the client. Its added parameters are `module.extras[part][name]`. At most one part changes it."""
        outputs: Tensor = module(x)
        return outputs

    def objective(self, step: Step) -> Tensor:
        """The base objective, instead of the stream's task loss on the real and joined samples; at most one part."""
        return step.task_loss(step.all_outputs, step.all_y)

    def loss(self, step: Step) -> Tensor | None:
        """A term added to the objective."""
        return None

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        """A rule on the flat gradient; `gradient.vector` is (P,)."""
        return gradient

    def after(self, step: Step) -> None:
        """After the optimiser: update own state in place, what `changes` names (and `step.params`, for a rule on the
        update itself)."""


@dataclass(frozen=True)
class Aggregator(Part):
    """A part that makes the new shared model; exactly one part of a method does. The defaults are FedAvg's."""

    def aggregate(self, server: Server) -> Model:
        """The new shared model: what arrived in place of the old one, which stays where no client sent anything."""
        return {name: value if server.reduced.get(name) is None else server.reduced[name]
                for name, value in server.model.items()}  # fmt: skip

    def upload(self, client: Client) -> Values:
        """What a client sends of its trained model: all but the statistics that stay with it."""
        if client.options.batchnorm == "local":
            return {"params": client.model["params"]}
        return dict(client.model)


@dataclass(frozen=True)
class Personal(Part):
    """A part whose clients have models of their own. A method with such a part is scored on its clients."""

    def personalise(self, client: Client) -> Model:
        """The model that this client is scored with; by default the one it keeps under params, stats and counters, if
        it has one."""
        model, own = client.model, client.state
        return {key: own[key].to(value.device) for key, value in model.items()} if "params" in own else model

    def state_for_task(self, state: Tree, task: int) -> Tree:
        """Its state on a client for scoring samples that are known to be of `task` (the `task` logits)."""
        return state


@dataclass(frozen=True)
class Protection(Part):
    """A part that changes what leaves a client and what the server reads of it: masks, noise, compression."""

    adds: ClassVar[frozenset[str]] = frozenset()  # keys that `seal` may add to any reply
    per_epoch: ClassVar[bool] = False  # must a restarted server get a newly sealed reply, never a stored one?

    def seal(self, client: Client, phase: Phase, reply: Reply) -> Reply:
        """The last hook before a reply leaves the client, in part order: the reply as it is sent. `client.messages` is
        empty in a round in which nothing was sent."""
        return reply

    def open(self, server: Server, phase: Phase, reply: Reply, received: Model) -> Reply:
        """The first hook when a single reply reaches the server: the reply as it is checked and reduced. received: the
        model that the client was sent. Raises ValueError for one that cannot be read."""
        return reply

    def release(self, server: Server, phase: Phase, reduced: Reduced, weights: Weights) -> Reduced:
        """The first hook after a phase's replies were reduced: what all parts read of them. weights: the divisor of
        each value that is a mean."""
        return reduced


_DEFAULTS = {
    name: value
    for kind in (AddsParameters, Protection, Personal, Aggregator, Part)
    for name, value in vars(kind).items()
    if callable(value) and not name.startswith("_")
}
HOOKS = frozenset(_DEFAULTS)


def overrides(part: Part, hook: str) -> bool:
    """Does the part define `hook` itself?"""
    default = _DEFAULTS[hook]
    return getattr(type(part), hook, default) is not default


def options_of(part: Part) -> dict[str, Any]:
    """Options by name."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


# What a training step may change of the parts' states: tensors, in place, of parts that define `after`. A step may be
# captured and replayed, so it can neither add a key nor put another value in the place of one. And only what such a
# part `changes` is copied before training: anything else it wrote would reach other holders of it.
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
