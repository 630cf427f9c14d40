"""Coordinated selection as phases of a run ("Coordinated Replay Sample Selection for Continual Federated Learning",
Algorithm 1), against the same algorithm in memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed import models
from everfed.core import random, tree
from everfed.method import Data, Mean, Optimizer, Server, TrainOptions, When
from everfed.methods.replay import coordinated
from everfed.methods.replay.coordinated import SELECT, Coordinated, coordinate
from everfed.methods.replay.diversity import Candidates, select
from everfed.methods.replay.memory import NAME, Pool, make_policy, stored
from everfed.methods.replay.sample_gradients import GradientOptions, gradients_at
from tests.support.phases import phase_of
from tests.support.toy import Bench, Given, Linear, Norm, Outcome, Toy, mean_square
from tests.support.wire import run_over_wire

LONG = Toy(clients=4, tasks=3)


def bench(size: int = 5, stream: Toy = LONG, kind: str = "coordinated", **options: Any) -> Bench:
    fields = {key: options.pop(key) for key in ("module", "train") if key in options}
    gradients = {key: options.pop(key) for key in ("layers", "projection", "draws") if key in options}
    memory = {"size": size, "policy": {"kind": kind, **options}, "gradients": gradients}
    return Bench("er", {"memory": memory, "er": {"mode": "union"}}, stream=stream, **fields)


def kept(outcome: Outcome, client: int) -> list[int]:
    return stored(outcome.clients[client][NAME]).ids.tolist()


def gradients(running: Bench, outcome: Outcome, client: int, task: int = 0, **options: Any) -> Tensor:
    data = running.stream.data(client, task)
    ctx = running.context(client, 2 * task + 1, "remember")
    return gradients_at(ctx, outcome.state.model, data.x, data.y, GradientOptions(**options))


def seeds(running: Bench, round_index: int = 1) -> list[int]:
    return [running.context(client, round_index, "remember").key("selection") for client in range(4)]


# what comes of it ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "module"), [(1, None), (5, Norm)])
def test_no_exchange_is_the_uncoordinated_choice_bit_for_bit(size: int, module: Any) -> None:
    alone = bench(size, kind="uncoordinated", module=module).run()
    together = bench(size, exchanges=0, module=module).run()
    assert tree.equal(alone.state.model, together.state.model)
    assert all(tree.equal(alone.clients[c], together.clients[c]) for c in range(4))


def test_an_exchange_changes_the_choice() -> None:
    zero, one = (bench(exchanges=k).run(rounds=2) for k in (0, 1))
    assert any(kept(zero, c) != kept(one, c) for c in range(4))


@pytest.mark.parametrize(
    ("rounding", "exchanges", "size"),
    [
        ("zero-diagonal", 0, 1),
        ("top-n", 0, 5),
        ("zero-diagonal", 1, 5),
        ("top-n", 1, 1),
        ("zero-diagonal", 4, 1),
        ("zero-diagonal", 4, 5),
        ("top-n", 4, 5),
    ],
)
def test_the_protocol_chooses_what_the_algorithm_in_memory_chooses(rounding: str, exchanges: int, size: int) -> None:
    running = bench(size, exchanges=exchanges, rounding=rounding)
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client) for client in range(4)]
    expected = coordinate(matrices, size, exchanges, rounding=rounding, seeds=seeds(running))
    for client in range(4):
        assert kept(outcome, client) == LONG.data(client, 0).ids[expected.choices[client]].tolist()


def test_projected_gradients_are_used_everywhere() -> None:
    running = bench(exchanges=2, projection=30)
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client, projection=30) for client in range(4)]
    expected = coordinate(matrices, 5, 2, seeds=seeds(running))
    assert [kept(outcome, c) for c in range(4)] == [LONG.data(c, 0).ids[expected.choices[c]].tolist() for c in range(4)]
    sent = [e for e in outcome.events if e.get("phase") == SELECT]
    assert [e["bytes_up"] for e in sent] == [4 * 4 * 30] * 2


@pytest.mark.parametrize(("projection", "computed"), [(30, 1), (0, 4)])
def test_projected_gradients_are_computed_once_a_selection(
    projection: int, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three exchanges and the choice; in the second task, with another model, again. Nothing is kept afterwards."""
    running, calls = bench(exchanges=3, projection=projection), list[int]()
    anew = Pool.gradients

    def counted(pool: Pool) -> Tensor:
        calls.append(pool.client.id)
        return anew(pool)

    monkeypatch.setattr(Pool, "gradients", counted)
    outcome = running.run(rounds=4)
    assert [calls.count(client) for client in range(4)] == [2 * computed] * 4
    assert all("sent" not in client[NAME]["host"] for client in outcome.clients.values())


