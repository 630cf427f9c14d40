"""A part: one idea of a method, as hyper-parameters and hooks. A method is a composition of parts.

A part is a frozen dataclass without state. Its state lives in named slots (trees) that the engine keeps, pages to disk,
checkpoints and sends; hooks receive it and return it. Every hook is optional.

Hooks outside the training step are pure functions. `client` is the whole client state {part: slots} and `server` the
whole server state {part: slots, "model": vectors}, to read; what a hook returns replaces the part's own slots only.

Hooks inside the training step may be captured and replayed on a GPU: static shapes, no host synchronisation, no branch
on data. Discrete draws are made ahead, in `plan`, and arrive as integer rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor, nn

from everfed.core.data import Data
from everfed.core.layout import Layout
from everfed.core.message import Message
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Phase
from everfed.core.reduce import Reducer
from everfed.core.schedule import Schedule, Table
from everfed.core.substep import Substep
from everfed.core.tree import Tree

if TYPE_CHECKING:
    from everfed.core.client import Reply
    from everfed.core.context import Context
    from everfed.core.step import Batch, Step
    from everfed.core.trainer import Fitted

State = dict[str, Tree]  # part -> slots
Model = dict[str, Tensor]  # params, stats, counters
Tables = dict[str, Table]
Reduced = dict[str, dict[str, Any]]  # part -> reply key -> reduced value
Weights = dict[str, dict[str, float]]

# what `needs` may name beside other parts
BOUNDARIES = "boundaries"  # must know when a task begins or ends
TASK_ID = "task_id"  # must know which task it is in
HISTORY = "history"  # reads the data of earlier tasks (an upper bound, not a method for real clients)
HELD_OUT = "held_out"  # measures on test sets (a look at a simulation, not a method for real clients)
TOGETHER = "together"  # all clients must change tasks in the same round


class CompositionError(ValueError):
    """Parts that do not fit together, or not on this stream."""


@dataclass(frozen=True)
class Part:
    """Base of all parts. `name` is the namespace of its slots, its messages and its options."""

    name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    capturable: ClassVar[bool] = True  # may its step hooks be captured in a CUDA graph?
    aggregates: ClassVar[bool] = False  # does it own aggregation? Exactly one part of a method does
    personal: ClassVar[bool] = False  # are its models scored on the clients, personalised?
    changes: ClassVar[frozenset[str] | None] = None  # of its slots, those that steps change in place; None: all of them
    seals: ClassVar[frozenset[str]] = frozenset()  # what its seal() may add to any reply
    silent: ClassVar[frozenset[str]] = frozenset()  # its phases in which nothing is sent: clients use what they hold

    def options(self) -> dict[str, Any]:
        """Hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        """Refuse a composition by raising CompositionError; return warnings about a doubtful one."""
        return ()

    # state ------------------------------------------------------------------------------------------------------
    def server_slots(self, ctx: Context) -> Tree:
        """The server's slots before the first round."""
        return {}

    def client_slots(self, ctx: Context) -> Tree:
        """A client's slots before it is first called."""
        return {}

    # protocol ---------------------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        """Phases this part adds to a round."""
        return ()

    def wanted(self, phase: str, ctx: Context) -> bool:
        """Should one of its phases that is due run? To prepare the next task, say, is of no use after the last."""
        return True

    def reducers(self) -> Mapping[str, Reducer]:
        """How the values this part adds to the `train` reply are reduced."""
        return {}

    # on the server ----------------------------------------------------------------------------------------------
    def broadcast(self, server: State, phase: str, ctx: Context) -> dict[str, Any]:
        """What clients receive in `phase` ("train", or one of its own)."""
        return {}

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        """The part's server slots after `phase`; `reduced` holds its own reply values, reduced."""
        return server.get(self.name, {})

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """The new shared model (the aggregating part only)."""
        raise CompositionError(f"part {self.name!r} does not aggregate")

    def transform(self, server: State, model: Model, ctx: Context) -> Model:
        """Change what aggregation made; `server` still holds the model before it. Any part may; in part order."""
        return model

    def revise(self, server: State, phase: str, model: Model, ctx: Context) -> Model:
        """The shared model after one of the part's own phases, when `update` has seen it: to restore an earlier one, or
        to train it on the server. Returning `model` itself leaves it as it is."""
        return model

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        """Numbers worth telling of ctx.phase: reported, and used for nothing. Asked before the server learns from
        replies; after it has done its work in a phase of its own."""
        return {}

    def release(
        self, server: State, phase: Phase, reduced: Reduced, weights: Weights, ctx: Context
    ) -> tuple[Tree, Reduced]:
        """The first look at what any phase reduced: (slots, what all parts read of it). For protections: noise.
        weights: what each value's mean was divided by, where it has one."""
        return server.get(self.name, {}), reduced

    def conclude(self, server: State) -> dict[str, Any]:
        """What a finished run's result says of this part: plain numbers and words."""
        return {}

    def done(self, server: State, phase: str, ctx: Context) -> bool:
        """Ends a repeated phase before its last repeat."""
        return False

    def sample(self, server: State, count: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """For parts with a generator: `count` of its images, as network inputs, and their labels (count,). ctx.train is
        at hand. Raises ValueError when there is no generator yet."""
        raise CompositionError(f"part {self.name!r} has no generator")

    def signals(self, reduced: Tree) -> dict[str, dict[int, float]]:
        """{signal: {client: value}} that it has for who looks on (`everfed.core.watch`), of what `train` reduced."""
        return {}

    # on the client, around training ------------------------------------------------------------------------------
    def notice(self, client: State, data: Data, ctx: Context) -> Tree:
        """Before anything else in a round: the client's own samples, before any part adds to them. To look, and to
        remember; not called where there are none."""
        return client.get(self.name, {})

    def receive(self, client: State, message: dict[str, Tree], model: Model, ctx: Context) -> tuple[Tree, Model]:
        """First contact with a round; may change the model that training starts from."""
        return client.get(self.name, {}), model

    def dataset(self, client: State, data: Data, ctx: Context) -> Data:
        """What is trained on."""
        return data

    def start(
        self, client: State, message: dict[str, Tree], model: Model, data: Data, ctx: Context
    ) -> tuple[Tree, Model]:
        """Before training, when it is known what is trained on: may change the model that training starts from."""
        return client.get(self.name, {}), model

    def finish(
        self, client: State, message: dict[str, Tree], start: Model, fitted: Fitted, data: Data, ctx: Context
    ) -> Fitted:
        """After training from `start`, before anything is sent: may change what training ended with."""
        return fitted

    def run(self, client: State, phase: str, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """One of the part's own phases on a client: (slots, reply). In a silent one `message` is empty."""
        raise CompositionError(f"part {self.name!r} declares phase {phase!r} but has no run()")

    def upload(self, model: Model, message: dict[str, Tree], ctx: Context) -> Tree:
        """What a client sends of its trained model (the aggregating part only)."""
        raise CompositionError(f"part {self.name!r} does not aggregate")

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """After training: (slots, extra values of the `train` reply)."""
        return client.get(self.name, {}), {}

    def seal(
        self, client: State, phase: Phase, message: dict[str, Tree], reply: Reply, ctx: Context
    ) -> tuple[Tree, Reply]:
        """The last word on what leaves a client, in any phase and in part order: (slots, the reply as it is sent). For
        protections: noise, masks. `message` is empty in a round in which nothing was sent."""
        return client.get(self.name, {}), reply

    def personalise(self, client: State, message: dict[str, Tree], model: Model, ctx: Context) -> Model:
        """The model this client is scored with, for parts with personalised models."""
        return model

    def told(self, own: Tree, task: int) -> Tree:
        """Its client slots for scoring samples whose task is known (the `task` logits of a personalised model). By
        default knowing the task changes nothing but which classes compete."""
        return own

    def kept(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The tasks of the samples that it keeps between rounds, one entry for each (n,); `task_of` knows them by the
        samples' ids. Asked in simulations only, for a report; used for nothing."""
        return np.zeros(0, dtype=np.int64)

    # what is trained ---------------------------------------------------------------------------------------------
    def extra_parameters(self, ctx: Context) -> dict[str, Tensor]:
        """Trainable tensors beside the model's own, with their first values; shared like the model."""
        return {}

    def personal_parameters(self, ctx: Context) -> dict[str, Tensor]:
        """The same, but each client keeps its own: they are never sent."""
        return {}

    def is_personal(self, parameter: str) -> bool:
        """Does this parameter of the model itself (a head, say) stay on the client?"""
        return False

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        """A changed forward pass, in training and when scored; x are network inputs, `own` the part's client slots.
        The part's extra parameters are `module.extras[part][name]`. At most one part of a method changes it."""
        outputs: Tensor = module(x)
        return outputs

    # on the client, inside a training step -----------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        """On the host, before the first step: (slots, integer rows for every step). `plans`: of the parts before it."""
        return client.get(self.name, {}), {}

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

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        """Steps of its own around every training step, in order: with other parameters, another loss, another
        optimiser."""
        return ()

    def substep(self, step: Step, name: str) -> Tensor:
        """The loss of one of them."""
        raise CompositionError(f"part {self.name!r} declares substep {name!r} but has no substep()")

    def after(self, step: Step) -> None:
        """After the optimiser: update own slots in place, those named in `changes` (and `step.params`, for a rule on
        the update itself)."""


def refuse_personal(part: Part, parts: Sequence[Part]) -> None:
    """For parts that send vectors over all parameters: some of them would be a client's own."""
    for other in parts:
        if overrides(other, "personal_parameters") or overrides(other, "is_personal"):
            raise CompositionError(f"part {part.name!r} sends all parameters, but {other.name!r} keeps some personal")


def overrides(part: Part, hook: str) -> bool:
    """Does the part define `hook` itself?"""
    return getattr(type(part), hook) is not getattr(Part, hook)


__all__ = [
    "BOUNDARIES",
    "HELD_OUT",
    "HISTORY",
    "TASK_ID",
    "TOGETHER",
    "CompositionError",
    "Message",
    "Model",
    "Part",
    "State",
    "Tables",
]
