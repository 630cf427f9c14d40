"""FOT (Bakman et al., 2024): sketches, bases and the projected update."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed import models
from everfed.core.context import Hidden, TrainOptions
from everfed.core.layout import Layout
from everfed.core.message import Model
from everfed.core.optimizer import Optimizer
from everfed.core.tree import equal
from everfed.method import Client, CompositionError, Server
from everfed.methods import registry as methods
from everfed.methods.common.layers import fan_in, hidden_weights
from everfed.methods.project.fot import FOT, Sketch, directions, extended, input_columns, outside, wanted_share
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Norm, Toy


def fot(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fot": options}


class Deep(nn.Module):
    """Two convolutions (one strided), a BatchNorm, a hidden linear layer and a head, all without biases."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.conv2 = nn.Conv2d(3, 4, 2, stride=2, bias=False)
        self.dense = nn.Linear(16, 6, bias=False)
        self.head = nn.Linear(6, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.norm(self.conv1(x)))))
        return self.head(torch.relu(self.dense(x.flatten(1))))  # type: ignore[no-any-return]


def orthonormal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))[0]


def transformed(bench: Bench, bases: dict[str, Tensor], new: Tensor) -> Tensor:
    """The parameters after FOT's projection of a round that went from the first model to `new`."""
    before: Model = bench.model()
    server = bench.server("fot", {"fot": {"bases": bases}}, before=before, model={**before, "params": new})
    bench.build_method().part("fot").update(server)
    return server.model["params"]


def perturbed(bench: Bench) -> Tensor:
    params = bench.model()["params"]
    return params + torch.randn(len(params), generator=torch.Generator().manual_seed(9))


DEEP = Bench("fot", fot(threshold=0.6), module=Deep, train=TrainOptions(2, 5, Optimizer(lr=0.05)))


# the projected update ------------------------------------------------------------------------------------------------
def test_the_projected_update_is_orthogonal_to_the_basis() -> None:
    bases = {e.name: orthonormal(fan_in(e), fan_in(e) // 2) for e in hidden_weights(DEEP.layout())}
    moved = transformed(DEEP, bases, perturbed(DEEP)) - DEEP.model()["params"]
    for entry in hidden_weights(DEEP.layout()):
        g = entry.view(moved).reshape(entry.shape[0], -1)
        assert g.norm() > 0.1
        assert (g @ bases[entry.name]).norm() < 1e-5 * g.norm()


# the bases -----------------------------------------------------------------------------------------------------------
def test_the_bases_are_orthonormal_and_grow() -> None:
    ranks = []
    for rounds in (2, 4):
        bases = DEEP.change(stream=Toy(tasks=3)).run(rounds=rounds).state.server["fot"]["bases"]
        for basis in bases.values():
            assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-5)
        ranks.append(sum(basis.shape[1] for basis in bases.values()))
    assert 0 < ranks[0] <= ranks[1]


# which directions are added ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("rho", "share"), [(1.0, 0.87), (0.5, 0.74), (0.2, 0.35), (0.13, 0.0), (0.1, 0.0), (0.0, 0.0)])
def test_the_share_that_is_still_wanted(rho: float, share: float) -> None:
    assert wanted_share(rho, 0.87) == pytest.approx(share, abs=1e-9)


def test_as_many_directions_as_hold_more_than_the_share() -> None:
    sketch = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0]))  # energies 9, 4, 1 of 14
    assert [directions(sketch, share).shape[1] for share in (0.0, 0.5, 0.65, 0.9, 0.95)] == [0, 1, 2, 2, 3]
    assert torch.allclose(directions(sketch, 0.65).abs(), torch.eye(4)[:, :2], atol=1e-6)


# sketches ------------------------------------------------------------------------------------------------------------
def test_the_sum_of_sketches_is_the_sketch_of_all_data() -> None:
    bench = Bench("fot", module=Deep)
    entry, basis = hidden_weights(bench.layout())[0], orthonormal(9, 3)
    rng = torch.Generator().manual_seed(0)
    pieces = [torch.randn(9, n, generator=rng) for n in (20, 35)]
    sketches = [Sketch(entry, 4, basis, bench.client("fot", number=k)) for k in range(2)]
    blocks = []
    for sketch, x in zip(sketches, pieces, strict=True):
        generator = torch.Generator().manual_seed(sketch.generator.initial_seed())
        blocks.append(torch.randn(x.shape[1], 4, generator=generator))
        sketch.add(x)
    whole = outside(torch.cat(pieces, dim=1).T, basis).T @ torch.cat(blocks)
    assert torch.allclose(sketches[0].total + sketches[1].total, whole, atol=1e-4)
    assert not methods.build("fot").reveals()  # so secure aggregation is possible


