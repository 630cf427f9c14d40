"""For the time of the move to handles: parts with hooks of the old form run under the new protocol. To be removed."""

# ruff: noqa
# mypy: ignore-errors
from __future__ import annotations

from functools import wraps

from everfed.core import part as new
from everfed.core import phase as phases_
from everfed.core.client import synchronises
from everfed.core.context import Context, Facts, TrainOptions
from everfed.core.data import Data, Schedule, Table
from everfed.core.handle import Client, Handle, Server
from everfed.core.layout import AddsParameters, Entry, Layout, keeps_some
from everfed.core.message import MODEL, Cached as Once, Message, Model, PerClient as Each, State
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import (
    BOUNDARIES,
    CLASSES,
    EAGER,
    HELD_OUT,
    HISTORY,
    TASK_ID,
    TOGETHER,
    Reduced,
    Tables,
    Weights,
    options_of,
    overrides,
    refuse_personal,
)
from everfed.core.phase import ALWAYS, BEGIN, END, FIRST, Cohort, every
from everfed.core.reduce import Collect, Mean, Reducer, Sum
from everfed.core.step import Batch, Step as NewStep, Substep
from everfed.core.stream import RoundPlan, Stream
from everfed.core.trainer import Fitted, Trainer
from everfed.core.tree import Tree, on_device
from everfed.errors import CompositionError

Position, When = phases_.When, phases_.Rounds
Slots = Tree | None


def with_slots(state, part, slots):
    if slots is None:
        return state
    return {**state, part: slots} if slots else {name: tree for name, tree in state.items() if name != part}


class Step:
    """A step as old parts see it."""

    def __init__(self, step):
        self._step = step

    ctx = property(lambda self: self._step.context)
    state = property(lambda self: self._step.training.state)
    message = property(lambda self: self._step.training.message)
    rows = property(lambda self: self._step.training.rows)
    handed = property(lambda self: self._step.training.handed.setdefault("legacy", {}))

    @property
    def batches(self):
        return {key: batch for own in self._step.training.batches.values() for key, batch in own.items()}

    def __getattr__(self, name):
        return getattr(self._step, name)


class Needs(frozenset):
    def __call__(self):
        return self


def _server(self, server, changed):
    if changed is not None:
        server.state = changed


def _receive(self, client):
    ctx = client.context
    slots, client.model = self._old_receive(client.states, client.messages, client.model, client.own_data, ctx)
    _server(self, client, slots)
    client.data = self.dataset(client.states, client.data, ctx)


def _start(self, client):
    slots, client.model = self._old_start(client.states, client.messages, client.model, client.data, client.context)
    _server(self, client, slots)


def _plan(self, client, schedule):
    slots, tables = self._old_plan(client.states, schedule, client.plans, client.context)
    _server(self, client, slots)
    return tables


def _reply(self, client):
    slots, values = self._old_reply(client.states, client.messages, client.fitted, client.data, client.context)
    _server(self, client, slots)
    if MODEL in values:
        client.model = values[MODEL]
    return {key: value for key, value in values.items() if key != MODEL}


def _update(self, server):
    ctx = server.context
    before = {**server.states, MODEL: server.before}
    for name, value in self._old_measure(before, server.reduced, ctx).items():
        server.report(name, value)
    slots, model = self._old_update_model(before, server.model, ctx)
    _server(self, server, slots)
    server.model = model
    _server(self, server, self._old_update({**server.states, MODEL: server.model}, server.reduced, ctx))


def _release(self, server, phase, reduced, weights):
    slots, found = self._old_release(server.states, phase, reduced, weights, server.context)
    _server(self, server, slots)
    if self.name not in found:
        for name, value in self._old_measure(server.states, {}, server.context).items():
            server.report(name, value)
    return found


def _seal(self, client, phase, reply):
    slots, reply = self._old_seal(client.states, phase, client.messages, reply, client.context)
    _server(self, client, slots)
    return reply


def _substeps(self, layout):
    from dataclasses import replace

    def adapted(loss):
        return lambda step: loss(Step(step))

    return tuple(replace(one, loss=adapted(one.loss)) for one in self._old_substeps(layout))


_NEW = {
    "receive": _receive,
    "start": _start,
    "plan": _plan,
    "reply": _reply,
    "update": _update,
    "release": _release,
    "seal": _seal,
    "broadcast": lambda self, server: self._old_broadcast(server.states, server.context),
    "aggregate": lambda self, server: self._old_aggregate(server.states, server.reduced, server.context),
    "upload": lambda self, client: self._old_upload(client.model, client.messages, client.context),
    "personalise": lambda self, c: self._old_personalise(c.states, c.messages, c.model, c.context),
    "batches": lambda self, step: self._old_batches(Step(step)),
    "objective": lambda self, step: self._old_objective(Step(step)),
    "loss": lambda self, step: self._old_loss(Step(step)),
    "after": lambda self, step: self._old_after(Step(step)),
    "gradient": lambda self, step, gradient: self._old_gradient(Step(step), gradient.vector),
}


