"""run_client: the one function that every engine calls, in this process or at the other end of a network.

A pure function: same arguments, same bits. What a client remembers between calls is its state {part: state}; what is
kept under "client" is the protocol's own (own weights between synchronisations, local statistics, kept moments).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.evaluate import OF_TASK, EvalSpec, score_tasks
from everfed.core.handle import Client
from everfed.core.layout import TrainsPieces, assembled, shortened
from everfed.core.message import MODEL, Message, Model, State
from everfed.core.method import Method
from everfed.core.part import HELD_OUT, Personal, overrides
from everfed.core.phase import EVALUATE, TRAIN, Phase, When
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree

OWN = "client"


@dataclass(frozen=True)
class Reply:
    """What a client sends back. values: {part: {key: value}}; samples: its weight; loss: sum of its step losses. sent:
    bytes by part of what was sent, where a part has changed the values since. age: of the model that it was sent, in
    rounds."""

    values: dict[str, Tree]
    samples: int = 0
    steps: int = 0
    loss: Tensor | float | None = None
    sent: Mapping[str, int] | None = None
    age: int = 0


def new_state(method: Method, context: Context) -> State:
    """The state of a client that was never called."""
    state: State = {OWN: {}}
    for part in method.defining("init"):
        client = Client(part.name, state, context, {}, None, context.facts.blank)
        part.init(client)
        state = client.states
    return state


def run_client(
    method: Method, phase: Phase, state: State, message: Message | None, data: Data, context: Context
) -> tuple[State, Reply]:
    """One phase on one client.

    message: None in a round in which nothing is sent; the client then goes on from its own weights and the last message
    it got. A client without data does not train and sends nothing.
    """
    state, reply = _answer(method, phase, state, message, data, context)
    method.check_unchanged()
    if phase.when is When.INSIDE:  # a step of a protection: its replies are sent as they are
        return state, Reply(reply.values)
    return sealed(method, phase, state, message, reply, context)


def sealed(
    method: Method, phase: Phase, state: State, message: Message | None, reply: Reply, context: Context
) -> tuple[State, Reply]:
    """The reply as it leaves the client."""
    for part in method.protections:
        client = Client(part.name, state, context, message or {}, None, context.facts.blank)
        reply = part.seal(client, phase, reply)
        state = client.states
    return state, reply


def _answer(
    method: Method, phase: Phase, state: State, message: Message | None, data: Data, context: Context
) -> tuple[State, Reply]:
    """Run the phase; the reply is not protected yet."""
    message = None if message is None else assembled(message)
    if message is None:
        if MODEL not in state[OWN]:  # it had no data when the others began; it waits for the next synchronisation
            return state, Reply({})
        message = state[OWN]["message"]
        model: Model = state[OWN][MODEL]
    elif MODEL not in message:
        return _run(phase, state, message, None, data, context)
    else:  # what was kept for a round without a message is out of date
        state = {**state, OWN: {k: v for k, v in state[OWN].items() if k not in (MODEL, "message")}}
        model = _whole(message[MODEL], state, context)
    if phase.name == TRAIN:
        return _train(method, state, message, model, data, context)
    if phase.name == EVALUATE:
        return state, _evaluate(method, state, message, model, context)
    return _run(phase, state, {**message, MODEL: model}, model, data, context)


def _run(
    phase: Phase, state: State, message: Message, model: Model | None, data: Data, context: Context
) -> tuple[State, Reply]:
    """A phase of a part."""
    assert phase.run is not None  # compose() refuses a phase without it
    context.require_samples(0, len(data) if phase.reduce and phase.when is not When.INSIDE else 0)
    client = Client(phase.owner, state, context, message, model, data)
    values = dict(phase.run(client) or {})
    return client.states, Reply({phase.owner: values} if values else {}, len(data))


def _train(
    method: Method, state: State, message: Message, model: Model, data: Data, context: Context
) -> tuple[State, Reply]:
    received, own_data = _whole(message[MODEL], state, context), data
    for part in method.defining("receive"):
        client = Client(part.name, state, context, message, model, data, own_data=own_data)
        part.receive(client)
        state, model, data = client.states, client.model, client.data
    if len(data) == 0:
        return state, Reply({})
    for part in method.defining("start"):
        client = Client(part.name, state, context, message, model, data, own_data=own_data)
        part.start(client)
        state, model = client.states, client.model
    own = state[OWN]
    moments = own.get("moments") if own.get("moments_of", context.current_task) == context.current_task else None
    seen = {**message, MODEL: received}
    fitted = context.train.fit(context, method.parts, model, received["params"], state, seen, data, moments=moments)
    return _reply(method, fitted, message, data, own_data, context)


def _reply(
    method: Method, fitted: Fitted, message: Message, data: Data, own_data: Data, context: Context
) -> tuple[State, Reply]:
    state, values = fitted.state, dict[str, dict[str, Any]]()
    for part in method.parts:
        client = Client(part.name, state, context, message, fitted.model, data, own_data=own_data, fitted=fitted)
        values[part.name] = dict(part.reply(client) or {})
        state, fitted = client.states, replace(fitted, model=client.model)
    name = method.aggregator.name
    values[name] = {**_upload(method, _shared(fitted.model, context), state, message, context), **values[name]}
    state = {**state, OWN: _remember(fitted, message, context)}
    sent = {part: tree for part, tree in values.items() if tree} if context.synchronises else {}
    return state, Reply(sent, fitted.samples, fitted.steps, fitted.loss)


def _upload(method: Method, model: Model, state: State, message: Message, context: Context) -> dict[str, Any]:
    """What is sent of the trained model; of one in pieces, what was trained, unless its owner itself aggregates."""
    aggregator = method.aggregator
    if not isinstance(aggregator, TrainsPieces):
        model, message = shortened(model, message), {**message, MODEL: shortened(message[MODEL], message)}
    client = Client(aggregator.name, state, context, message, model, context.facts.blank, read_only=True)
    return dict(aggregator.upload(client))


def _remember(fitted: Fitted, message: Message, context: Context) -> Tree:
    """The protocol's own state after training."""
    own: Tree = {}
    if not context.synchronises:
        own[MODEL] = dict(fitted.model)
        own["message"] = message
    if context.facts.layout.shared < context.facts.layout.size:
        own["personal"] = fitted.model["params"][context.facts.layout.shared :].clone()
    if context.options.batchnorm == "local":
        own["stats"] = fitted.model["stats"]
        own["counters"] = fitted.model["counters"]
    if context.options.optimizer.state in ("kept", "task"):
        own["moments"] = fitted.moments
    if context.options.optimizer.state == "task":
        own["moments_of"] = context.current_task
    return own