def test_gradients_are_a_mean_over_drawn_augmentations() -> None:
    """The same in all exchanges and in the choice; another in the next round."""
    running = Bench(stream=Toy(augmented=True))
    model, data, stream = running.model(), running.stream.data(0, 0), running.stream
    rng = random.generator(running.seed, "gradient draws", 1, 0)
    drawn = [torch.from_numpy(stream.draw_augmentation(rng, len(data))) for _ in range(3)]
    ctx = running.context(0, 1, "select")
    single = [gradients_at(ctx, model, stream.augment(data.x, d), data.y, GradientOptions()) for d in drawn]
    three = GradientOptions(draws=3)
    found = gradients_at(ctx, model, data.x, data.y, three)
    assert torch.allclose(found, torch.stack(single).mean(0), atol=1e-6)
    assert not torch.allclose(found, gradients_at(ctx, model, data.x, data.y, GradientOptions()), atol=1e-4)
    later = [gradients_at(running.context(0, r, "remember"), model, data.x, data.y, three) for r in (1, 2)]
    assert torch.equal(found, later[0]) and not torch.equal(found, later[1])


def test_with_draws_the_protocol_still_chooses_what_the_algorithm_chooses() -> None:
    running = bench(stream=Toy(clients=4, tasks=3, augmented=True), exchanges=2, draws=2)
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client, draws=2) for client in range(4)]
    chosen = coordinate(matrices, 5, 2, seeds=seeds(running)).choices
    assert [kept(outcome, client) for client in range(4)] == [choice.tolist() for choice in chosen]


def test_one_client_is_never_moved() -> None:
    """M = 1: h = 0 at every exchange."""
    stream = Toy(clients=1, tasks=2)
    zero, four = (bench(stream=stream, exchanges=k).run(rounds=2) for k in (0, 4))
    assert kept(zero, 0) == kept(four, 0)


def test_identical_clients_have_no_target() -> None:
    class Same(Toy):
        def data(self, client: int, task: int) -> Data:
            return super().data(0, task)

    stream = Same(clients=3, tasks=2)
    train = TrainOptions(1, 100, Optimizer(lr=0.1))
    running = bench(stream=stream, exchanges=1, train=train)
    targets = [policy_target(running, client) for client in range(3)]
    assert all(target.abs().max() <= 1e-6 for target in targets)


def exchanged(running: Bench, clients: range | list[int]) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """{client: (its states after one exchange, what it sent)} at the first model."""
    run, found = phase_of(running.build_method().part(NAME), SELECT).run, {}
    for number in clients:
        client = running.client(NAME, None, number, round_index=1, phase=SELECT)
        reply = run(client)  # type: ignore[misc]
        found[number] = client.states, reply
    return found


def policy_target(running: Bench, client: int) -> Tensor:
    sent = exchanged(running, range(running.stream.clients))
    mean = torch.stack([reply["sum"] for _, reply in sent.values()]).double().mean(0).float()
    choosing = pool(running, sent[client][0], client, message={"mean": mean})
    target = coordinated._target(Candidates.of(choosing.gradients()), choosing)
    assert target is not None
    return target


def pool(running: Bench, states: dict[str, Any], client: int = 0, index: int = 1, **sent: Any) -> Pool:
    """What a client chooses from, at the first model."""
    messages = {NAME: sent.get("message", {})}
    handle = running.client(NAME, states, client, round_index=index, phase="remember", messages=messages)
    return running.build_method().part(NAME).pool(handle)


def test_gradients_of_an_earlier_round_are_not_used() -> None:
    """A client may have left between an exchange and its choice; it comes back with another model."""
    running = bench(exchanges=1, projection=30)
    states = exchanged(running, [0])[0][0]
    now, later = (pool(running, states, index=index) for index in (1, 3))
    assert coordinated._gradients(now) is states[NAME]["host"]["sent"]["gradients"]
    assert torch.equal(coordinated._gradients(later), later.gradients())


def test_targets_sum_to_zero() -> None:
    running = bench(exchanges=1)
    targets = torch.stack([policy_target(running, client) for client in range(4)])
    longest = max(reply["sum"].norm() for _, reply in exchanged(running, range(4)).values())
    assert targets.sum(0).abs().max() <= 1e-6 * longest
    assert targets.abs().max() > 1e-2


# the literal example -------------------------------------------------------------------------------------------------
def two_clients() -> Given:
    """d = 1: G_1 = [1, 1, -1], G_2 = [1, 1, 1] up to a common sign: squared errors of one weight that is 0."""
    ones = torch.ones(3, 1)
    table = {
        (client, task): (ones, torch.tensor(targets))
        for task in (0, 1)
        for client, targets in enumerate(([-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]))
    }
    return Given(clients=2, tasks=2, rounds_per_task=1, classes=1, table=table, objective=mean_square)


