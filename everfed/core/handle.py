"""What a hook gets: one handle, with the part's own state to read and write, what it may know, and work it may do.

The caller makes a handle for every call from the immutable state and takes the changed state out of it, so that a part
never sees another part's state except through `of`, and never changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Attempt, Context, Facts
from everfed.core.data import Data
from everfed.core.layout import Layout, only_trained
from everfed.core.message import MODEL, Message, Model, State
from everfed.core.optimizer import Optimizer
from everfed.core.option import TrainOptions
from everfed.core.stream import HeldOut
from everfed.core.tree import Tree
from everfed.errors import SettingError

if TYPE_CHECKING:
    from everfed.core.part import Part, Tables
    from everfed.core.trainer import Fitted, Trainer


class Handle:
    """What client and server handles share. `context`: where in the run this call is, for functions of the core."""

    def __init__(self, part: str, states: State, context: Context, read_only: bool = False) -> None:
        self.name, self.context = part, context
        self._states, self._read_only = states, read_only
        self._state: Tree | None = None

    # state -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> Tree:
        """The part's own, a dict to read and write; tensors in it are replaced, never changed in place."""
        if self._read_only:  # what such a hook wrote would be lost; this way it is refused
            return MappingProxyType(self._states.get(self.name, {}))  # type: ignore[return-value]
        if self._state is None:
            self._state = _copied(self._states.get(self.name, {}))
        return self._state

    @state.setter
    def state(self, tree: Mapping[str, Any]) -> None:
        if self._read_only:
            raise TypeError(f"part {self.name!r}: this hook may not change the part's state")
        self._state = dict(tree)

    def of(self, part: str) -> Mapping[str, Any]:
        """Another part's state, to read; empty where it has none."""
        found: Mapping[str, Any] = self._states.get(part, {})
        return found

    @property
    def states(self) -> State:
        """The state of all parts after this call."""
        return self._states if self._state is None else with_state(self._states, self.name, self._state)

    @property
    def changed(self) -> Tree | None:
        """The part's own state after this call; None where the hook did not touch it."""
        return self._state

    # where it is, and what it may know -----------------------------------------------------------------------------
    @property
    def round(self) -> int:
        return self.context.round

    @property
    def repeat(self) -> int:
        """How often the phase ran before in this round."""
        return self.context.repeat

    @property
    def phase(self) -> str:
        return self.context.phase

    @property
    def task(self) -> int | None:
        """The current task's index; None where the stream hides it."""
        return self.context.current_task

    @property
    def seed(self) -> int:
        """The run's."""
        return self.context.seed

    @property
    def facts(self) -> Facts:
        return self.context.facts

    @property
    def options(self) -> TrainOptions:
        """How clients train."""
        return self.context.options

    @property
    def layout(self) -> Layout:
        return self.context.facts.layout

    @property
    def synchronises(self) -> bool:
        """Is the model sent to the server after this round?"""
        return self.context.synchronises

    @property
    def held_out(self) -> HeldOut:
        """The test sets, for parts that need HELD_OUT."""
        return self.context.held_out

    # work ----------------------------------------------------------------------------------------------------------
    def rng(self, tag: str) -> np.random.Generator:
        """A numpy generator of this call's own, for `tag`: no other draw can change its numbers."""
        return self.context.rng(tag)

    def key(self, tag: str) -> int:
        """A 63-bit key of this call's own, for `tag`."""
        return self.context.key(tag)

    @property
    def trainer(self) -> Trainer:
        """Local training and networks on the engine's device; on the server in its own phases only."""
        return self.context.train

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.trainer.device


