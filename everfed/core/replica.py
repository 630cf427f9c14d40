"""A model instance whose parameters live in one vector, ready to be loaded with anybody's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from everfed.core.dropout import adopt
from everfed.core.layout import Layout
from everfed.core.part import Model

_LOW = (_ConvNd, nn.Linear)  # layers that run in bfloat16: matrix units do their work


class Replica:
    """Module, its vectors and its dropout generator on one device. Reused for client after client.

    In bf16 the weights of convolutions and linear layers are bfloat16 copies of the float32 vector, made for all of
    them at once (`refresh`) instead of one by one in every forward pass; the vector stays the truth.

    mixes_samples: does a sample's output depend on the others in its forward pass, as with BatchNorm? A layer of your
    own that does so says it with an attribute of this name.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, precision: str = "fp32") -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.layout = layout
        vectors = layout.read(module)
        self.module = module.to(device)
        self.params, self.stats, self.counters = (vectors[k].to(device) for k in ("params", "stats", "counters"))
        layout.bind(self.module, self.params, self.stats, self.counters)
        adopt(self.module, self.generator)
        named = dict(self.module.named_parameters())
        self.trainable: list[Tensor] = [named[entry.name] for entry in layout.params]
        self.mixes_samples = any(
            isinstance(m, _BatchNorm) or getattr(m, "mixes_samples", False) for m in module.modules()
        )
        self.low: Tensor | None = None
        if precision == "bf16":
            self._lower()

    def _lower(self) -> None:
        low = torch.empty_like(self.params, dtype=torch.bfloat16)
        owners = [m for m in self.module.modules() if isinstance(m, _LOW)]
        lowered = {id(p) for owner in owners for p in owner.parameters(recurse=False)}
        for entry, parameter in zip(self.layout.params, self.trainable, strict=True):
            if id(parameter) in lowered:
                parameter.data = entry.view(low)
        self.low = low
        self.refresh()

    def load(self, model: Model) -> None:
        """Copy a model's vectors in; the module sees them at once."""
        self.params.copy_(model["params"], non_blocking=True)
        self.stats.copy_(model["stats"], non_blocking=True)
        self.counters.copy_(model["counters"], non_blocking=True)
        self.refresh()

    def refresh(self) -> None:
        """Bring the module up to date after the vector changed."""
        if self.low is not None:
            self.low.copy_(self.params)

    def vectors(self) -> list[Tensor]:
        """Every vector that training changes in place."""
        return [self.params, self.stats, self.counters, *([] if self.low is None else [self.low])]

    def gradient(self, loss: Tensor, span: slice | None = None) -> Tensor:
        """(P,) float32 gradient of `loss`, or the slice `span` of it; zeros where it does not depend on a parameter."""
        if span is None:
            return self.layout.flatten_gradient(torch.autograd.grad(loss, self.trainable, materialize_grads=True))
        chosen = {entry.name for entry in self.layout.within(span)}
        some = [p for e, p in zip(self.layout.params, self.trainable, strict=True) if e.name in chosen]
        return self.layout.flatten_gradient(torch.autograd.grad(loss, some, materialize_grads=True), span)

    def model(self) -> Model:
        """A copy of the vectors."""
        return {"params": self.params.clone(), "stats": self.stats.clone(), "counters": self.counters.clone()}
