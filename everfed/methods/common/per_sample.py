"""The gradients of single samples' losses, from one forward and backward pass of a whole batch.

A layer that maps every sample by itself gives them in closed form, from its input a_n and the gradient g_n that reaches
its output:

    linear layer                     g_n a_n^T
    convolution                      g_n W_n, with W_n the windows of a_n, one for each position
    BatchNorm in evaluation mode     the sum over positions of g_n * normalised a_n

They are for networks of such layers that use each of them once, one row a sample. What else a network does with its
layers can be anything, so the closed forms of a network are tried on a few samples before they are used
(`closed_forms`). Every other network takes the way of `torch.func` (`Network.gradients`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs of a batch, targets of a batch) -> scalar; called with batches of one."""
Named = dict[str, Tensor]
"""By parameter."""
_AT_ONCE = 256 << 20  # bytes of one layer's gradients, or of its windows, that `Layers.squares` forms at once
_TRIED = 8  # samples of the batch on which closed forms are tried
# how far they may be from `torch.func`, of the gradient and of a parameter's part: TF32 rounds, wrong forms are far off
_NEAR, _NEAR_EACH = 0.02, 0.1
_verdicts: WeakKeyDictionary[nn.Module, dict[frozenset[str], bool]] = WeakKeyDictionary()


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

        gradient, params = grad(loss_of_one), dict(self.params)
        try:
            found: Named = vmap(gradient, in_dims=(None, 0, 0))(params, x, y)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # the network branches on data, as transformers' do on a mask: one sample after the other
            single = [gradient(params, *pair) for pair in zip(x, y, strict=True)]
            found = {name: torch.stack([one[name] for one in single]) for name in params}
        return found


def constants(module: nn.Module) -> Named:
    """What of a module is not trained: buffers and frozen parameters."""
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    return {**frozen, **dict(module.named_buffers())}


def closed_forms(network: Network, x: Tensor, y: Tensor) -> Layers | None:
    """The closed forms of a network's gradients, if it has some; tried on the first of these samples when the module
    comes for the first time. One sample cannot show whether samples are mixed."""
    layers, names = Layers.of(network), frozenset(network.params)
    if layers is None or len(x) < 2:
        return None
    known = _verdicts.setdefault(network.module, {})
    if names not in known:
        known[names] = layers.are_right(x[:_TRIED], y[:_TRIED])
    return layers if known[names] else None


