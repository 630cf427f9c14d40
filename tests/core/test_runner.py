"""The one round loop: what runs when, what it costs, and that neither clients' order nor absence disturbs it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.context import Place, Setup, TrainOptions
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.evaluate import EvalOptions, EvalSpec
from everfed.core.events import Diverged
from everfed.core.handle import Client, Server
from everfed.core.message import Message, Model, Values
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part
from everfed.core.phase import ALWAYS, BEGIN, END, TRAIN, Cohort, Phase, Rounds, Sum, When
from everfed.core.server import Runner, RunState, batchable, plan_of
from everfed.core.step import Step
from everfed.core.stream import RoundPlan
from everfed.core.trainer import Trainer
from everfed.engines.eager import Eager
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.store.clients import ClientStore
from tests.support.spy import Seen, spied
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable
from tests.support.wire import crossed

P = 16 * 8 + 8 + 8 * 4 + 4  # parameters of the toy MLP
STEP = Optimizer(lr=0.1)


@dataclass(frozen=True)
class Counting(Part):
    """Asks clients for their number of samples in a phase of its own, `repeat` times or until the count is 100."""

    rounds: Rounds = ALWAYS
    when: When = When.AFTER
    cohort: Cohort = Cohort.SAMPLED
    repeat: int = 1

    name: ClassVar[str] = "counting"

    def phases(self) -> tuple[Phase, ...]:
        on_server = self.cohort is Cohort.SERVER
        return (
            Phase(
                "count", self.cohort, self.rounds, self.when, {} if on_server else {"n": Sum()}, self.repeat,
                run=None if on_server else self._count, update=self._add,
            ),
        )  # fmt: skip

    def _count(self, client: Client) -> Values:
        client.state["calls"] = client.state.get("calls", 0) + 1
        return {"n": float(len(client.data))}

    def _add(self, server: Server) -> bool:
        total = server.state.get("total", 0.0) + (server.reduced.get("n") or 0.0)
        server.state = {"total": total, "times": server.state.get("times", 0) + 1}
        return total >= 100


def counting(**options: Any) -> Bench:
    def build() -> Method:
        return compose(FedAvg(), Counting(**options))

    return Bench(build)


def phases(outcome: Outcome) -> list[tuple[int, str]]:
    names = {"phase": lambda event: event["phase"], "evaluation": lambda event: "evaluate"}
    return [(e["round"], names[e["event"]](e)) for e in outcome.events if e["event"] in names]


# the phases of a round ------------------------------------------------------------------------------------------------
def test_a_round_of_fedavg_is_train_and_a_task_ends_with_scores() -> None:
    outcome = Bench().run()
    assert phases(outcome) == [(0, "train"), (1, "train"), (1, "evaluate"), (2, "train"), (3, "train"), (3, "evaluate")]


def test_fedgp_takes_its_reference_after_every_aggregation() -> None:
    names = [name for _, name in phases(Bench("fedgp").run())]
    assert names == ["train", "reference", "train", "reference", "evaluate"] * 2


@pytest.mark.parametrize(
    ("rounds", "when", "expected"),
    [
        (ALWAYS, When.BEFORE, ["count", "train", "count", "train", "evaluate"] * 2),
        (BEGIN, When.BEFORE, ["count", "train", "train", "evaluate"] * 2),
        (END, When.AFTER, ["train", "train", "count", "evaluate"] * 2),
    ],
)
def test_phases_before_and_after(rounds: Rounds, when: When, expected: list[str]) -> None:
    assert [name for _, name in phases(counting(rounds=rounds, when=when).run())] == expected


def test_scores_may_be_taken_more_often() -> None:
    outcome = Bench(evaluation=EvalOptions(every=1)).run()
    assert [name for _, name in phases(outcome)] == ["train", "evaluate"] * 4
    assert sorted(outcome.state.rows) == [0, 1]
    assert [curve["round"] for curve in outcome.state.curves] == [0, 1, 2, 3]


def test_cohorts() -> None:
    stream = Toy(cohorts={0: (1,), 1: (0, 2), 2: (1,), 3: (1,)})
    sampled = counting().change(stream=stream).run()
    assert [e["clients"] for e in sampled.events if e["event"] == "phase" and e["phase"] == "count"] == [
        [1], [0, 2], [1], [1],
    ]  # fmt: skip
    everybody = counting(cohort=Cohort.ALL).change(stream=stream).run()
    assert everybody.state.server["counting"]["total"] == 4 * 36.0
    assert {c: s["counting"]["calls"] for c, s in everybody.clients.items()} == {0: 4, 1: 4, 2: 4}
    nobody = counting(cohort=Cohort.SERVER).change(stream=stream).run()
    assert nobody.state.server["counting"] == {"total": 0.0, "times": 4}


def test_a_phase_repeats_until_it_is_done() -> None:
    """3 clients x 12 samples each time: 36, 72, 108; from then on it is done at once."""
    outcome = counting(repeat=5).run()
    assert [e["repeat"] for e in outcome.events if e.get("phase") == "count"] == [0, 1, 2, 0, 0, 0]
    assert counting(repeat=2).run().state.server["counting"]["times"] == 2 + 1 + 1 + 1


def test_the_accuracy_matrix_is_lower_triangular_or_full() -> None:
    rows = Bench().run().state.rows
    assert rows[0][1] is None and len(rows[0]) == 2 and all(row[0] == 40 for row in rows[1])
    full = Bench(evaluation=EvalOptions(zero_shot=True)).run().state.rows
    assert full[0][1] is not None
    assert full[0][0] == rows[0][0] and full[1] == rows[1]


def test_the_untrained_model_is_scored_where_the_whole_matrix_is() -> None:
    """Forward transfer compares with it."""
    bench = Bench(evaluation=EvalOptions(zero_shot=True))
    outputs = [bench.trainer().outputs(bench.model(), bench.stream.test(task).x) for task in range(2)]
    right = [int((found.argmax(1) == bench.stream.test(t).y).sum()) for t, found in enumerate(outputs)]
    initial = bench.run().state.initial
    assert initial is not None and [row[:2] for row in initial] == [[40, right[0]], [40, right[1]]]
    assert Bench().run().state.initial is None
    resumed = RunState.from_tree(crossed(bench.run(rounds=1).state.to_tree()))
    assert resumed.initial == initial


def test_training_learns_the_toy_tasks() -> None:
    bench = Bench(stream=Toy(samples=40, rounds_per_task=8), train=TrainOptions(4, 5, Optimizer(lr=0.3)))
    scored, full, *_ = bench.run().state.rows[0][0]
    assert full / scored > 0.8


def test_the_cost_in_samples_counts_every_epoch() -> None:
    """4 rounds of 3 clients with 12 samples each, in 2 epochs; a client without data costs nothing."""
    assert Bench().run().state.samples == 4 * 3 * 12 * 2
    assert Bench(stream=Toy(sizes={(1, 0): 0})).run().state.samples == (2 * 2 + 2 * 3) * 12 * 2


# bytes ---------------------------------------------------------------------------------------------------------------
def per_round(outcome: Outcome) -> dict[int, tuple[int, int]]:
    rounds: dict[int, tuple[int, int]] = {}
    for event in outcome.events:
        if event["event"] == "phase":
            up, down = rounds.get(event["round"], (0, 0))
            rounds[event["round"]] = (up + event["bytes_up"], down + event["bytes_down"])
    return rounds


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "er", "der", "der++", "agem", "ideal"])
def test_most_methods_cost_one_model_each_way(name: str) -> None:
    assert set(per_round(Bench(name).run()).values()) == {(3 * 4 * P, 3 * 4 * P)}


def test_fedgp_costs_one_gradient_more_each_way() -> None:
    """Uplink (S + 4P) / S = 2. The model that the reference is taken at is the next round's: it is sent once."""
    rounds = per_round(Bench("fedgp").run())
    assert [up for up, _ in rounds.values()] == [3 * 8 * P] * 4
    # the first round also brings the first model and no reference
    assert [down for _, down in rounds.values()] == [3 * (4 * P + 4 * P), *[3 * (4 * P + 4 * P)] * 3]