def test_the_share_outside_the_basis() -> None:
    bench = Bench("fot", module=Deep)
    entry, basis = hidden_weights(bench.layout())[0], torch.eye(9)[:, :1]
    x = torch.zeros(9, 2)
    x[0], x[1] = 3.0, 4.0
    shares = []
    for known in (None, basis):
        sketch = Sketch(entry, 4, known, bench.client("fot"))
        assert sketch.share() == 0.0
        sketch.add(x)
        shares.append(sketch.share().item())
    assert shares == [1.0, pytest.approx(0.8)]


def test_the_share_outside_is_weighted_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 4 and 12 samples: rho = (4 rho_0 + 12 rho_1) / 16 in every layer."""
    sent: dict[int, Tensor] = {}
    arrived: list[Tensor] = []
    sketch, extend = FOT.sketch, FOT.extend

    def sketched(self: FOT, client: Client) -> Any:
        found = sketch(self, client)
        sent[client.id] = found["outside"]
        return found

    def extended_by(self: FOT, server: Server) -> None:
        arrived.append(server.reduced["outside"])
        extend(self, server)

    monkeypatch.setattr(FOT, "sketch", sketched)
    monkeypatch.setattr(FOT, "extend", extended_by)
    stream = Toy(clients=2, tasks=3, rounds_per_task=1, sizes={(0, 1): 4, (1, 1): 12}, only={0: (0,), 1: (1, 2, 3)})
    DEEP.change(stream=stream).run(rounds=2)
    assert (sent[0] - sent[1]).abs().min() > 1e-3  # so that the weights matter in every layer
    torch.testing.assert_close(arrived[-1], (4 * sent[0] + 12 * sent[1]) / 16)


# what it reduces to --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [None, Norm, Deep])
def test_the_first_task_is_fedavg_to_the_bit(module: Any) -> None:
    bench = Bench("fedavg", module=module)
    assert equal(bench.run(rounds=2).state.model, bench.change(method="fot").run(rounds=2).state.model)


def test_weighting_by_samples_is_warned_about() -> None:
    assert "uniformly" in methods.build("fot", {"fedavg": {"weighting": "samples"}}).warnings[0]
    assert not methods.build("fot").warnings


# what it protects ----------------------------------------------------------------------------------------------------
def test_a_layers_outputs_on_inputs_in_the_span_do_not_change() -> None:
    bench = DEEP.change(stream=Toy(tasks=2, rounds_per_task=3))
    first, last = bench.run(rounds=3).state, bench.run().state
    for entry in hidden_weights(bench.layout()):
        basis = first.server["fot"]["bases"][entry.name]
        inputs = basis @ torch.randn(basis.shape[1], 7, generator=torch.Generator().manual_seed(1))
        before, after = (entry.view(s.model["params"]).reshape(entry.shape[0], -1) @ inputs for s in (first, last))
        assert torch.allclose(before, after, atol=1e-5)
        assert not torch.equal(entry.view(first.model["params"]), entry.view(last.model["params"]))


# a full basis --------------------------------------------------------------------------------------------------------
def test_a_full_basis_freezes_its_layer() -> None:
    frozen, free = hidden_weights(DEEP.layout())[:2]
    start, new = DEEP.model()["params"], perturbed(DEEP)
    found = transformed(DEEP, {frozen.name: orthonormal(fan_in(frozen), fan_in(frozen))}, new)
    assert torch.allclose(frozen.view(found), frozen.view(start), atol=1e-5)
    assert torch.allclose(free.view(found), free.view(new), atol=1e-6)


# what is never projected ---------------------------------------------------------------------------------------------
def test_heads_and_batchnorm_are_never_projected() -> None:
    assert [e.name for e in hidden_weights(DEEP.layout())] == ["conv1.weight", "conv2.weight", "dense.weight"]
    bases = {e.name: orthonormal(fan_in(e), fan_in(e)) for e in hidden_weights(DEEP.layout())}
    new = perturbed(DEEP)
    found = transformed(DEEP, bases, new)
    for name in ("norm.weight", "norm.bias", "head.weight"):
        entry = DEEP.layout().param(name)
        assert torch.allclose(entry.view(found), entry.view(new), atol=1e-6)


# no task id ----------------------------------------------------------------------------------------------------------
def test_no_task_id_is_read() -> None:
    stream = ClassToy(task_ids=False)
    bench = DEEP.change(stream=stream)
    with pytest.raises(Hidden):
        _ = bench.context().task
    bench.run()


# what the layers see -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=False), nn.Linear(4, 5, bias=False)])
def test_the_columns_are_what_the_layer_multiplies(layer: nn.Module) -> None:
    shape = (3, 2, 5, 5) if isinstance(layer, nn.Conv2d) else (3, 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    columns = input_columns(layer, x)
    expected = layer(x).transpose(0, 1).reshape(5, -1) if isinstance(layer, nn.Conv2d) else layer(x).T
    assert torch.allclose(layer.weight.reshape(5, -1) @ columns, expected, atol=1e-5)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 2, 3, padding="same"), nn.Embedding(5, 2)]
)
def test_layers_it_cannot_project_are_named_before_the_run(layer: nn.Module) -> None:
    module = nn.ModuleDict({"block": layer, "head": nn.Linear(2, 2)})
    with pytest.raises(CompositionError, match=f"cannot project block.weight.*{type(layer).__name__}.*trainable"):
        FOT().adapt(module, cast(Server, None))


# bytes ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("columns", "numbers"), [(0, 5 * (9 * 9 + 12 * 12 + 16 * 16)), (4, 4 * (9 + 12 + 16))])
def test_a_task_ends_with_one_sketch_per_layer_and_client(columns: int, numbers: int) -> None:
    traffic = DEEP.change(options=fot(sketch_cols=columns)).run(rounds=2).state.traffic
    assert traffic.up["fot"] == 3 * 4 * (numbers + 3)  # three clients; the shares of three layers beside the sketches


def test_on_resnet18_square_sketches_are_368_megabytes_and_those_of_the_authors_five_times_that() -> None:
    layout = Layout.of(models.build("resnet18", (3, 32, 32), 10, 0))
    layers = hidden_weights(layout)
    assert len(layers) == 20 and all(len(entry.shape) == 4 for entry in layers)
    whole = 4 * sum(fan_in(e) * FOT(sketch_factor=1).columns(e) for e in layers)
    assert 365e6 < whole < 368.5e6  # with the 3x3 stem of this network; 368 MB is the count for a 7x7 stem
    assert sum(fan_in(e) * FOT().columns(e) for e in layers) == 5 * whole // 4
    assert 4 * sum(fan_in(e) * FOT(sketch_cols=256).columns(e) for e in layers) == 4 * 256 * sum(map(fan_in, layers))


def test_every_layer_may_have_five_columns_an_input() -> None:
    """The default, as in the authors' ResNets: five times the fan-in, whatever the layer."""
    columns = [FOT().columns(entry) for entry in hidden_weights(DEEP.layout())]
    assert columns == [5 * 9, 5 * 12, 5 * 16]