class Means:
    """Keeps the mean after every exchange."""

    def __init__(self) -> None:
        self.squares: list[float] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Means:
        plain = Coordinated._keep_mean

        def update(policy: Coordinated, server: Server) -> bool:
            done = plain(policy, server)
            self.squares.append(server.state["square"])
            return done

        monkeypatch.setattr(Coordinated, "_keep_mean", update)
        return self


def test_two_clients_in_one_dimension_halve_their_sum_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S after 0, 1, 2, 3 exchanges = 1, 0.5, 0.25, 0.125 exactly; the mean is S / 2."""
    means = Means().watch(monkeypatch)
    train = TrainOptions(1, 3, Optimizer(lr=0.0))
    running = bench(1, two_clients(), exchanges=4, train=train, module=Linear)
    outcome = running.run(rounds=1)
    sums = [2 * square**0.5 for square in means.squares]
    assert sums == pytest.approx([1.0, 0.5, 0.25, 0.125], abs=1e-9)
    assert kept(outcome, 0) == [2] and len(kept(outcome, 1)) == 1  # -1 against +1


@pytest.mark.parametrize("options", [{}, {"projection": 50}, {"layers": "last"}])
def test_the_relaxed_objective_never_increases(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    means = Means().watch(monkeypatch)
    bench(exchanges=6, **options).run(rounds=2)
    assert len(means.squares) == 6
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in zip(means.squares, means.squares[1:], strict=False))
    assert means.squares[-1] < means.squares[0]


def test_a_tolerance_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    means = Means().watch(monkeypatch)
    bench(exchanges=50, tolerance=0.05).run(rounds=2)
    gains = [1 - later / earlier for earlier, later in zip(means.squares, means.squares[1:], strict=False)]
    assert len(means.squares) < 50 and gains[-1] <= 0.05 and all(gain > 0.05 for gain in gains[:-1])


# what crosses the wire -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("exchanges", [1, 4])
def test_a_vector_up_and_a_vector_down_per_client_and_exchange(exchanges: int) -> None:
    running = bench(exchanges=exchanges)
    outcome = running.run()
    length = 4 * running.layout().size
    selections = 2  # three tasks; none is made after the last
    assert outcome.state.traffic.up[NAME] == selections * exchanges * 4 * length
    assert outcome.state.traffic.down[NAME] == selections * exchanges * 4 * length
    assert "memory" not in outcome.state.server  # nothing is kept on the server


def test_nothing_else_is_sent_and_it_may_be_summed_in_secret() -> None:
    running = bench(exchanges=2)
    method = running.build_method()
    phases = {phase.name: phase for phase in method.phases(When.AFTER)}
    assert dict(phases[SELECT].reduce) == {"sum": Mean()} and dict(phases["remember"].reduce) == {}
    assert method.reveals() == {}
    for _, reply in exchanged(running, range(4)).values():
        assert list(reply) == ["sum"] and reply["sum"].shape == (running.layout().size,)
        assert reply["sum"].dtype == torch.float32
        assert reply["sum"].norm() <= 5 + 1e-4  # N unit vectors at most


def test_over_bytes_it_is_the_same_bit_for_bit() -> None:
    stream = Toy(clients=3, tasks=3, sizes={(0, 1): 0, (2, 0): 2})
    for options in ({"exchanges": 3}, {"exchanges": 2, "speakers": "sampled", "rounding": "top-n"}):
        running = bench(stream=stream, module=Norm, **options)
        a, b = running.run(), run_over_wire(running)
        assert tree.equal(a.state.model, b.state.model)
        assert all(tree.equal(a.clients[c], b.clients[c]) for c in range(3))


def test_clients_keep_nothing_of_a_selection() -> None:
    outcome = bench(exchanges=3).run()
    assert all(set(state[NAME]["host"]) == {"n", "seen", "ids", "stored"} for state in outcome.clients.values())


# who takes part ------------------------------------------------------------------------------------------------------
def test_a_client_without_samples_sends_nothing_and_is_not_counted() -> None:
    stream = Toy(clients=4, tasks=2, sizes={(3, 0): 0})
    running = bench(stream=stream, exchanges=2)
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client) for client in range(3)]
    expected = coordinate(matrices, 5, 2, seeds=seeds(running)[:3])
    assert [kept(outcome, c) for c in range(3)] == [
        stream.data(c, 0).ids[expected.choices[c]].tolist() for c in range(3)
    ]
    assert kept(outcome, 3) == []
    assert all(e["bytes_up"] == 3 * 4 * running.layout().size for e in outcome.events if e.get("phase") == SELECT)


def test_a_client_with_fewer_samples_than_rows_keeps_all_and_still_sends() -> None:
    stream = Toy(clients=4, tasks=2, sizes={(1, 0): 3, (2, 0): 5})
    running = bench(stream=stream, exchanges=2)
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client) for client in range(4)]
    expected = coordinate(matrices, 5, 2, seeds=seeds(running))
    assert kept(outcome, 1) == stream.data(1, 0).ids.tolist() and kept(outcome, 2) == stream.data(2, 0).ids.tolist()
    for client in (0, 3):
        assert kept(outcome, client) == stream.data(client, 0).ids[expected.choices[client]].tolist()


def test_absent_clients_choose_by_themselves() -> None:
    """Only the sampled clients exchange; M counts them alone."""
    stream = Toy(clients=4, tasks=2, cohorts={1: (0, 2)})
    running = bench(stream=stream, exchanges=3, speakers="sampled")
    outcome = running.run(rounds=2)
    matrices = [gradients(running, outcome, client) for client in range(4)]
    together = coordinate([matrices[0], matrices[2]], 5, 3, seeds=[seeds(running)[c] for c in (0, 2)])
    assert kept(outcome, 0) == stream.data(0, 0).ids[together.choices[0]].tolist()
    assert kept(outcome, 2) == stream.data(2, 0).ids[together.choices[1]].tolist()
    for client in (1, 3):
        alone = select(matrices[client], 5, seed=seeds(running)[client])
        assert kept(outcome, client) == stream.data(client, 0).ids[alone].tolist()


def test_nothing_is_sent_when_no_client_has_data() -> None:
    stream = Toy(clients=2, tasks=2, sizes={(c, 0): 0 for c in (0, 1)})
    outcome = bench(stream=stream, exchanges=2).run()
    assert all(kept(outcome, c) == [] for c in (0, 1)) and torch.isfinite(outcome.params).all()


def test_what_was_sent_in_another_round_does_not_count() -> None:
    """A client that sent once and was then away chooses by itself, not by weights of other samples."""
    running = bench(exchanges=1)
    states, reply = exchanged(running, [0])[0]
    choosing = pool(running, states, index=3, message={"mean": reply["sum"]})
    assert coordinated._target(Candidates.of(choosing.gradients()), choosing) is None


@pytest.mark.parametrize("kind", ["uncoordinated", "coordinated"])
@pytest.mark.parametrize("y", [[0, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1]])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_zero_gradients_duplicates_and_all_of_them(kind: str, y: list[int], size: int) -> None:
    """Two samples have a zero input, and a linear map without bias no gradient there."""
    x = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 0], [0, 0], [-1, 0]])
    table = {(c, t): (x, torch.tensor(y)) for c in (0, 1) for t in (0, 1)}
    stream = Given(clients=2, tasks=2, rounds_per_task=1, classes=2, table=table)
    train = TrainOptions(1, 6, Optimizer(lr=0.0))
    outcome = bench(size, stream, kind, module=Linear, train=train).run(rounds=1)
    for client in (0, 1):
        ids = kept(outcome, client)
        assert len(ids) == len(set(ids)) == size
        assert size > 4 or not {3, 4} & set(ids)  # samples without direction come last


def test_between_exchanges_a_client_remembers_its_weights_and_nothing_else() -> None:
    running = bench(exchanges=2)
    states, _ = exchanged(running, [0])[0]
    extra = tree.tensor_bytes(states[NAME]) - tree.tensor_bytes(running.new_client()[NAME])
    assert extra == 8 * 12  # one float64 for each of its samples, whatever the network


def select_with_a_thousand_clients() -> None:
    """One selection with an exchange; prints by how many bytes memory has grown."""

    def wide(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return models.build("mlp", shape, classes, 0, {"hidden": [1000]})

    stream = Toy(clients=1000, tasks=2, rounds_per_task=1, samples=20, cohorts={0: (0,), 1: (0,)})
    running = bench(5, stream, exchanges=1, module=wide, train=TrainOptions(1, 20, Optimizer(lr=0.1)))
    assert running.layout().size == 21_004
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = running.run(rounds=1)
    assert all(len(kept(outcome, client)) == 5 for client in range(1000))
    sys.stdout.write(str(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_clients_select_together_in_bounded_memory() -> None:
    """Their gradients, kept, would be 1,000 x 20 x 21,004 x 4 bytes = 1.7 GB. In a process of its own, whose allocator
    returns large pieces to the system instead of leaving holes between the clients' small ones."""
    code = "from tests.methods.test_coordinated import *; select_with_a_thousand_clients()"
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 5e8


def test_the_policy_is_named_in_recipes_by_its_kind() -> None:
    assert make_policy({"kind": "coordinated", "exchanges": 4}) == Coordinated(exchanges=4)
    assert GradientOptions(memory=0.5).limit == 2**29