def test_fedgp_with_batchnorm_costs_four_bytes_per_parameter_more() -> None:
    bench = Bench("fedgp", module=Norm)
    layout = bench.layout()
    size = 4 * layout.size + 4 * 6 + 8 * 1  # parameters, running mean and variance of 3 channels, one counter
    base = per_round(bench.change(method="fedavg").run())
    assert {up for up, _ in base.values()} == {3 * size}
    assert {up for up, _ in per_round(bench.run()).values()} == {3 * (size + 4 * layout.size)}


def test_equalised_communication_sends_the_baseline_s_bytes() -> None:
    stream = Toy(tasks=1, rounds_per_task=4)
    base = Bench(stream=stream).run().state.traffic.as_dict()
    equalised = Bench("fedgp", stream=stream, train=TrainOptions(2, 5, STEP, sync_every=2)).run()
    traffic = equalised.state.traffic.as_dict()
    assert traffic["bytes_up"] == base["bytes_up"] == 4 * 3 * 4 * P
    assert traffic["bytes_down"] == base["bytes_down"] == 4 * 3 * 4 * P
    assert traffic["bytes_by_part"]["fedgp"] == {"up": 2 * 3 * 4 * P, "down": 1 * 3 * 4 * P}
    # R / 2 synchronisations
    assert [e["round"] for e in equalised.events if e.get("phase") == "reference"] == [1, 3]


