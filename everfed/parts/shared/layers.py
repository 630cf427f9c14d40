"""Which of a network's weights are layers that a method treats one by one, and how to run a network beside training."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everfed.core.extras import EXTRAS
from everfed.core.layout import Entry, Layout
from everfed.core.trainer import Trainer


def hidden_names(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Of (name, shape) of all parameters in order: the weights of convolutions (4-D) and of linear layers (2-D), but
    not the head, which is the last linear layer, and nothing that a method added to the network."""
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


def in_precision(trainer: Trainer) -> torch.autocast:
    """The context in which the trainer's module runs in the engine's precision."""
    return torch.autocast(trainer.device.type, torch.bfloat16, enabled=trainer.precision == "bf16")
