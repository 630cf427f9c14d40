"""The hidden layers of a network, for methods that treat layers one by one, and the precision that networks run in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from everfed.core.layout import EXTRAS
from everfed.core.trainer import Trainer
from everfed.method import Entry, Layout


def hidden_names(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Of (name, shape) of all parameters in order: the weights of convolutions (4-D) and of linear layers (2-D), but
    not the head (the last linear layer), and no parameters that parts added."""
    own = [(name, len(shape)) for name, shape in shapes if not name.startswith(EXTRAS)]
    head = [name for name, dimensions in own if dimensions == 2][-1:]
    return [name for name, dimensions in own if dimensions in (2, 4) and name not in head]


def hidden_weights(layout: Layout) -> list[Entry]:
    """The same, as entries of a layout."""
    names = hidden_names((entry.name, entry.shape) for entry in layout.params)
    return [entry for entry in layout.params if entry.name in names]


def fan_in(entry: Entry) -> int:
    """m: inputs per output of a layer."""
    return entry.size // entry.shape[0]


@contextmanager
def constant(module: nn.Module) -> Iterator[None]:
    """Inside, forward passes record no gradients for the module's own parameters, only for its inputs."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def in_precision(trainer: Trainer) -> torch.autocast:
    """The context in which the trainer's module runs in the engine's precision."""
    return torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.precision == "bf16")
