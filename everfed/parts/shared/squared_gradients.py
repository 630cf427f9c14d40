"""The squared gradients of single samples, summed, from forward and backward passes of whole batches.

A layer that maps every sample by itself gives them in closed form, from its input a_n and the gradient g_n that reaches
its output:

    linear layer                     (g_n a_n^T)^2, whose sum over samples is (g^2)^T a^2 where a sample is one row
    convolution                      (g_n W_n)^2, with W_n the windows of a_n, one for each position
    BatchNorm in evaluation mode     (sum over positions of g_n * normalised a_n)^2

A network with other trained layers, or one that uses a layer twice, takes one gradient for each sample (`torch.func`).
"""

from __future__ import annotations

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
Squares = dict[str, Tensor]
"""By parameter, the sum over samples of the squared gradient."""
_FIRST = 8  # samples of the first pass, which shows how much memory one takes


def squared_gradients(
    module: nn.Module,
    params: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    memory: int,
) -> Squares:
    """Of each sample's loss at (params, constants), in eval mode, in which the module is left.

    x: (n, ...) network inputs. memory: bytes that samples which are computed together may take, about.
    """
    module.eval()
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    network, start, size = Network(module, params, constants, loss), 0, _FIRST
    by_layers = Layers.of(network)
    while start < len(x):
        part = x[start : start + size], y[start : start + size]
        found = by_layers and by_layers.squares(*part)
        if not found:
            by_layers, found = None, network.squares(*part)
        squares, used = found
        for name, value in squares.items():
            total[name] += value
        start, size = start + size, max(1, memory * len(part[0]) // used)
    return total


@dataclass(frozen=True)
class Network:
    """A module with the values of what is trained (params) and of what is not (constants), and the task's loss."""

    module: nn.Module
    params: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    loss: Loss

    def outputs(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(self.module, {**params, **self.constants}, (x,))
        return found

    def squares(self, x: Tensor, y: Tensor) -> tuple[Squares, int]:
        """(sample by sample, the bytes that it took)."""

        def sample_loss(params: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
            return self.loss(self.outputs(params, one[None]), label[None])

        grads = vmap(grad(sample_loss), in_dims=(None, 0, 0))(dict(self.params), x, y)
        return {name: each.square().sum(0) for name, each in grads.items()}, _bytes(grads.values())


# layer by layer ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """A layer of the network and what its calls have left: the input, and where the gradient of the output appears."""

    path: str
    module: nn.Module
    names: Mapping[str, str]  # weight and bias, those that are trained -> their names in the network
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge] = field(default_factory=list)


@dataclass(frozen=True)
class Layers:
    """The trained layers of a network, all of which have closed forms."""

    network: Network
    layers: Sequence[Layer]

    @staticmethod
    def of(network: Network) -> Layers | None:
        """None when a trained layer has none, or when samples are mixed."""
        found = []
        for path, module in network.module.named_modules():
            held = {own: f"{path}.{own}" if path else own for own, _ in module.named_parameters(recurse=False)}
            names = {own: name for own, name in held.items() if name in network.params}
            if getattr(module, "mixes_samples", False) or (names and not _has_closed_form(module)):
                return None
            if names:
                found.append(Layer(path, module, names))
        return Layers(network, found)

    def squares(self, x: Tensor, y: Tensor) -> tuple[Squares, int] | None:
        """(of all samples at once, the bytes that it took); None for a network that uses its layers in another way."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.network.params.items()}
        with torch.enable_grad(), self._watched():
            outputs = self.network.outputs(leaves, x)
        if not (self._fit(len(x)) and len(outputs) == len(x) and _uses(outputs, leaves.values()) == len(leaves)):
            return None
        loss = self.network.loss
        incoming = vmap(grad(lambda one, label: loss(one[None], label[None])))(outputs.detach(), y)
        edges = [layer.outputs[0] for layer in self.layers]
        gradients = torch.autograd.grad(outputs, edges, incoming)
        found = {}
        for layer, g in zip(self.layers, gradients, strict=True):
            for own, name in layer.names.items():
                found[name] = self._square(layer, own, layer.inputs[0], g).view_as(leaves[name])
        largest = max(_bytes([value]) for value in leaves.values())
        return found, _bytes([*gradients, *(layer.inputs[0] for layer in self.layers)]) + 2 * len(x) * largest

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While it lasts, calls of the layers are noted, where the next ones forget the last."""

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

    def _square(self, layer: Layer, own: str, a: Tensor, g: Tensor) -> Tensor:
        module = layer.module
        if isinstance(module, nn.Linear):
            return _of_linear(_rows(a), _rows(g)) if own == "weight" else _rows(g).sum(1).square().sum(0)
        if isinstance(module, nn.Conv2d) and own == "weight":
            return _of_convolution(module, a, g)
        if own == "weight":
            mean, variance = (self.network.constants[f"{layer.path}.running_{kind}"] for kind in ("mean", "var"))
            g = g * functional.batch_norm(a, mean, variance, eps=float(module.eps))  # type: ignore[arg-type]
        return g.flatten(2).sum(2).square().sum(0)


def _has_closed_form(layer: nn.Module) -> bool:
    """Of these very types: a class derived from one of them may compute something else."""
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear or (type(layer) is nn.BatchNorm2d and bool(layer.track_running_stats))


def _uses(outputs: Tensor, leaves: Iterable[Tensor]) -> int:
    """How often all leaves together are used on the way to the outputs. Layers that are called once use each of theirs
    once: what is above that is a use elsewhere, and the square of a sum is no sum of squares."""
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


def _of_linear(a: Tensor, g: Tensor) -> Tensor:
    if a.shape[1] == 1:
        return g[:, 0].square().T @ a[:, 0].square()
    return _sum_of_squares(g.transpose(1, 2) @ a)


def _rows(values: Tensor) -> Tensor:
    """(n, rows of a sample, features) of what a linear layer is fed with or gives."""
    return values.reshape(len(values), -1, values.shape[-1])


def _of_convolution(layer: nn.Conv2d, a: Tensor, g: Tensor) -> Tensor:
    windows = _windows(layer, a, g.shape[2:])
    shape = (len(a), layer.out_channels, *windows.shape[-3:])
    groups, positions = len(a) * layer.groups, g.shape[2:].numel()
    products = g.reshape(groups, -1, positions) @ windows.reshape(groups, positions, -1)
    return _sum_of_squares(products.view(shape)).permute(0, 3, 1, 2)


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


def _sum_of_squares(products: Tensor) -> Tensor:
    """Over samples, the first dimension; in place, for the products are large."""
    return products.square_().sum(0)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
