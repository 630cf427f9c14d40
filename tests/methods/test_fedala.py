"""FedALA: the mixture of the client's own and the global upper layers, and how its weights are learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.handle import Client
from everfed.core.message import Model, State
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from everfed.methods.personal.fedala import ALA
from tests.support.toy import Bench, Given, Linear, Norm, Toy, mean_square

HEAD = 8 * 4 + 4  # weight and bias of the toy's head, the last entries of its vector


def mixed(part: ALA, weights: Tensor | float, bench: Bench | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(mixture, global, own) of random vectors; `own` is as long as the mixed part."""
    bench = bench or Bench("fedala")
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(bench.layout().size, generator=generator)
    where = part.upper(bench.layout())
    own = torch.randn(where.stop - where.start, generator=generator)
    model: Model = {**bench.model(), "params": theta}
    state = {"ala": {"own": own, "weights": torch.as_tensor(weights).expand_as(own)}}
    return part.personalise(bench.client("ala", state, model=model))["params"], theta, own


def started(part: ALA, bench: Bench, state: State, **more: Any) -> Client:
    """The client after `start`."""
    client = bench.client("ala", state, **more)
    part.start(client)
    return client


def test_weights_of_one_take_the_global_upper_layers() -> None:
    mixture, theta, _ = mixed(ALA(), 1.0)
    assert torch.allclose(mixture, theta, atol=1e-6)


def test_weights_of_zero_keep_the_clients_own() -> None:
    mixture, theta, own = mixed(ALA(), 0.0)
    assert torch.equal(mixture[-HEAD:], own)
    assert torch.equal(mixture[:-HEAD], theta[:-HEAD])  # lower layers are always global


@pytest.mark.parametrize(("layers", "size"), [(1, 4), (2, 36), (3, 44), (4, 172), (0, 172), (99, 172)])
def test_the_upper_part_is_the_last_tensors_and_zero_means_all(layers: int, size: int) -> None:
    where = ALA(layers=layers).upper(Bench("fedala").layout())
    assert (where.stop - where.start, where.stop) == (size, 172)


def test_the_first_round_changes_nothing() -> None:
    bench = Bench("fedala")
    model = bench.model()
    client = started(ALA(), bench, bench.new_client(), model=model)
    assert client.model is model and not client.state
    assert torch.equal(Bench("fedala").run(rounds=1).params, Bench("fedavg").run(rounds=1).params)


def test_own_equal_to_global_changes_nothing() -> None:
    bench = Bench("fedala")
    model = bench.model()
    state = {"ala": {"own": model["params"][-HEAD:].clone()}}
    assert started(ALA(), bench, state, model=model).model is model


@pytest.mark.parametrize("layers", [0, 2])
def test_weights_stay_in_the_unit_interval(layers: int) -> None:
    outcome = Bench("fedala", {"ala": {"layers": layers, "eta": 50.0}}).run()
    for client in outcome.clients.values():
        weights = client["ala"]["weights"]
        assert weights.min() >= 0.0 and weights.max() <= 1.0
        assert weights.numel() == client["ala"]["own"].numel() == (HEAD if layers else 172)
        assert (weights < 1.0).any()


def test_weights_that_do_not_learn_give_fedavg() -> None:
    still = Bench("fedala", {"ala": {"eta": 0.0}}, module=Norm).run()
    assert torch.allclose(still.params, Bench("fedavg", module=Norm).run().params, atol=1e-5)


def test_one_epoch_by_hand() -> None:
    """Half the mean squared error of w . x on one batch; W <- clip(W - eta grad (.) (theta_g - theta_k))."""
    x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, -1.0])
    stream = Given(clients=1, tasks=1, table={(0, 0): (x, y)}, classes=1, objective=mean_square)
    bench = Bench("fedala", {}, stream, TrainOptions(1, 10, Optimizer(lr=0.1)), Linear)
    part, theta = ALA(eta=0.3, share=1.0, max_epochs=1), torch.tensor([0.8, 0.4])
    mine = torch.tensor([-0.2, 0.1])
    model: Model = {**bench.model(), "params": theta}
    client = started(part, bench, {"ala": {"own": mine}}, model=model)
    gradient = (x * (x @ theta - y).unsqueeze(1)).mean(0)  # at the mixture with W = 1, the global model
    weights = (1.0 - 0.3 * gradient * (theta - mine)).clamp(0.0, 1.0)
    assert torch.allclose(client.state["weights"], weights, atol=1e-6)
    assert torch.allclose(client.model["params"], mine + weights * (theta - mine), atol=1e-6)
    assert 0.0 < float(weights.min()) < 1.0


