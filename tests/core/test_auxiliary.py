"""Auxiliary networks beside the shared model, batches of network inputs, and loops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from everfed.core.layout import Layout
from everfed.core.replica import Replica, frozen_forward, initial_weights
from everfed.core.tree import clone, equal
from everfed.method import Batch, Method, Part, Step, compose
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.toy import Bench, Norm


@dataclass(frozen=True)
class NormBlueprint:
    classes: int = 2

    def build(self) -> nn.Module:
        return Norm((1, 4, 4), self.classes)


def test_the_same_seed_gives_the_same_weights_and_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (initial_weights(NormBlueprint(), seed) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not torch.equal(first["params"], other["params"])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_frozen_network_computes_with_the_vectors_it_is_given_and_nothing_changes() -> None:
    trainer, x = Bench().trainer(), torch.randn(3, 1, 4, 4)
    replica = trainer.auxiliary(NormBlueprint())
    assert trainer.auxiliary(NormBlueprint()) is replica
    assert trainer.auxiliary(NormBlueprint(3)) is not replica
    mine, model = clone(replica.model()), initial_weights(NormBlueprint(), 5)
    untouched = clone(model)
    replica.module.train()
    outputs = frozen_forward(replica, model, x)
    assert equal(model, untouched)
    assert equal(replica.model(), mine)
    assert replica.module.training
    replica.load(model)
    assert torch.equal(replica.module.eval()(x), outputs)
    assert not outputs.requires_grad


def test_a_frozen_network_in_bfloat16_has_the_outputs_of_one_that_was_loaded() -> None:
    """Layers that run in bfloat16 get views of one copy, the others the vectors themselves."""
    module = NormBlueprint().build()
    replica, x = Replica(module, Layout.of(module), torch.device("cpu"), "bf16"), torch.randn(3, 1, 4, 4)
    model = initial_weights(NormBlueprint(), 5)
    given = replica.tensors(model)
    assert {name for name, t in given.items() if t.dtype == torch.bfloat16} == {
        "conv.weight", "conv.bias", "head.weight", "head.bias"
    }  # fmt: skip
    assert given["conv.weight"].untyped_storage().data_ptr() == given["head.bias"].untyped_storage().data_ptr()
    assert given["norm.weight"].untyped_storage().data_ptr() == model["params"].untyped_storage().data_ptr()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = frozen_forward(replica, model, x)
        replica.load(model)
        assert torch.equal(replica.module.eval()(x), outputs)


def test_a_thing_is_made_once_for_each_key_and_one_at_a_time() -> None:
    trainer, made = Bench().trainer(), []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [trainer.made("place", key, make) for key in ("a", "a", "b", "a")] == [0, 0, 1, 2]


def test_a_loop_runs_its_body() -> None:
    trainer, counter = Bench().trainer(), torch.zeros(())
    loop = trainer.loop(lambda: counter.add_(1.0) and None, [counter], torch.Generator())
    loop(3)
    loop(0)
    assert counter.item() == 3.0


@dataclass(frozen=True)
class Brings(Part):
    """Brings a copy of the real batch, in storage form or as network inputs, and notes the outputs."""

    ready: bool = False
    joined: bool = True
    noted: list[Tensor] = field(default_factory=list, compare=False)

    name = "brings"

    def batches(self, step: Step) -> dict[str, Batch]:
        x = step.inputs(step.x) if self.ready else step.x
        return {"brings": Batch(x, step.y, joined=self.joined, ready=self.ready)}

    def loss(self, step: Step) -> Tensor | None:
        outputs = step.batches["brings"].outputs
        assert outputs is not None
        self.noted.append(outputs.detach().clone())
        return None


def outputs_of(ready: bool, joined: bool, module: type[nn.Module] | None) -> list[Tensor]:
    part = Brings(ready, joined)

    def method() -> Method:
        return compose(FedAvg(), part)

    Bench(method, module=module).run(rounds=1)
    return part.noted


def test_network_inputs_give_what_the_same_samples_in_storage_form_give() -> None:
    for module in (None, Norm):
        for joined in (True, False):
            stored, ready = (outputs_of(form, joined, module) for form in (False, True))
            assert all(torch.equal(a, b) for a, b in zip(stored, ready, strict=True))
