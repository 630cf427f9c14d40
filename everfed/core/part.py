"""A part: one idea of a method, as hyper-parameters and hooks. A method is a composition of parts.

A part is a frozen dataclass without state. Its state lives in named slots (trees) that the engine keeps, pages to disk,
checkpoints and sends; hooks receive it and return it. Every hook is optional. The hooks of `Part` belong to the phase
`train`; a phase of a part's own (`Phase`) names the functions that carry it out.

Hooks outside the training step are pure functions. `client` is the whole client state {part: slots} and `server` the
whole server state {part: slots, "model": vectors}, to read. The slots that a hook returns replace the part's own: None
leaves them as they are, {} removes them.

Hooks inside the training step may be captured and replayed on a GPU: static shapes, no host synchronisation, no branch
on data. Discrete draws are made ahead, in `plan`, and arrive as integer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from everfed.core.data import Data
from everfed.core.layout import KeepsLayers, KeepsParameters
from everfed.core.message import Message
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Model, Phase, Slots, State
from everfed.core.reduce import Reducer
from everfed.core.schedule import Schedule, Table
from everfed.core.tree import Tree
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.core.client import Reply
    from everfed.core.context import Context
    from everfed.core.step import Batch, Step
    from everfed.core.trainer import Fitted

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


@dataclass(frozen=True)
class Part:
    """Base of all parts. `name` is the namespace of its slots, its messages and its options."""

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    capturable: ClassVar[bool] = True  # may its step hooks be captured in a CUDA graph?
    changes: ClassVar[frozenset[str] | None] = None  # of its slots, those that steps change in place; None: all of them

    # set-up -----------------------------------------------------------------------------------------------------
    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        """Refuse a composition by raising CompositionError; return warnings about a doubtful one."""
        return ()

    def phases(self) -> tuple[Phase, ...]:
        """Phases this part adds to a round."""
        return ()

    def server_slots(self, ctx: Context) -> Tree:
        """The server's slots before the first round."""
        return {}

    def client_slots(self, ctx: Context) -> Tree:
        """A client's slots before it is first called."""
        return {}

    def extra_parameters(self, ctx: Context) -> dict[str, Tensor]:
        """Trainable tensors beside the model's own, with their first values; shared like the model."""
        return {}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """A changed forward pass, in training and when scored; x are network inputs, `own` the part's client slots.
        The part's extra parameters are `module.extras[part][name]`. At most one part of a method changes it."""
        outputs: Tensor = module(x)
        return outputs

    # on the server ----------------------------------------------------------------------------------------------
    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        """What clients receive before training, beside the model."""
        return {}

    def reducers(self) -> Mapping[str, Reducer]:
        """How the values this part adds to the `train` reply are reduced."""
        return {}

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """Numbers to report, before the server uses the replies; they change nothing."""
        return {}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """The new shared model. Exactly one part of a method defines it."""
        raise CompositionError(f"part {self.name!r} does not aggregate")

    def update_model(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        """(server slots, shared model) after aggregation, in part order: server momentum, projections of the update.
        `server` still holds the model before it."""
        return None, model

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """The part's server slots after training; `server` holds the new model, `reduced` the part's reply values."""
        return None

    # on the client, around training ------------------------------------------------------------------------------
    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """(slots, model to start from) when a round begins. data: the client's own samples, before any part adds to
        them; there may be none."""
        return None, model

    def dataset(self, client: State, data: Data, ctx: Context) -> Data:
        """The samples to train on."""
        return data

    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """(slots, model to start from) right before training on `data`, the samples of all parts; there are some."""
        return None, model

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """After training: (slots, values added to the `train` reply). A value under "model" is not sent: it replaces
        what training ended with."""
        return None, {}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """What a client sends of its trained model (the aggregating part only)."""
        raise CompositionError(f"part {self.name!r} does not aggregate")

    def personalise(self, client: State, message: Message, model: Model, ctx: Context) -> Model:
        """The model this client is scored with. A method with such a part is scored on its clients."""
        return model

    # on the client, inside a training step -----------------------------------------------------------------------
    def plan(
        self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context
    ) -> tuple[Slots, Tables]:
        """On the host, before the first step: (slots, integer rows for every step). `plans`: of the parts before it."""
        return None, {}

    def batches(self, step: Step) -> dict[str, Batch]:
        """Replayed or generated samples: joined (one forward with the real batch) or separate (their own forward)."""
        return {}

    def objective(self, step: Step) -> Tensor:
        """The base objective, instead of the stream's task loss on the real and joined samples; at most one part."""
        return step.task_loss(step.all_outputs, step.all_y)

    def loss(self, step: Step) -> Tensor | None:
        """A term added to the objective."""
        return None

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        """A rule on the flat gradient (P,)."""
        return gradient

    def after(self, step: Step) -> None:
        """After the optimiser: update own slots in place, those named in `changes` (and `step.params`, for a rule on
        the update itself)."""


@dataclass(frozen=True)
class Protection(Part):
    """A part that changes what leaves a client and what the server reads of it, in every phase: masks, noise."""

    adds: ClassVar[frozenset[str]] = frozenset()  # keys that `seal` may add to any reply
    per_epoch: ClassVar[bool] = False  # must a restarted server get a newly sealed reply, never a stored one?

    def seal(self, client: State, phase: Phase, message: Message, reply: Reply, ctx: Context) -> tuple[Slots, Reply]:
        """The last hook before a reply leaves the client, in part order: (slots, the reply as it is sent). `message`
        is empty in a round in which nothing was sent."""
        return None, reply

    def release(
        self, server: State, phase: Phase, reduced: Reduced, weights: Weights, ctx: Context
    ) -> tuple[Slots, Reduced]:
        """The first hook after a phase's replies were reduced: (slots, what all parts read of them).
        weights: the divisor of each value that is a mean."""
        return None, reduced


HOOKS = frozenset(name for name, value in vars(Part).items() if callable(value) and not name.startswith("_"))


def with_slots(state: State, part: str, slots: Tree | None) -> State:
    """`state` with the slots of `part` replaced: None leaves them as they are, {} removes them."""
    if slots is None:
        return state
    return {**state, part: slots} if slots else {name: tree for name, tree in state.items() if name != part}


def overrides(part: Part, hook: str) -> bool:
    """Does the part define `hook` itself?"""
    return getattr(type(part), hook) is not getattr(Part, hook)


def refuse_personal(part: Part, parts: Sequence[Part]) -> None:
    """For parts that send vectors over all parameters, in a composition where some of them never leave a client."""
    for other in parts:
        if isinstance(other, KeepsParameters | KeepsLayers):
            raise CompositionError(f"part {part.name!r} sends all parameters, but {other.name!r} keeps some personal")


def options_of(part: Part) -> dict[str, Any]:
    """Hyper-parameters by name."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


__all__ = [
    "BOUNDARIES",
    "CLASSES",
    "HELD_OUT",
    "HISTORY",
    "HOOKS",
    "TASK_ID",
    "TOGETHER",
    "CompositionError",
    "Model",
    "Part",
    "Protection",
    "Reduced",
    "State",
    "Tables",
    "Weights",
    "options_of",
    "overrides",
    "refuse_personal",
    "with_slots",
]
