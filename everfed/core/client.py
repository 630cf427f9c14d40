"""run_client: the one function that every engine calls, in this process or at the other end of a network.

A pure function: same arguments, same bits. What a client remembers between calls is its state {part: slots}; the slots
under "client" are the protocol's own (own weights between synchronisations, local statistics, kept moments).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.message import MODEL, Message
from everfed.core.method import Method
from everfed.core.part import HELD_OUT, Model, State, with_slots
from everfed.core.phase import EVALUATE, TRAIN, Phase, Position
from everfed.core.pieces import TrainsPieces, assembled, shortened
from everfed.core.scoring import EvalSpec, score_tasks
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree

OWN = "client"


@dataclass(frozen=True)
class Reply:
    """What a client sends back. values: {part: {key: value}}; samples: its weight; loss: sum of its step losses."""

    values: dict[str, Tree]
    samples: int = 0
    steps: int = 0
    loss: Tensor | float | None = None


@runtime_checkable
class UsesTaskId(Protocol):
    """A part with personalised models that answers differently when a sample's task is known."""

    def slots_for_task(self, own: Tree, task: int) -> Tree:
        """Its client slots for scoring samples of `task` (the `task` logits)."""


def new_state(method: Method, ctx: Context) -> State:
    """The state of a client that was never called."""
    slots = {part.name: part.client_slots(ctx) for part in method.parts}
    return {OWN: {}, **{name: tree for name, tree in slots.items() if tree}}


def run_client(
    method: Method, phase: Phase, state: State, message: Message | None, data: Data, ctx: Context
) -> tuple[State, Reply]:
    """One phase on one client.

    message: None in a round in which nothing is sent; the client then goes on from its own weights and the last message
    it got. A client without data does not train and sends nothing.
    """
    state, reply = _answer(method, phase, state, message, data, ctx)
    if phase.position is Position.INSIDE:  # a step of a protection: its replies are sent as they are
        return state, Reply(reply.values)
    for part in method.protections:
        own, reply = part.seal(state, phase, message or {}, reply, ctx)
        state = with_slots(state, part.name, own)
    return state, reply


def _answer(
    method: Method, phase: Phase, state: State, message: Message | None, data: Data, ctx: Context
) -> tuple[State, Reply]:
    """Run the phase; the reply is not protected yet."""
    message = None if message is None else assembled(message)
    if message is None:
        if MODEL not in state[OWN]:  # it had no data when the others began; it waits for the next synchronisation
            return state, Reply({})
        message = state[OWN]["message"]
        model: Model = state[OWN][MODEL]
    elif MODEL not in message:
        return _run(phase, state, message, data, ctx)
    else:  # what was kept for a round without a message is out of date
        state = {**state, OWN: {k: v for k, v in state[OWN].items() if k not in (MODEL, "message")}}
        model = _whole(message[MODEL], state, ctx)
    if phase.name == TRAIN:
        return _train(method, state, message, model, data, ctx)
    if phase.name == EVALUATE:
        return state, _evaluate(method, state, message, model, ctx)
    return _run(phase, state, {**message, MODEL: model}, data, ctx)


def _run(phase: Phase, state: State, message: Message, data: Data, ctx: Context) -> tuple[State, Reply]:
    """A phase of a part."""
    assert phase.run is not None  # compose() refuses a phase without it
    own, values = phase.run(state, message, data, ctx)
    return with_slots(state, phase.owner, own), Reply({phase.owner: values} if values else {}, len(data))


def _train(
    method: Method, state: State, message: Message, model: Model, data: Data, ctx: Context
) -> tuple[State, Reply]:
    received, own_data = _whole(message[MODEL], state, ctx)["params"], data
    for part in method.parts:
        own, model = part.receive(state, message, model, own_data, ctx)
        state = with_slots(state, part.name, own)
        data = part.dataset(state, data, ctx)
    if len(data) == 0:
        return state, Reply({})
    for part in method.parts:
        own, model = part.start(state, message, model, data, ctx)
        state = with_slots(state, part.name, own)
    moments = state[OWN].get("moments") if state[OWN].get("moments_of", ctx.current_task) == ctx.current_task else None
    fitted = ctx.train.fit(ctx, method.parts, model, received, state, message, data, moments=moments)
    return _reply(method, fitted, message, data, ctx)


