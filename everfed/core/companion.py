"""Networks of a method's own beside the shared model: a generator, a discriminator, a flow.

In slots, messages and checkpoints such a network is a `Model`, the vectors params, stats and counters, like the shared
one. The module that computes with them is built from a blueprint, once per trainer (`Trainer.companion`), and holds no
state that matters: to use a frozen network call `evaluated`, to train one load its replica, and read the vectors back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from everfed.core.layout import Layout
from everfed.core.part import Model
from everfed.core.replica import Replica


class Blueprint(Hashable, Protocol):
    """What a network is built from; equal blueprints build networks of the same layout."""

    def build(self) -> nn.Module:
        """A network with weights drawn from torch's generator, as layers usually do."""


def first_vectors(blueprint: Blueprint, seed: int) -> Model:
    """The network's first weights, on the host; the same seed gives the same on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = blueprint.build()
    return Layout.of(module).read(module)


def tensors(layout: Layout, model: Model) -> dict[str, Tensor]:
    """Views of a model's vectors under the names that its module has for them."""
    named = (("params", layout.params), ("stats", layout.stats), ("counters", layout.counters))
    return {entry.name: entry.view(model[vector]) for vector, entries in named for entry in entries}


def evaluated(replica: Replica, model: Model, *inputs: Tensor) -> Any:
    """What the replica's module gives with `model`'s tensors in place of its own: eval mode, no gradient, neither the
    replica nor `model` is changed. May be part of a captured step: it reads the vectors where they lie."""
    with torch.no_grad(), in_eval_mode(replica.module):
        return functional_call(replica.module, tensors(replica.layout, model), inputs)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, and afterwards in the mode it was in."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
