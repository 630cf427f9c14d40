"""A model instance whose parameters live in one vector, ready to be loaded with anybody's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everfed.core.dropout import adopt
from everfed.core.layout import Layout
from everfed.core.part import Model


class Replica:
    """Module, its vectors and its dropout generator on one device. Reused for client after client."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.layout = layout
        vectors = self.layout.read(module)
        self.module = module.to(device)
        self.params, self.stats, self.counters = (vectors[k].to(device) for k in ("params", "stats", "counters"))
        self.layout.bind(self.module, self.params, self.stats, self.counters)
        adopt(self.module, self.generator)
        named = dict(self.module.named_parameters())
        self.trainable: list[Tensor] = [named[entry.name] for entry in layout.params]

    def load(self, model: Model) -> None:
        """Copy a model's vectors in; the module sees them at once."""
        self.params.copy_(model["params"], non_blocking=True)
        self.stats.copy_(model["stats"], non_blocking=True)
        self.counters.copy_(model["counters"], non_blocking=True)

    def model(self) -> Model:
        """A copy of the vectors."""
        return {"params": self.params.clone(), "stats": self.stats.clone(), "counters": self.counters.clone()}