class Client(Handle):
    """One client, in one call of a hook.

    state: the part's own. message: what the part's server side sent. model: as received, then as trained; a hook that
    may change it assigns another. received: the model as it was sent. data: the samples; `receive` may assign others.
    own_data: the client's own, before any part added to them. fitted: what training produced, afterwards. plans: the
    rows that parts planned so far (in `plan`). messages: everything that was sent, by part.
    """

    def __init__(
        self,
        part: str,
        states: State,
        context: Context,
        messages: Mapping[str, Any],
        model: Model | None,
        data: Data,
        *,
        own_data: Data | None = None,
        fitted: Fitted | None = None,
        plans: Mapping[str, Tables] | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__(part, states, context, read_only)
        self.messages, self.data = messages, data
        self.own_data = data if own_data is None else own_data
        self.plans: Mapping[str, Tables] = plans or {}
        self._model, self._fitted = model, fitted

    @property
    def id(self) -> int:
        """Its number."""
        assert self.context.client is not None
        return self.context.client

    @property
    def message(self) -> Mapping[str, Any]:
        """What the part's server side sent; empty if nothing."""
        found: Mapping[str, Any] = self.messages.get(self.name, {})
        return found

    @property
    def model(self) -> Model:
        if self._model is None:
            raise RuntimeError(f"part {self.name!r}: in phase {self.phase!r} no model is sent")
        return self._model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    @property
    def received(self) -> Model:
        """The shared model as the server sent it."""
        model: Model = self.messages[MODEL]
        return model

    @property
    def update(self) -> Tensor:
        """(shared,) what training added to the parameters that the server sent."""
        params = self.model["params"]
        received: Tensor = self.received["params"].to(params.device)
        return params[: len(received)] - received

    @property
    def fitted(self) -> Fitted:
        """What local training produced: steps, loss, moments, the model that it began with."""
        if self._fitted is None:
            raise RuntimeError(f"part {self.name!r}: before training there is nothing fitted")
        return self._fitted

    @property
    def rate(self) -> float:
        """The learning rate of the round."""
        return self.context.rate

    @property
    def attempt(self) -> Attempt | None:
        """What a real client knows of the server that it answers; None in a simulation."""
        return self.context.attempt

    def history(self) -> list[Data]:
        """The client's data of all earlier tasks, for parts that need HISTORY."""
        return self.context.history()

    # work ----------------------------------------------------------------------------------------------------------
    def gradient(
        self, x: Tensor, y: Tensor, *, model: Model | None = None, mode: str = "train", tag: str | None = None
    ) -> Tensor:
        """(P,) gradient of the mean task loss on (x, y), samples in storage form, at the model; zero where the round
        trains nothing. tag: of dropout's draws, by default the phase's name."""
        self.context.require_samples(len(x))
        at, of = self.model if model is None else model, self.phase if tag is None else tag
        return only_trained(self.trainer.gradient(self.context, at, x, y, mode=mode, tag=of), self.messages)

    def outputs(self, x: Tensor, *, model: Model | None = None) -> Tensor:
        """(n, ...) network outputs in eval mode, with this client's own forward pass where a part has one."""
        return self.trainer.outputs(self.model if model is None else model, x, self.states, self.messages)

    def fit(
        self,
        parts: Sequence[Part],
        *,
        model: Model | None = None,
        received: Tensor | None = None,
        data: Data | None = None,
        state: State | None = None,
        messages: Message | None = None,
        rate: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        optimizer: Optimizer | None = None,
        moments: dict[str, Tensor] | None = None,
        tag: str,
    ) -> Fitted:
        """A local training beside the client's own, under `parts` alone; nothing of the client is changed.

        model: to start from, by default the current one. received: what steps see as sent by the server, (P,), by
        default that one. data: by default the current samples. state, messages: of these parts, by name. rate: the
        learning rate of all steps, by default those of the round. tag: of its draws.
        """
        context = self.context if rate is None else self.context.at(rate=rate)
        start = self.model if model is None else model
        samples = self.data if data is None else data
        return self.trainer.fit(
            context,
            parts,
            start,
            start["params"] if received is None else received,
            state or {},
            messages or {},
            samples,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            moments=moments,
            rate=rate,
            tag=tag,
        )


class Server(Handle):
    """The server, in one call of a hook.

    state: the part's own. model: the shared model; `update`, and the phases that may, assign another. before: the
    model before this round's aggregation. reduced: the part's reduced reply, by key.
    """

    def __init__(
        self,
        part: str,
        states: State,
        context: Context,
        *,
        reduced: Mapping[str, Any] | None = None,
        before: Model | None = None,
        model: Model | None = None,
        read_only: bool = False,
    ) -> None:
        super().__init__(part, states, context, read_only)
        self.reduced: Mapping[str, Any] = reduced or {}
        self.model: Model = states.get(MODEL, {}) if model is None else model
        self.before: Model = self.model if before is None else before
        self.reports: dict[str, float] = {}

    def report(self, name: str, value: float | Tensor) -> None:
        """A number, or a tensor of one element, for the run's events, `result.history` and report; it
        changes nothing."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                shape = tuple(value.shape)
                raise SettingError(
                    f"part {self.name!r}: report({name!r}) takes one number, not a tensor of shape {shape}"
                )
            value = float(value)
        self.reports[name] = value


def with_state(states: State, part: str, state: Tree) -> State:
    """The states with that of `part` replaced; an empty one is removed."""
    if state:
        return {**states, part: state}
    return {name: tree for name, tree in states.items() if name != part} if part in states else states


def _copied(tree: Mapping[str, Any]) -> Tree:
    """The same tensors and values in dicts of its own."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}