def test_the_first_learning_goes_on_until_the_loss_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs: list[int] = []
    original = ALA._epoch

    def counted(self: ALA, *args: Any) -> tuple[Tensor, float]:
        epochs.append(args[-1])
        return original(self, *args)

    monkeypatch.setattr(ALA, "_epoch", counted)
    Bench("fedala", stream=Toy(clients=2)).run()
    assert epochs == [*range(10), *range(10), 0, 0, 0, 0]  # at least ten the first time, in round 2; then one a round
    epochs.clear()
    Bench("fedala", {"ala": {"threshold": 0.0, "max_epochs": 13}}, Toy(clients=2)).run(rounds=2)
    assert epochs == [*range(13), *range(13)]


def test_learning_moves_nothing_but_the_weights() -> None:
    bench, part = Bench("fedala", module=Norm), ALA()
    model = bench.model()
    before = {k: v.clone() for k, v in model.items()}
    where = part.upper(bench.layout())
    state = {"ala": {"own": torch.zeros(where.stop - where.start)}}
    after = started(part, bench, state, model=model, round_index=1).model
    assert all(torch.equal(before[k], model[k]) for k in model)
    assert torch.equal(after["stats"], model["stats"])
    assert torch.equal(after["params"][: where.start], model["params"][: where.start])


def test_weights_are_learned_on_a_share_of_consecutive_samples() -> None:
    """Half of 12 samples, from another place in every round; of all of them there is one piece; one sample is left of
    a share that is smaller."""
    bench = Bench()
    data = bench.stream.data(0, 0)

    def piece(share: float, index: int) -> list[int]:
        return ALA(share=share)._piece(bench.client("ala", round_index=index, data=data)).ids.tolist()

    halves = [piece(0.5, index) for index in range(4)]
    assert all(half == list(range(half[0], half[0] + 6)) and half[-1] < 12 for half in halves)
    assert len({half[0] for half in halves}) > 1
    assert piece(1.0, 0) == list(range(12)) and len(piece(0.01, 0)) == 1


def test_the_current_tasks_data_is_used() -> None:
    """In the first round of the second task W is learned from where the first task left it, on the second's data."""
    bench, part = Bench("fedala", stream=Toy(clients=2)), ALA()
    before = bench.run(rounds=2)
    after = bench.run(rounds=3).clients[0]["ala"]["weights"]
    learned = [
        started(
            part, bench, before.clients[0], model=before.state.model, data=bench.stream.data(0, task), round_index=2
        ).state["weights"]
        for task in (1, 0)
    ]
    assert torch.equal(learned[0], after) and not torch.equal(learned[1], after)


def test_a_client_alone_is_its_own_global_model() -> None:
    assert "weights" not in Bench("fedala", stream=Toy(clients=1)).run().clients[0]["ala"]


def test_it_is_scored_on_the_clients_and_sends_what_fedavg_sends() -> None:
    assert methods.build("fedala").personal
    ours, plain = (Bench(n).run(rounds=1).state.traffic.as_dict() for n in ("fedala", "fedavg"))
    assert (ours["bytes_up"], ours["bytes_down"]) == (plain["bytes_up"], plain["bytes_down"])


@pytest.mark.parametrize(
    "options", [{"layers": -1}, {"share": 0.0}, {"share": 1.1}, {"eta": -1.0}, {"window": 1}, {"max_epochs": 0}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=next(iter(options))):
        methods.build("fedala", {"ala": options})
