"""An engine of bytes: nothing reaches a client, and nothing comes back, except as serialised trees.

Every call gets a freshly built method, network and trainer, and clients run in descending order. So whatever a part
keeps on itself, shares by reference or draws in the order of its clients shows up as a difference from `eager`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Engine
from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.message import Cached, Message, Model, State, addressed
from everfed.core.phase import Phase
from everfed.core.server import Runner, RunState
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree, from_bytes, to_bytes
from everfed.engines.eager import call
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Outcome, Paused


def crossed(tree: Tree) -> Tree:
    """What arrives when `tree` is sent."""
    return from_bytes(to_bytes(tree))


def message_to_tree(message: Message) -> Tree:
    """{part: {key: {"value", and "version" of a `Cached`}}}."""
    return {part: {key: _packed(value) for key, value in values.items()} for part, values in message.items()}


def message_from_tree(tree: Tree) -> Message:
    return {part: {key: _unpacked(packed) for key, packed in values.items()} for part, values in tree.items()}


def _packed(value: Any) -> Tree:
    return {"value": value.value, "version": value.version} if isinstance(value, Cached) else {"value": value}


def _unpacked(packed: Tree) -> Any:
    return Cached(packed["version"], packed["value"]) if "version" in packed else packed["value"]


def reply_to_tree(reply: Reply) -> Tree:
    return {"values": reply.values, "samples": reply.samples, "steps": reply.steps, "loss": reply.loss}


def reply_from_tree(tree: Tree) -> Reply:
    return Reply(tree["values"], tree["samples"], tree["steps"], tree["loss"])


class Wire(Engine):
    """Clients behind bytes. `states` holds each client's state as it would lie on its disk."""

    name = "wire"

    def __init__(self, bench: Bench, states: dict[int, bytes]) -> None:
        self.bench, self.states = bench, states

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        sent = {c: None if message is None else to_bytes(message_to_tree(addressed(message, c))) for c in clients}
        replies = {client: self._call(phase, client, sent[client], place) for client in reversed(clients)}
        for client in clients:
            yield client, reply_from_tree(from_bytes(replies[client]))

    def _call(self, phase: Phase, client: int, sent: bytes | None, place: Place) -> bytes:
        message = None if sent is None else message_from_tree(from_bytes(sent))
        state: State | None = from_bytes(self.states[client]) if client in self.states else None
        setup = self.bench.setup()
        phase = setup.method.phases_by_name()[phase.name]  # its functions, too, belong to the fresh method
        state, reply = call(setup, self.bench.trainer(setup), phase, client, state, message, place)
        self.states[client] = to_bytes(state)
        return to_bytes(reply_to_tree(reply))

    def workbench(self) -> Trainer:
        return self.bench.trainer()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        spec, held_out = EvalSpec.from_tree(crossed(spec.to_tree())), self.bench.setup().held_out
        return score_tasks(self.bench.trainer(), held_out, crossed(dict(model)), spec)

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name}


def run_over_wire(bench: Bench) -> Outcome:
    """A run whose server, too, is rebuilt from bytes after every phase."""
    states: dict[int, bytes] = {}
    events: list[Any] = []
    state: RunState | None = None
    while state is None or state.round < bench.stream.rounds:
        state = _one_phase(bench, states, events, state)
    store = ClientStore()
    for client, data in sorted(states.items()):
        store.put(client, from_bytes(data))
    return Outcome(state, store, events)


def _one_phase(bench: Bench, states: dict[int, bytes], events: list[Any], state: RunState | None) -> RunState:
    runner = Runner(
        bench.setup(), Wire(bench, states), bench.model(), bench.evaluation, events.append, _stop, state=state
    )
    with suppress(Paused):
        runner.run()
    return RunState.from_tree(crossed(runner.state.to_tree()))


def _stop(state: RunState, task_end: bool) -> None:
    raise Paused