def _dispatch(name, original):
    adapted = _NEW[name]

    def hook(self, *args, **kwargs):
        if args and isinstance(args[0], Handle | NewStep):
            return adapted(self, *args)
        return original(self, *args, **kwargs)

    return wraps(original)(hook)


def _trained(original):
    def trained(self, piece, server, ctx=None):
        return (
            original(self, piece, server.states, server.context)
            if isinstance(server, Handle)
            else original(self, piece, server, ctx)
        )

    return trained


class _Old:
    capturable = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        own = dict(vars(cls))
        if isinstance(own.get("needs"), property):
            getter = own["needs"].fget
            cls.needs = property(lambda self: Needs(getter(self)))
        elif "needs" in own and not callable(own["needs"]) or "capturable" in own:
            needs = Needs(own.get("needs", cls.needs if isinstance(cls.needs, frozenset) else ()))
            cls.needs = Needs(needs | {EAGER}) if not cls.capturable else needs
        for name in set(own) & set(_NEW):
            setattr(cls, f"_old_{name}", own[name])
            setattr(cls, name, _dispatch(name, own[name]))
        if "measure" in own:
            cls._old_measure = own["measure"]
        if "update_model" in own:
            cls._old_update_model = own["update_model"]
        if {"measure", "update_model"} & set(own) and "update" not in own:
            cls.update = _dispatch("update", lambda self, *args: self._old_update(*args))
        if "dataset" in own and "receive" not in own:
            cls.receive = _dispatch("receive", lambda self, *args: self._old_receive(*args))
        if "trained" in own:
            cls.trained = _trained(own["trained"])
        if "substeps" in own:
            cls._old_substeps = own["substeps"]
            cls.substeps = _substeps

    needs = Needs()

    def init(self, side):
        slots = self.server_slots(side.context) if isinstance(side, Server) else self.client_slots(side.context)
        if slots:
            side.state = slots

    def server_slots(self, ctx):
        return {}

    def client_slots(self, ctx):
        return {}

    def dataset(self, client, data, ctx):
        return data

    def measure(self, server, reduced, ctx):
        return {}

    def update_model(self, server, model, ctx):
        return None, model

    _old_measure = measure
    _old_update_model = update_model

    def _old_update(self, server, reduced, ctx):
        return None

    def _old_receive(self, client, message, model, data, ctx):
        return None, model

    def _old_seal(self, client, phase, message, reply, ctx):
        return None, reply

    def _old_release(self, server, phase, reduced, weights, ctx):
        return None, reduced

    def _old_broadcast(self, server, ctx):
        return {}


class Part(_Old, new.Part):
    pass


class Aggregator(_Old, new.Aggregator):
    pass


class Personal(_Old, new.Personal):
    pass


class Protection(_Old, new.Protection):
    pass


def Phase(
    name,
    cohort=Cohort.SAMPLED,
    when=ALWAYS,
    position=Position.AFTER,
    reduce=None,
    repeat=1,
    in_last_round=True,
    sends=True,
    broadcast=None,
    run=None,
    measure=None,
    update=None,
    update_model=None,
    done=None,
    owner="",
):
    def send(server):
        return broadcast(server.states, server.context)

    def work(client):
        slots, values = run(client.states, client.messages, client.data, client.context)
        _server(None, client, slots)
        return values

    def report(server):
        for key, value in measure({**server.states, MODEL: server.model}, server.reduced, server.context).items():
            server.report(key, value)

    def change(server):
        ctx = server.context
        if measure and cohort is not Cohort.SERVER:
            report(server)
        if update:
            _server(None, server, update(server.states, server.reduced, ctx))
        if update_model:
            slots, server.model = update_model(server.states, server.model, ctx)
            _server(None, server, slots)
        if measure and cohort is Cohort.SERVER:
            report(server)
        return done(server.states, ctx) if done else None

    return phases_.Phase(
        name,
        cohort,
        rounds=when,
        when=position,
        reduce=reduce or {},
        repeat=repeat,
        in_last_round=in_last_round,
        sends=sends,
        broadcast=send if broadcast else None,
        run=work if run else None,
        update=change if update or update_model or measure or done else None,
        owner=owner,
    )
