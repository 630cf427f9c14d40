"""The gradient of every single sample's loss, in chunks that fit a memory budget.

Two ways to make the rows shorter: differentiate the last layer only, or project every gradient at random. Both are
approximations of the full gradient's direction; a projected one can stand for it everywhere in a selection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from everfed.methods.common.per_sample import Loss, Network, closed_forms
from everfed.methods.replay.random_projection import RandomProjection

DEFAULT_MEMORY = 2**30


@dataclass(frozen=True)
class Bytes:
    """result: of the returned matrix. per_sample: of one sample in flight, its gradient and activations, estimated."""

    result: int
    per_sample: int


def sample_gradients(
    module: Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss_fn: Loss,
    *,
    only: Sequence[str] | None = None,
    projection: RandomProjection | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Tensor:
    """(n, d) gradients of the n single-sample losses at (params, buffers), flattened in the order of `params`.

    x: (n, ...) network inputs. y: (n, ...) targets. Evaluated in eval mode (no dropout, running statistics); the
    module, its weights and its mode are left as they were.
    only: names of the parameters to differentiate (see `last_layer`); all by default. projection: applied to every
    gradient, d = projection.size. memory: bytes that the result and the samples in flight may take, by the estimate of
    `bytes_needed`; a budget that cannot hold the result and one sample is refused.
    """
    names = _names(params, only)
    activations = activation_bytes(module, params, buffers, x, y, loss_fn)
    needed = bytes_needed(params, len(x), only=only, projection=projection, activations=activations)
    width = projection.size if projection else count(params, names)
    rows = next(iter(params.values())).new_empty(len(x), width)
    chunk = _chunk(needed, memory)
    for part, gradients in _chunks(module, params, buffers, x, y, loss_fn, names, chunk):
        if projection:
            rows[part] = projection.project(_flatten(gradients, rows.new_empty(len(rows[part]), count(params, names))))
        else:
            _flatten(gradients, rows[part])
    return rows


def sample_gradient_norms(
    module: Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss_fn: Loss,
    *,
    only: Sequence[str] | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Tensor:
    """(n,) lengths of the gradients that `sample_gradients` would return, without keeping them."""
    names = _names(params, only)
    activations = activation_bytes(module, params, buffers, x, y, loss_fn)
    in_flight = bytes_needed(params, 0, only=only, activations=activations)
    norms = next(iter(params.values())).new_empty(len(x))
    for part, gradients in _chunks(module, params, buffers, x, y, loss_fn, names, _chunk(in_flight, memory)):
        lengths = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
        norms[part] = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
    return norms


def last_layer(params: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the last layer's parameters: those of the module that holds the last parameter."""
    layer = list(params)[-1].rpartition(".")[0]
    return tuple(name for name in params if name.rpartition(".")[0] == layer)


def count(params: Mapping[str, Tensor], names: Sequence[str]) -> int:
    """How many numbers the named parameters hold."""
    return sum(params[name].numel() for name in names)


def bytes_needed(
    params: Mapping[str, Tensor],
    samples: int,
    *,
    only: Sequence[str] | None = None,
    projection: RandomProjection | None = None,
    activations: int = 0,
) -> Bytes:
    """What `sample_gradients` takes for `samples` samples; `activations` as measured by `activation_bytes`."""
    item = next(iter(params.values())).element_size()
    length = count(params, _names(params, only))
    result = samples * (projection.size if projection else length) * item
    # twice the gradients: by parameter, and one flat or transposed copy; thrice the activations: those kept, the
    # gradients flowing back to them, and what convolutions unfold (resident memory measured on two networks)
    return Bytes(result, 2 * length * item + 3 * activations)


def activation_bytes(
    module: Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor, y: Tensor, loss_fn: Loss
) -> int:
    """The bytes one sample keeps alive for its backward pass, measured on the first; 0 without samples."""
    held: dict[int, int] = {}
    weights = {name: value.detach().requires_grad_() for name, value in params.items()}
    fixed = {value.untyped_storage().data_ptr() for value in [*weights.values(), *buffers.values()]}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would hold its graph, and the graph it: memory that is never freed

    with _eval_mode(module), torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        if len(x):
            loss_fn(functional_call(module, (weights, dict(buffers)), (x[:1].clone(),)), y[:1].clone())
    return sum(held.values())


def _chunks(
    module: Module,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    loss_fn: Loss,
    names: Sequence[str],
    chunk: int,
) -> Iterator[tuple[slice, list[Tensor]]]:
    """(rows, their gradients by parameter), `chunk` samples at a time."""
    trained = {name: params[name].detach() for name in names}
    fixed = {name: value.detach() for name, value in params.items() if name not in trained}
    network = Network(module, trained, {**fixed, **buffers}, loss_fn)
    with _eval_mode(module):
        # on a CPU they are no faster for most networks, and would change the last bits of what is selected
        layers = closed_forms(network, x[:chunk], y[:chunk]) if x.is_cuda else None
        for first in range(0, len(x), chunk):
            part = slice(first, min(first + chunk, len(x)))
            by_name = layers.gradients(x[part], y[part]) if layers else None
            if by_name is None:
                layers, by_name = None, network.gradients(x[part], y[part])
            yield part, [by_name[name] for name in names]


def _flatten(gradients: list[Tensor], rows: Tensor) -> Tensor:
    """Write (c, ...) gradients side by side into `rows` (c, d), without a flat copy of each on the way."""
    for target, gradient in zip(rows.split([g[0].numel() for g in gradients], dim=1), gradients, strict=True):
        target.view(gradient.shape).copy_(gradient)
    return rows


def _chunk(needed: Bytes, memory: int) -> int:
    chunk = (memory - needed.result) // needed.per_sample
    if chunk < 1:
        raise ValueError(
            f"memory = {memory} bytes cannot hold the gradients ({needed.result} bytes) and one sample in flight "
            f"({needed.per_sample} bytes): raise it, differentiate the last layer only, or use a projection"
        )
    return chunk


def _names(params: Mapping[str, Tensor], only: Sequence[str] | None) -> tuple[str, ...]:
    """The differentiated parameters, in the order of `params`."""
    unknown = set(only or ()) - set(params)
    if unknown or (only is not None and not only):
        raise ValueError(f"only must name parameters among {', '.join(params)}; got {', '.join(only or ()) or 'none'}")
    return tuple(name for name in params if only is None or name in only)


@contextmanager
def _eval_mode(module: Module) -> Iterator[None]:
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
