"""Secure aggregation on an engine whose clients are absent in some phases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.engine import Absent, Engine
from everfed.core.evaluate import EvalSpec
from everfed.core.message import Message, Model
from everfed.core.method import Method
from everfed.core.phase import Phase
from everfed.core.trainer import Trainer
from everfed.privacy.secure_client import secured
from everfed.privacy.secure_server import Secured
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Outcome

Lost = Mapping[str, Sequence[int]]
STEP = 2 * 16.0 / (1 << 24)


@dataclass
class Flaky(Engine):
    """An engine whose clients are absent in some phases, and that writes down all that reaches the server."""

    inner: Engine
    lost: Lost = field(default_factory=dict)
    seen: list[tuple[str, int, Reply]] = field(default_factory=list)
    name: str = "flaky"

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        gone = self.lost.get(phase.name, ())
        for client in clients:
            if client in gone:
                yield client, Absent("failed", "gone")
                continue
            for _, reply in self.inner.exchange(phase, [client], message, place):
                assert isinstance(reply, Reply)
                self.seen.append((phase.name, client, reply))
                yield client, reply

    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return self.inner.evaluate(model, spec)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()


def protected(bench: Bench, **options: Any) -> Bench:
    plain = bench.build_method

    def build() -> Method:
        return secured(plain(), **options)

    return replace(bench, method=build)


def secure_run(bench: Bench, lost: Lost | None = None, seen: list[Any] | None = None, **options: Any) -> Outcome:
    own = protected(bench, **options)

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(Flaky(own.eager(setup, store), lost or {}, [] if seen is None else seen), setup)

    return own.run(engine)


def plain_run(bench: Bench, lost: Lost | None = None) -> Outcome:
    return bench.run(lambda setup, store: Flaky(bench.eager(setup, store), lost or {}))


def events(outcome: Outcome, **wanted: Any) -> list[dict[str, Any]]:
    return [event for event in outcome.events if wanted.items() <= event.items()]