def test_fedcurv_costs_two_vectors_more_each_way() -> None:
    rounds = per_round(Bench("fedcurv").run())
    assert rounds[0] == (3 * 12 * P, 3 * 4 * P)  # there are no sums before the first round
    assert {rounds[r] for r in (1, 2, 3)} == {(3 * 12 * P, 3 * 12 * P)}


def test_a_client_that_was_away_gets_the_newest_model_once() -> None:
    outcome = Bench("fedgp", stream=Toy(cohorts={1: (0,), 2: (0,), 3: (0, 1)})).run()
    rounds = per_round(outcome)
    assert rounds[1] == (8 * P, 8 * P)
    # client 0 holds the model of round 2; client 1 does not, and both get a reference and the model of round 3
    assert rounds[3][1] == (0 + 4 * P) + (4 * P + 4 * P) + 2 * 4 * P


class Logging(Engine):
    """An engine that weighs what really passes: the tensors of serialised messages and replies."""

    name = "logging"

    def __init__(self, inner: Engine) -> None:
        self.inner, self.up, self.down = inner, 0, 0

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        for client, reply in self.inner.exchange(phase, clients, message, place):
            self.up += tree.tensor_bytes(crossed(reply.values))
            yield client, reply

    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return self.inner.evaluate(model, spec)

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()


@pytest.mark.parametrize("name", ["fedavg", "fedcurv", "fedgp+der", "fedgp+fedcurv"])
def test_reported_bytes_are_those_of_the_messages(name: str) -> None:
    bench, engines = Bench(name, module=Norm), []

    def build(setup: Setup, store: ClientStore) -> Engine:
        engines.append(Logging(bench.eager(setup, store)))
        return engines[0]

    assert bench.run(build).state.traffic.as_dict()["bytes_up"] == engines[0].up > 0


def test_bytes_by_part_add_up() -> None:
    traffic = Bench("fedgp+fedcurv").run().state.traffic.as_dict()
    assert set(traffic["bytes_by_part"]) == {"fedavg", "fedcurv", "fedgp"}
    for way in ("up", "down"):
        assert sum(part[way] for part in traffic["bytes_by_part"].values()) == traffic[f"bytes_{way}"]


@dataclass(frozen=True)
class Telling(FedAvg):
    """Sends ten numbers beside the model that it aggregates."""

    def broadcast(self, server: Server) -> Values:
        return {"hint": torch.zeros(10)}


def test_what_the_aggregating_part_sends_counts_beside_its_model() -> None:
    def sent(part: FedAvg) -> int:
        return Bench(lambda: compose(part)).run(rounds=1).state.traffic.down["fedavg"]

    assert sent(Telling()) - sent(FedAvg()) == 3 * 10 * 4


def test_local_statistics_never_travel() -> None:
    train = TrainOptions(1, 5, STEP, batchnorm="local")
    outcome = Bench(module=Norm, train=train).run()
    size = 4 * Bench(module=Norm).layout().size
    assert {up for up, _ in per_round(outcome).values()} == {3 * size}


def test_scoring_on_clients_does_not_send_statistics_that_stay_local() -> None:
    train = TrainOptions(1, 5, STEP, batchnorm="local")
    outcome = Bench(module=Norm, train=train).run()
    size = 4 * Bench(module=Norm).layout().size
    statistics = 4 * 6 + 8  # sent once, in the first round
    # every version of the parameters reaches every client once: rounds 0 to 3 and the one that is scored last
    assert outcome.state.traffic.as_dict()["bytes_down"] == 3 * (5 * size + statistics)


# equalised communication ---------------------------------------------------------------------------------------------
def equalised(sync_every: int, **fields: Any) -> Bench:
    return Bench(
        stream=Toy(tasks=1, rounds_per_task=4), train=TrainOptions(1, 6, STEP, sync_every=sync_every), **fields
    )