def test_few_columns_hold_less_than_the_threshold() -> None:
    """Inputs of 144 dimensions with energies 1/j: five columns a dimension come within 0.05 of the threshold, one for
    every 18 (as 256 columns are for the 4,608 inputs of ResNet-18's last layers) falls short by more than a third."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(144, 20_000, generator=rng) / torch.arange(1, 145).sqrt().unsqueeze(1)
    held = {}
    for columns in (5 * 144, 144 // 18):
        basis = directions(x @ torch.randn(20_000, columns, generator=rng), 0.87)
        held[columns] = float((basis.T @ x).square().sum() / x.square().sum())
    assert held[5 * 144] == pytest.approx(0.87, abs=0.05)
    assert held[144 // 18] < 0.87 * 2 / 3


def test_max_rank_bounds_the_server_state() -> None:
    bench = DEEP.change(options=fot(threshold=1.0, max_rank=3), stream=Toy(tasks=4))
    bases = bench.run().state.server["fot"]["bases"]
    assert {basis.shape[1] for basis in bases.values()} == {3}


def test_samples_bounds_what_a_client_sketches(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: list[int] = []
    add = Sketch.add
    monkeypatch.setattr(Sketch, "add", lambda self, x: (columns.append(x.shape[1]), add(self, x))[1])
    DEEP.change(options=fot(samples=5), stream=Toy(clients=1)).run(rounds=2)
    assert columns == [5 * 16, 5 * 4, 5]


@given(old=st.integers(0, 4), new=st.integers(0, 4))
def test_extending_keeps_the_span(old: int, new: int) -> None:
    basis, more = orthonormal(8, old, 1), torch.randn(8, new, generator=torch.Generator().manual_seed(2))
    found = extended(basis, more, 8)
    assert found.shape == (8, old + new)
    assert outside(torch.cat([basis, more], dim=1).T, found).norm() < 1e-5


def test_the_threshold_rises_after_every_task() -> None:
    part, bench = FOT(threshold=0.5, threshold_step=0.3, sketch_factor=1), DEEP
    layers = hidden_weights(bench.layout())
    sketch = torch.cat([torch.diag(torch.ones(fan_in(e)))[:, : part.columns(e)].reshape(-1) for e in layers[:2]])
    dense = torch.zeros(16, 80)
    dense[:, :16] = torch.eye(16)
    reduced = {"sketch": torch.cat([sketch, dense.reshape(-1)]), "outside": torch.ones(3)}
    ranks = []
    for n in range(3):
        server = bench.server("fot", {"fot": {"finished": n}}, reduced=reduced, phase="subspace")
        part.extend(server)
        ranks.append(server.state["bases"]["conv2.weight"].shape[1])
    assert ranks == [7, 10, 12]  # more than 0.5, 0.8 and 1.0 of twelve equal directions


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("threshold", 0.0),
        ("threshold", 1.1),
        ("threshold_step", -0.1),
        ("sketch_cols", -1),
        ("samples", -1),
        ("max_rank", -1),
    ],
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.fot\.{option} must be"):
        methods.build("fot", fot(**{option: value}))