def _whole(model: Model, state: State, context: Context) -> Model:
    """The received model with what is the client's own: personal parameters, local statistics."""
    own, layout = state[OWN], context.facts.layout
    if layout.shared < layout.size:
        personal = own.get("personal", context.facts.personal).to(model["params"].device)
        model = {**model, "params": torch.cat([model["params"], personal])}
    if context.options.batchnorm == "local" and "stats" in own:
        model = {**model, "stats": own["stats"], "counters": own["counters"]}
    return model


def _shared(model: Model, context: Context) -> Model:
    """What of a client's model may be sent."""
    layout = context.facts.layout
    return {**model, "params": model["params"][: layout.shared]} if layout.shared < layout.size else model


def personal_model(method: Method, state: State, message: Message, context: Context) -> Model:
    """The model that this client is scored with: the shared one in `message`, with what is the client's own."""
    return _personalised(method, state, message, _whole(message[MODEL], state, context), context)


def _personalised(method: Method, state: State, message: Message, model: Model, context: Context) -> Model:
    seen = context if method.needs(HELD_OUT) else context.at(tests=None)
    for part in method.parts:
        if isinstance(part, Personal):
            client = Client(part.name, state, seen, message, model, context.facts.blank, read_only=True)
            model = part.personalise(client)
    return model


def _evaluate(method: Method, state: State, message: Message, model: Model, context: Context) -> Reply:
    """Score this client's personalised model on the tasks the server asks for."""
    model = _personalised(method, state, message, model, context)
    spec = EvalSpec.from_tree(message[EVALUATE])
    score = partial(score_tasks, context.train, context.held_out, model)
    counts = score(spec, state, message, context.client)
    knowing = [part for part in method.parts if isinstance(part, Personal) and overrides(part, "state_for_task")]
    for row, task in enumerate(spec.tasks if knowing else ()):
        known = {part.name: part.state_for_task(state.get(part.name, {}), task) for part in knowing}
        found = score(replace(spec, tasks=(task,)), {**state, **known}, message, context.client)
        counts[row, OF_TASK] = found[0, OF_TASK]
    return Reply({EVALUATE: {"counts": counts}})