def test_between_synchronisations_clients_go_on_from_their_own_weights() -> None:
    """One client, two rounds without a server in between: its second round starts where its first ended."""
    bench = equalised(2).change(stream=Toy(clients=1, tasks=1, rounds_per_task=2))
    alone = bench.change(train=TrainOptions(1, 6, STEP)).run()
    assert torch.equal(bench.run().params, alone.params)


def test_the_shared_model_moves_at_synchronisations_only() -> None:
    first, second, third = (equalised(2).run(rounds=r).params for r in (1, 2, 3))
    assert torch.equal(first, equalised(2).model()["params"])
    assert not torch.equal(second, first) and torch.equal(second, third)


def test_an_equalised_run_is_not_the_plain_one() -> None:
    assert not torch.equal(equalised(2).run().params, equalised(1).run().params)


def test_buffers_fill_in_unsynchronised_rounds_too() -> None:
    outcome = equalised(4, method="fedgp").run(rounds=1)
    assert outcome.clients[0]["memory"]["host"]["n"] == 12


def test_nothing_is_sent_in_unsynchronised_rounds() -> None:
    rounds = per_round(equalised(2, method="fedgp+fedcurv").run())
    assert [up > 0 for up, _ in rounds.values()] == [False, True, False, True]


def test_participants_stay_between_synchronisations() -> None:
    bench = equalised(2).change(stream=Toy(tasks=1, rounds_per_task=4, cohorts={0: (0, 1), 1: (2,), 2: (1,), 3: (0,)}))
    trained = [e["clients"] for e in bench.run().events if e.get("phase") == "train"]
    assert trained == [[0, 1], [0, 1], [1], [1]]


def test_an_equalised_run_with_a_client_without_data() -> None:
    with_empty = equalised(2).change(stream=Toy(clients=3, tasks=1, rounds_per_task=4, sizes={(2, 0): 0})).run()
    without = equalised(2).change(stream=Toy(clients=2, tasks=1, rounds_per_task=4)).run()
    assert torch.equal(with_empty.params, without.params)


def test_after_rounds_without_data_a_client_does_not_go_on_from_old_weights() -> None:
    """Client 0 has no data in rounds 1 and 2. In round 3, which brings no model, it waits; round 4 brings one."""
    stream = Toy(clients=2, tasks=6, rounds_per_task=1, sizes={(0, 1): 0, (0, 2): 0})
    log: list[Seen] = []
    bench = equalised(2).change(stream=stream)
    bench.change(method=spied(bench.build_method(), log)).run()
    started = {seen.round: seen.params for seen in reversed(log) if seen.client == 0}
    assert sorted(started) == [0, 4, 5]
    assert torch.equal(started[4], bench.run(rounds=4).params)


class Noting(Toy):
    """Every round has a note of its own."""

    def round(self, index: int) -> RoundPlan:
        return replace(super().round(index), notes={"round": index})


def test_a_note_is_of_the_round_that_drew_its_participants() -> None:
    setup = equalised(2).change(stream=Noting(tasks=1, rounds_per_task=4)).setup()
    assert [plan_of(setup, index).notes for index in range(4)] == [{"round": 0}, {}, {"round": 2}, {}]


# phases that are sent together ---------------------------------------------------------------------------------------
def together(*phases: Phase) -> list[int]:
    """Which of these phases go with the first one."""
    return batchable(phases, 0, Toy().round(0))


def test_phases_are_sent_together_while_the_server_stays_as_it_is() -> None:
    quiet, asks, changes = Phase("a"), Phase("b", reduce={"n": Sum()}), Phase("c", update=lambda server: None)
    alone, silent = Phase("d", Cohort.SERVER), Phase("e", sends=False)
    assert together(quiet, quiet, asks) == [1, 2]
    assert together(quiet, asks, quiet) == [1]  # what the second brings may change what the third sends
    assert together(quiet, changes, quiet) == [1]
    assert together(quiet, asks, quiet, silent) == [1]
    assert together(asks, silent, silent) == [1, 2]  # nothing is sent that could have changed
    assert together(asks, silent, quiet) == [1]
    assert together(Phase(TRAIN), quiet) == []
    assert together(quiet, alone, quiet) == []
    assert together(quiet, replace(quiet, repeat=2)) == []


# order, absence, faults ----------------------------------------------------------------------------------------------
class Backwards(Eager):
    """Runs clients last to first, and replies in the order it must."""

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        return iter(sorted(super().exchange(phase, tuple(reversed(clients)), message, place), key=lambda pair: pair[0]))


