"""train.micro_batch: the same training with fewer activations held at once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from everfed import run
from everfed.core.option import TrainOptions
from everfed.engines.eager import new_trainer
from everfed.errors import UserError
from tests.support.toy import Bench, Norm


@pytest.mark.parametrize("method", ["fedcurv", "fedgp+der++", "glfc", "fot", "fedweit", "feddbe"])
def test_the_result_is_that_of_whole_batches(method: str) -> None:
    """Two samples at a time of five: the last micro-batch has one. Sums are taken in another order, hence rounding."""
    bench = Bench(method)
    small = bench.change(train=replace(bench.train, micro_batch=2))
    whole, parts = bench.run(), small.run()
    torch.testing.assert_close(parts.params, whole.params, rtol=1e-4, atol=1e-5)


def saved_bytes(bench: Bench) -> int:
    """The most bytes that the forward pass of one batch of eight samples keeps for the backward pass."""
    setup = bench.setup()
    trainer = new_trainer(setup, bench.build_module)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = trainer.forward(bench.stream.data(0, 0).x[:8])
    torch.autograd.grad(outputs.sum(), trainer.replica.trainable)
    return sum(kept)


def test_activations_are_not_held() -> None:
    """Of a network of three layers only its inputs are."""

    def deep(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        layers = (torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
        return torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(64, classes))

    bench = Bench(module=deep, train=TrainOptions(1, 8))
    small = bench.change(train=replace(bench.train, micro_batch=2))
    assert saved_bytes(small) < saved_bytes(bench) / 4


def test_a_network_that_looks_at_whole_batches_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.micro_batch = 2.*batch\s+normalisation"):
        Bench(module=Norm, train=TrainOptions(1, 4, micro_batch=2)).run()


def test_a_recipe_names_it() -> None:
    recipe = {
        "name": "micro",
        "stream": {"tasks": 1, "clients": 2, "max_train": 40, "max_test": 20},
        "model": {"kind": "mlp", "hidden": [4]},
        "train": {"rounds_per_task": 1, "micro_batch": 5},
        "method": {"name": "fedavg"},
    }
    assert run(recipe).metrics["acc"] >= 0
    with pytest.raises(UserError, match=r"micro_batch"):
        run({**recipe, "train": {"micro_batch": -1}})