def _reply(method: Method, fitted: Fitted, message: Message, data: Data, ctx: Context) -> tuple[State, Reply]:
    state, values = fitted.state, {}
    for part in method.parts:
        own, extra = part.reply(state, message, fitted, data, ctx)
        state = with_slots(state, part.name, own)
        if MODEL in extra:
            fitted = replace(fitted, model=extra[MODEL])
        values[part.name] = {key: value for key, value in extra.items() if key != MODEL}
    name = method.aggregator.name
    values[name] = {**_upload(method, _shared(fitted.model, ctx), message, ctx), **values[name]}
    state = {**state, OWN: _remember(fitted, message, ctx)}
    sent = {part: tree for part, tree in values.items() if tree} if synchronises(ctx) else {}
    return state, Reply(sent, fitted.samples, fitted.steps, fitted.loss)


def _upload(method: Method, model: Model, message: Message, ctx: Context) -> Tree:
    """What is sent of the trained model; of one in pieces, what was trained, unless its owner itself aggregates."""
    if not isinstance(method.aggregator, TrainsPieces):
        model, message = shortened(model, message), {**message, MODEL: shortened(message[MODEL], message)}
    return method.aggregator.upload(model, message, ctx)


def synchronises(ctx: Context) -> bool:
    """Is the model sent to the server after this round?"""
    return (ctx.round + 1) % ctx.options.sync_every == 0


def _remember(fitted: Fitted, message: Message, ctx: Context) -> Tree:
    """The protocol's own slots after training."""
    own: Tree = {}
    if not synchronises(ctx):
        own[MODEL] = dict(fitted.model)
        own["message"] = message
    if ctx.facts.layout.shared < ctx.facts.layout.size:
        own["personal"] = fitted.model["params"][ctx.facts.layout.shared :].clone()
    if ctx.options.batchnorm == "local":
        own["stats"] = fitted.model["stats"]
        own["counters"] = fitted.model["counters"]
    if ctx.options.optimizer.state in ("kept", "task"):
        own["moments"] = fitted.moments
    if ctx.options.optimizer.state == "task":
        own["moments_of"] = ctx.current_task
    return own


def _whole(model: Model, state: State, ctx: Context) -> Model:
    """The received model with what is the client's own: personal parameters, local statistics."""
    own, layout = state[OWN], ctx.facts.layout
    if layout.shared < layout.size:
        personal = own.get("personal", ctx.facts.personal).to(model["params"].device)
        model = {**model, "params": torch.cat([model["params"], personal])}
    if ctx.options.batchnorm == "local" and "stats" in own:
        model = {**model, "stats": own["stats"], "counters": own["counters"]}
    return model


def _shared(model: Model, ctx: Context) -> Model:
    """What of a client's model may be sent."""
    layout = ctx.facts.layout
    return {**model, "params": model["params"][: layout.shared]} if layout.shared < layout.size else model


def personal_model(method: Method, state: State, message: Message, ctx: Context) -> Model:
    """The model that this client is scored with: the shared one in `message`, with what is the client's own."""
    return _personalised(method, state, message, _whole(message[MODEL], state, ctx), ctx)


def _personalised(method: Method, state: State, message: Message, model: Model, ctx: Context) -> Model:
    hooks = ctx if method.needs(HELD_OUT) else ctx.at(tests=None)
    for part in method.parts:
        model = part.personalise(state, message, model, hooks)
    return model


def _evaluate(method: Method, state: State, message: Message, model: Model, ctx: Context) -> Reply:
    """Score this client's personalised model on the tasks the server asks for."""
    model = _personalised(method, state, message, model, ctx)
    spec = EvalSpec.from_tree(message[EVALUATE])
    score = partial(score_tasks, ctx.train, ctx.held_out, model)
    counts = score(spec, state, message, ctx.client)
    knowing = [part for part in method.parts if isinstance(part, UsesTaskId)]
    for row, task in enumerate(spec.tasks if knowing else ()):
        known = {part.name: part.slots_for_task(state.get(part.name, {}), task) for part in knowing}
        counts[row, -1] = score(replace(spec, tasks=(task,)), {**state, **known}, message, ctx.client)[0, -1]
    return Reply({EVALUATE: {"counts": counts}})