@dataclass(frozen=True)
class NamedLayer:
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
    layers: Sequence[NamedLayer]

    @staticmethod
    def of(network: Network) -> Layers | None:
        """None when one of them has none, or when samples are mixed."""
        found = []
        for path, module in network.module.named_modules():
            held = {own: _join(path, own) for own, _ in module.named_parameters(recurse=False)}
            names = {own: name for own, name in held.items() if name in network.params}
            if _mixes_samples(module) or (names and not _has_closed_form(module)):
                return None
            if names:
                found.append(NamedLayer(path, module, names))
        return Layers(network, found) if found else None

    def are_right(self, x: Tensor, y: Tensor) -> bool:
        """Are they, of a batch, what `torch.func` finds for its first and its last sample?"""
        found, ends = self.gradients(x, y), [0, len(x) - 1]
        if found is None:
            return False
        expected = self.network.gradients(x[ends], y[ends])
        sizes = torch.stack([value.norm() for value in expected.values()]).double()
        apart = torch.stack([(found[name][ends] - value).norm() for name, value in expected.items()]).double()
        near = apart.norm() <= _NEAR * sizes.norm() and (apart <= _NEAR_EACH * sizes + 1e-6 * sizes.norm()).all()
        return bool(near and sizes.norm() > 0)  # zeros show nothing

    def gradients(self, x: Tensor, y: Tensor) -> Named | None:
        """(n, ...) of every sample; None for a network that uses its layers in another way."""
        found = self._each(x, y, self._gradient)
        return found and found[0]

    def squares(self, x: Tensor, y: Tensor) -> tuple[Named, int] | None:
        """(the sum over samples of their squares, bytes of what it kept of these samples); no more gradients are formed
        than fit into `_AT_ONCE`. None as above."""
        return self._each(x, y, self._square)

    def _each(
        self, x: Tensor, y: Tensor, compute: Callable[[NamedLayer, str, Tensor, Tensor], Tensor]
    ) -> tuple[Named, int] | None:
        """By parameter: compute(its layer, weight or bias, the layer's input, the gradient of its output); and the
        bytes of these inputs and gradients."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.network.params.items()}
        with torch.enable_grad(), self._watched():
            outputs = self.network.outputs(leaves, x)
            if not (_has_rows(outputs, len(x)) and self._fit(len(x)) and _each_is_used_once(outputs, leaves.values())):
                return None
            inputs, edges = zip(*((layer.inputs[0], layer.outputs[0]) for layer in self.layers), strict=True)
        incoming = vmap(grad(self.network.sample_loss))(outputs.detach(), y)
        gradients = torch.autograd.grad(outputs, edges, incoming)
        if any(a.dtype != g.dtype for a, g in zip(inputs, gradients, strict=True)):  # of an autocast inside the network
            return None
        found = {
            name: compute(layer, own, a, g)
            for layer, a, g in zip(self.layers, inputs, gradients, strict=True)
            for own, name in layer.names.items()
        }
        return found, sum(tensor.nbytes for tensor in (*inputs, *gradients))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While it lasts, calls of the layers are noted."""

        def watch(layer: NamedLayer) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def called(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                if output.requires_grad:
                    layer.inputs.extend(value.detach() for value in inputs)
                    layer.outputs.append(get_gradient_edge(output))  # now: later the output may be changed in place

            return called

        # before users' hooks, which may change the output
        handles = [layer.module.register_forward_hook(watch(layer), prepend=True) for layer in self.layers]
        try:
            yield
        finally:
            for handle, layer in zip(handles, self.layers, strict=True):
                handle.remove()
                layer.inputs.clear()
                layer.outputs.clear()

    def _fit(self, samples: int) -> bool:
        """Was every layer called once, with one row for each sample?"""
        called_once = all(len(layer.outputs) == len(layer.inputs) == 1 for layer in self.layers)
        return called_once and all(_has_rows(layer.inputs[0], samples) for layer in self.layers)

    def _gradient(self, layer: NamedLayer, own: str, a: Tensor, g: Tensor) -> Tensor:
        module = layer.module
        if isinstance(module, nn.Linear):
            return _rows(g).transpose(1, 2) @ _rows(a) if own == "weight" else _rows(g).sum(1)
        if isinstance(module, nn.Conv2d) and own == "weight":
            return _of_convolution(module, a, g)
        if own == "weight":
            names = (_join(layer.path, f"running_{kind}") for kind in ("mean", "var"))
            mean, variance = (self.network.constants[name] for name in names)
            g = g * functional.batch_norm(a, mean, variance, eps=float(module.eps))  # type: ignore[arg-type]
        return g.flatten(2).sum(2)

    def _square(self, layer: NamedLayer, own: str, a: Tensor, g: Tensor) -> Tensor:
        if isinstance(layer.module, nn.Linear) and own == "weight" and _rows(a).shape[1] == 1:
            return _rows(g)[:, 0].square().T @ _rows(a)[:, 0].square()  # a product of two numbers: no need to form it
        window = math.prod(getattr(layer.module, "kernel_size", ())) * a[0].nbytes
        samples = max(1, _AT_ONCE // max(window, self.network.params[layer.names[own]].nbytes))
        parts = zip(a.split(samples), g.split(samples), strict=True)
        return functools.reduce(torch.add, (self._gradient(layer, own, *part).square_().sum(0) for part in parts))


def _mixes_samples(module: nn.Module) -> bool:
    """As it says itself, or because it normalises by the batch."""
    by_batch = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    return by_batch or bool(getattr(module, "mixes_samples", False))


def _has_closed_form(layer: nn.Module) -> bool:
    """Of these very types, as they come: a class derived from one of them may compute something else, and so may a
    layer with a `forward` or with parameters of its own."""
    if "forward" in vars(layer) or not layer._parameters.keys() <= {"weight", "bias"}:
        return False
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, nn.BatchNorm2d)


def _each_is_used_once(outputs: Tensor, leaves: Iterable[Tensor]) -> bool:
    """On the way to the outputs. A layer that is called once uses its own once: what is above that is a use elsewhere,
    which closed forms would leave out."""
    uses = dict.fromkeys(map(id, leaves), 0)
    ahead = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = set(ahead)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            leaf = id(getattr(node, "variable", None))
            if leaf in uses:
                uses[leaf] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                ahead.append(node)
    return all(count == 1 for count in uses.values())


def _has_rows(values: Tensor, samples: int) -> bool:
    """Has it a row for each of so many samples?"""
    return isinstance(values, Tensor) and values.dim() > 0 and len(values) == samples


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
    """(n, groups, *positions, *kernel, channels of a group): a view of what each position of the output sees.
    Channels come last, as they do in memory on a GPU; `functional.unfold` there takes the samples one by one."""
    above, left = map(int, layer.padding)
    padded = functional.pad(a, (left, left, above, above))
    samples, channels, *place = padded.stride()
    own = layer.in_channels // layer.groups
    size = (len(a), layer.groups, *positions, *layer.kernel_size, own)
    steps = [step * stride for step, stride in zip(place, layer.stride, strict=True)]
    inside = [step * dilation for step, dilation in zip(place, layer.dilation, strict=True)]
    return padded.as_strided(size, (samples, channels * own, *steps, *inside, channels))
