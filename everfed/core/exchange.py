"""What goes to the clients of a phase and what comes back, with the traffic it makes."""

from __future__ import annotations

from collections.abc import Sequence

from everfed.core.engine import Engine
from everfed.core.foresight import Ahead, Foresees, companions
from everfed.core.intake import Intake, Spread
from everfed.core.message import MODEL, Message, Once, addressed, payload_bytes, versions
from everfed.core.phase import TRAIN, Phase
from everfed.core.run_state import RunState
from everfed.core.world import Moment, World


class Exchange:
    """Between the server's state and an engine's clients."""

    def __init__(self, world: World, engine: Engine, state: RunState) -> None:
        self.world, self.engine, self.state = world, engine, state

    # what is sent ------------------------------------------------------------------------------------------------
    def message(self, phase: Phase, moment: Moment) -> Message | None:
        """The model and what the parts broadcast; nothing in a silent phase; None for training between
        synchronisations."""
        method, ctx = self.world.method, self.world.server(phase.name, moment)
        if phase.name == TRAIN and moment.round % self.world.options.sync_every != 0:
            return None
        if phase.name != TRAIN and phase.name in method.part(phase.owner).silent:
            return {}
        message = self.model()
        for part in method.parts:
            if phase.name == TRAIN or part.name == phase.owner:
                values = part.broadcast(self.state.server, phase.name, ctx)
                if values:
                    message[part.name] = values
        return message

    def model(self) -> Message:
        """Each version reaches a client once; local statistics are sent at the beginning only."""
        message: Message = {MODEL: {k: Once(self.state.version, v) for k, v in self.state.model.items()}}
        if self.world.options.batchnorm == "local":
            message[MODEL] |= {k: Once(0, self.state.model[k]) for k in ("stats", "counters")}
        return message

    def foresee(self, agenda: Sequence[Phase], moment: Moment) -> None:
        """Tell an engine that wants to know which of the next phases clients can be asked for along with this one."""
        if not isinstance(self.engine, Foresees):
            return
        ahead = []
        for position in companions(self.world.method, agenda, moment.position, moment.plan):
            phase, then = agenda[position], Moment(moment.round, moment.plan, 0, position)
            ahead.append(Ahead(phase, self.message(phase, then), then))
        self.engine.expect(ahead)

    # what comes back ---------------------------------------------------------------------------------------------
    def take_in(self, intake: Intake, phase: Phase, moment: Moment, message: Message | None) -> int:
        """Run a phase on its clients and take their replies in, in client order; returns the bytes sent to them."""
        clients = phase.clients(moment.plan)
        if not clients:
            return 0
        down = self._account_down(clients, message)
        for client, reply in self.engine.exchange(phase, clients, message, moment):
            intake.add(client, reply)
        if isinstance(self.engine, Spread):
            self.engine.merge(intake)
        self.state.traffic.up.update(intake.traffic.up)
        self.state.traffic.down.update(intake.traffic.down)  # what the engine sent beside the message
        self.state.absent.update(one.kind for one in intake.absent.values())
        return down + sum(intake.traffic.down.values())

    def _account_down(self, clients: tuple[int, ...], message: Message | None) -> int:
        if message is None:
            return 0
        name, new, down = self.world.method.aggregator.name, versions(message), 0
        for client in clients:
            sizes = payload_bytes(addressed(message, client), self.state.held.get(client, {}))
            sizes[name] = sizes.get(name, 0) + sizes.pop(MODEL, 0)
            self.state.traffic.sent(sizes)
            self.state.held[client] = self.state.held.get(client, {}) | new
            down += sum(sizes.values())
        return down