class Losing(Eager):
    """Client 1 cannot be reached in round 1."""

    def exchange(  # type: ignore[override]
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client in clients:
            if (client, place.round) == (1, 1):
                yield client, Absent("failed", "gone")
            else:
                yield from super().exchange(phase, (client,), message, place)


def test_a_round_goes_on_without_a_client_that_is_absent() -> None:
    bench = Bench("fedgp+der")
    lost = bench.run(lambda setup, store: Losing(setup, store, bench.build_module))
    planned = bench.change(stream=Toy(cohorts={1: (0, 2)})).run()
    assert torch.equal(lost.params, planned.params)
    assert tree.equal(lost.clients[1], planned.clients[1])
    assert lost.state.absent == {"failed": 2}  # in `train` and in `reference`
    assert [event["absent"] for event in lost.events if "absent" in event] == [{"1": "failed: gone"}] * 2
    assert RunState.from_tree(crossed(lost.state.to_tree())).absent == lost.state.absent


class Refusing(Eager):
    """Adopts no model after the first round."""

    adopted = 0

    def refusal(self, model: Model) -> str:
        self.adopted += 1
        return "" if self.adopted == 1 else "of no use"


def test_of_a_model_that_is_refused_nothing_stays() -> None:
    """Neither the model nor what the parts made of it: the server's momentum."""
    bench = Bench("fedavgm", stream=Toy(tasks=1, rounds_per_task=3))
    first = bench.run(rounds=1)
    refused = bench.run(lambda setup, store: Refusing(setup, store, bench.build_module))
    assert tree.equal(refused.state.server, first.state.server)
    warned = [event["message"] for event in refused.events if event["event"] == "warning"]
    assert len(warned) == 2 and all("of no use" in message for message in warned)


def test_the_same_model_again_is_no_new_version() -> None:
    """A phase that assigns the model as it is: no client receives it twice."""

    def same(server: Server) -> None:
        server.model = dict(server.model)

    @dataclass(frozen=True)
    class Same(Part):
        name: ClassVar[str] = "same"

        def phases(self) -> tuple[Phase, ...]:
            return (Phase("same", Cohort.SERVER, update=same), Phase("look", run=lambda client: None))

    plain, again = Bench().run(), Bench(lambda: compose(FedAvg(), Same())).run()
    model = 4 * P * 3  # of all clients; `look` brings the last one a round earlier than the next training would
    assert again.state.version == plain.state.version == 4
    assert again.state.traffic.down.total() == plain.state.traffic.down.total() + model


def test_everything_of_a_runs_state_is_saved() -> None:
    state = Bench("fedgp+der", evaluation=EvalOptions(every=1, zero_shot=True)).run().state
    state.absent["failed"], state.watched["m"], state.pieces["p"] = 2, {"seen": [1]}, 3
    state.position, state.repeat, state.sent = 1, 2, {3: {"fedavg": {"params": torch.ones(2)}}}
    plain = RunState(server={})
    assert all(getattr(state, entry.name) != getattr(plain, entry.name) for entry in fields(RunState))
    again = RunState.from_tree(crossed(state.to_tree()))
    for entry in fields(RunState):
        if entry.name in ("server", "sent"):
            assert tree.equal(getattr(again, entry.name), getattr(state, entry.name)), entry.name
        else:
            assert getattr(again, entry.name) == getattr(state, entry.name), entry.name


@pytest.mark.parametrize("name", ["fedavg", "fedcurv", "fedgp+der", "fedgp+agem", "fedgp+er"])
def test_the_order_in_which_clients_run_changes_nothing(name: str) -> None:
    bench = Bench(name, module=Norm)
    backwards = bench.run(lambda setup, store: Backwards(setup, store, bench.build_module))
    assert tree.equal(comparable(bench.run().state), comparable(backwards.state))


def test_a_client_without_data_is_left_out() -> None:
    bench = Bench(stream=Toy(clients=2))
    with_empty = bench.change(stream=Toy(clients=3, sizes={(2, 0): 0, (2, 1): 0})).run()
    assert torch.equal(with_empty.params, bench.run().params)
    assert with_empty.events[0]["trained"] == 2


def test_nobody_has_data() -> None:
    bench = Bench("fedgp+fedcurv", stream=Toy(samples=0))
    outcome = bench.run()
    assert torch.equal(outcome.params, bench.model()["params"])
    assert outcome.state.traffic.as_dict()["bytes_up"] == 0


def test_a_diverged_loss_is_an_error_that_names_the_client() -> None:
    bench = Bench(train=TrainOptions(2, 5, Optimizer(lr=1e30)))
    with pytest.raises(Diverged, match=r"client 0 is not finite in phase 'train' of round 1 \(3 of 3.*optimizer.lr"):
        bench.run()


@dataclass(frozen=True)
class Poison(Part):
    """The loss of client 1 is infinite in round 2."""

    name: ClassVar[str] = "poison"

    def loss(self, step: Step) -> Tensor | None:
        return torch.tensor(math.inf) if (step.context.client, step.context.round) == (1, 2) else None


def test_divergence_stops_the_run_before_aggregation() -> None:
    bench = Bench(lambda: compose(FedAvg(), Poison()))
    saved: list[RunState] = []
    setup = bench.setup()
    runner = Runner(
        setup,
        bench.eager(setup, ClientStore()),
        bench.model(),
        EvalOptions(),
        save=lambda state, end: saved.append(RunState.from_tree(crossed(state.to_tree()))),
    )
    with pytest.raises(Diverged, match=r"client 1 .* round 3 \(1 of 3"):
        runner.run()
    assert torch.equal(runner.state.model["params"], saved[-1].model["params"])
    assert (saved[-1].round, saved[-1].position) == (2, 0)


def test_a_report_of_the_servers_own_phase_must_be_finite() -> None:
    @dataclass(frozen=True)
    class Dreams(Part):
        name: ClassVar[str] = "dreams"

        def phases(self) -> tuple[Phase, ...]:
            return (Phase("dream", Cohort.SERVER, update=lambda server: server.report("loss", math.nan)),)

    with pytest.raises(Diverged, match="loss is not finite in the server's phase 'dream' of round 1, repeat 0"):
        Bench(lambda: compose(FedAvg(), Dreams())).run()


@dataclass(frozen=True)
class Broken(Part):
    name: ClassVar[str] = "broken"

    def receive(self, client: Client) -> None:
        if client.id == 2:
            raise ValueError("no such thing")


def test_a_failing_client_is_named() -> None:
    message = r"client 2 failed in phase 'train' of round 1: ValueError: no such thing \(.*test_runner.py, line \d+"
    with pytest.raises(ClientError, match=message):
        Bench(lambda: compose(FedAvg(), Broken())).run()


# saving --------------------------------------------------------------------------------------------------------------
@dataclass
class Saver:
    """Keeps every state that is offered, as bytes, with the client states of that moment."""

    store: ClientStore
    saved: list[tuple[bytes, dict[int, bytes], bool]] = field(default_factory=list)

    def __call__(self, state: RunState, task_end: bool) -> None:
        clients = {c: tree.to_bytes(self.store.get(c) or {}) for c in self.store.clients()}
        self.saved.append((tree.to_bytes(state.to_tree()), clients, task_end))


def saved_run(bench: Bench) -> tuple[RunState, Saver]:
    setup, saver = bench.setup(), Saver(ClientStore())
    engine = bench.eager(setup, saver.store)
    return Runner(setup, engine, bench.model(), bench.evaluation, save=saver).run(), saver


@pytest.mark.parametrize("method", ["fedgp+der", "fedcurv"])
def test_a_run_resumes_after_any_phase(method: str) -> None:
    bench = Bench(method, stream=Toy(clients=2))
    whole, saver = saved_run(bench)
    for data, clients, _ in saver.saved[:-1]:
        store = ClientStore()
        for client, state in clients.items():
            store.put(client, tree.from_bytes(state))
        resumed = bench.run(state=RunState.from_tree(tree.from_bytes(data)), store=store)
        assert tree.equal(comparable(resumed.state), comparable(whole))


def test_a_run_resumes_between_two_repeats_of_a_phase() -> None:
    bench = counting(repeat=5)
    whole, saver = saved_run(bench)
    state = RunState.from_tree(tree.from_bytes(saver.saved[2][0]))
    assert (state.round, state.position, state.repeat) == (0, 1, 2)
    store = ClientStore()
    for client, data in saver.saved[2][1].items():
        store.put(client, tree.from_bytes(data))
    assert tree.equal(comparable(bench.run(state=state, store=store).state), comparable(whole))


def test_task_ends_are_marked() -> None:
    assert [end for _, _, end in saved_run(Bench())[1].saved] == [False, False, True, False, False, True]


def test_a_finished_run_has_nothing_left_to_do() -> None:
    outcome = Bench().run()
    again = Bench().run(state=outcome.state, store=outcome.store)
    assert again.events == [] and again.state.round == 4
