"""The gradients of single samples' losses, from one forward and backward pass of a whole batch.

A layer that maps every sample by itself gives them in closed form, from its input a_n and the gradient g_n that reaches
its output:

    linear layer                     g_n a_n^T
    convolution                      g_n W_n, with W_n the windows of a_n, one for each position
    BatchNorm in evaluation mode     the sum over positions of g_n * normalised a_n

A network with other trained layers, or one that uses a layer twice, takes one gradient for each sample (`torch.func`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs of a batch, targets of a batch) -> scalar; called with batches of one."""
Named = dict[str, Tensor]
"""By parameter."""
_AT_ONCE = 256 << 20  # bytes of one layer's gradients, or of its windows, that `Layers.squares` forms at once


@dataclass(frozen=True)
class Network:
    """A module in eval mode with the values of what is differentiated (params) and of the rest (constants)."""

    module: nn.Module
    params: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    loss: Loss

    def outputs(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(self.module, {**params, **self.constants}, (x,))
        return found

    def sample_loss(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Of one sample's outputs."""
        return self.loss(outputs[None], label[None])

    def gradients(self, x: Tensor, y: Tensor) -> Named:
        """(n, ...) of every sample, whatever the network is made of."""

        def loss_of_one(params: Named, one: Tensor, label: Tensor) -> Tensor:
            return self.loss(self.outputs(params, one[None]), label[None])

        found: Named = vmap(grad(loss_of_one), in_dims=(None, 0, 0))(dict(self.params), x, y)
        return found


@dataclass(frozen=True)
class Layer:
    """A layer of the network and what its calls have left: the input, and where the gradient of the output appears."""

    path: str
    module: nn.Module
    names: Mapping[str, str]  # weight and bias, those that are differentiated -> their names in the network
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)


@dataclass(frozen=True)
class Layers:
    """The layers of a network that hold its `params`, all of which have closed forms."""

    network: Network
    layers: Sequence[Layer]

    @staticmethod
    def of(network: Network) -> Layers | None:
        """None when one of them has none, or when samples are mixed."""
        found = []
        for path, module in network.module.named_modules():
            held = {own: f"{path}.{own}" if path else own for own, _ in module.named_parameters(recurse=False)}
            names = {own: name for own, name in held.items() if name in network.params}
            if getattr(module, "mixes_samples", False) or (names and not _has_closed_form(module)):
                return None
            if names:
                found.append(Layer(path, module, names))
        return Layers(network, found)

    def gradients(self, x: Tensor, y: Tensor) -> Named | None:
        """(n, ...) of every sample; None for a network that uses its layers in another way."""
        return self._each(x, y, self._gradient)

    def squares(self, x: Tensor, y: Tensor) -> Named | None:
        """The sum over samples of their squares; no more gradients are formed than fit into `_AT_ONCE`."""
        return self._each(x, y, self._square)

    @property
    def bytes_kept(self) -> int:
        """By the last pass, about: inputs of layers and gradients of their outputs."""
        return 2 * sum(layer.inputs[0].nbytes for layer in self.layers)

    def _each(self, x: Tensor, y: Tensor, value: Callable[[Layer, str, Tensor, Tensor], Tensor]) -> Named | None:
        """By parameter: value(its layer, weight or bias, the layer's input, the gradient of its output)."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.network.params.items()}
        with torch.enable_grad(), self._watched():
            outputs = self.network.outputs(leaves, x)
        if not (self._fit(len(x)) and len(outputs) == len(x) and _uses(outputs, leaves.values()) == len(leaves)):
            return None
        incoming = vmap(grad(self.network.sample_loss))(outputs.detach(), y)
        gradients = torch.autograd.grad(outputs, [layer.outputs[0] for layer in self.layers], incoming)
        return {
            name: value(layer, own, layer.inputs[0], g)
            for layer, g in zip(self.layers, gradients, strict=True)
            for own, name in layer.names.items()
        }

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While it lasts, calls of the layers are noted; what was noted before is forgotten."""

        def watch(layer: Layer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def called(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                layer.inputs.extend(value.detach() for value in inputs)
                layer.outputs.append(get_gradient_edge(output))  # now: later the output may be changed in place

            return called

        for layer in self.layers:
            layer.inputs.clear()
            layer.outputs.clear()
        handles = [layer.module.register_forward_hook(watch(layer)) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fit(self, samples: int) -> bool:
        """Was every layer called once, with one row for each sample?"""
        return all(
            len(layer.outputs) == len(layer.inputs) == 1 and len(layer.inputs[0]) == samples for layer in self.layers
        )

    def _gradient(self, layer: Layer, own: str, a: Tensor, g: Tensor) -> Tensor:
        module = layer.module
        if isinstance(module, nn.Linear):
            return _rows(g).transpose(1, 2) @ _rows(a) if own == "weight" else _rows(g).sum(1)
        if isinstance(module, nn.Conv2d) and own == "weight":
            return _of_convolution(module, a, g)
        if own == "weight":
            mean, variance = (self.network.constants[f"{layer.path}.running_{kind}"] for kind in ("mean", "var"))
            g = g * functional.batch_norm(a, mean, variance, eps=float(module.eps))  # type: ignore[arg-type]
        return g.flatten(2).sum(2)

    def _square(self, layer: Layer, own: str, a: Tensor, g: Tensor) -> Tensor:
        if isinstance(layer.module, nn.Linear) and own == "weight" and _rows(a).shape[1] == 1:
            return _rows(g)[:, 0].square().T @ _rows(a)[:, 0].square()  # a product of two numbers: no need to form it
        window = math.prod(getattr(layer.module, "kernel_size", ())) * a[0].nbytes
        samples = max(1, _AT_ONCE // max(window, self.network.params[layer.names[own]].nbytes))
        parts = zip(a.split(samples), g.split(samples), strict=True)
        return functools.reduce(torch.add, (self._gradient(layer, own, *part).square_().sum(0) for part in parts))


def _has_closed_form(layer: nn.Module) -> bool:
    """Of these very types: a class derived from one of them may compute something else."""
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear or (type(layer) is nn.BatchNorm2d and bool(layer.track_running_stats))


def _uses(outputs: Tensor, leaves: Iterable[Tensor]) -> int:
    """How often all leaves together are used on the way to the outputs. Layers that are called once use each of theirs
    once: what is above that is a use elsewhere, which closed forms would leave out."""
    wanted, uses = set(map(id, leaves)), 0
    ahead = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = set(ahead)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if id(getattr(node, "variable", None)) in wanted:
                uses += 1
            elif node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return uses


def _rows(values: Tensor) -> Tensor:
    """(n, rows of a sample, features) of what a linear layer is fed with or gives."""
    return values.reshape(len(values), -1, values.shape[-1])


def _of_convolution(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    windows = _windows(layer, a, g.shape[2:])
    shape = (len(a), layer.out_channels, *windows.shape[-3:])
    groups, positions = len(a) * layer.groups, g.shape[2:].numel()
    products = g.reshape(groups, -1, positions) @ windows.reshape(groups, positions, -1)
    return products.view(shape).permute(0, 1, 4, 2, 3)


def _windows(layer: nn.Conv2d, a: Tensor, positions: torch.Size) -> Tensor:
    """(n, groups, *positions, *kernel, channels of a group): what each position of the output sees, without a copy.
    Channels come last, as they do in memory on a GPU; `functional.unfold` there takes the samples one by one."""
    above, left = map(int, layer.padding)
    padded = functional.pad(a, (left, left, above, above))
    samples, channels, *place = padded.stride()
    own = layer.in_channels // layer.groups
    size = (len(a), layer.groups, *positions, *layer.kernel_size, own)
    steps = [step * stride for step, stride in zip(place, layer.stride, strict=True)]
    inside = [step * dilation for step, dilation in zip(place, layer.dilation, strict=True)]
    return padded.as_strided(size, (samples, channels * own, *steps, *inside, channels))
