"""The gradient of every single sample's loss, in chunks that fit a memory budget.

Two ways to make the rows shorter: differentiate the last layer only, or project every gradient at random. Both are
approximations of the full gradient's direction; a projected one can stand for it everywhere in a selection.

The projection keeps cosines and is the same at every client. It is a sparse sign matrix with one entry per column: each
run of k coordinates is shuffled, given random signs and added to the k outputs. Inner products are kept in expectation
with an error of about 1/sqrt(k) times the lengths, at O(d) work, and the matrix itself is never formed: the shuffle and
signs of run b come from (seed, b) alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from everfed.core import random
from everfed.core.context import Context
from everfed.core.option import HasOptions
from everfed.method import Model, option
from everfed.methods.common.per_sample import Network, closed_forms, constants
from everfed.naming import with_options

DEFAULT_MEMORY = 2**30


# at a client's model --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GradientOptions(HasOptions):
    """How policies compute gradients of samples. Drawn augmentations are the same in all exchanges of a round."""

    layers: str = option("all", one_of=("all", "last"), about="differentiate all parameters, or the last layer's")
    projection: int = option(
        0,
        at_least=0,
        about="dimensions of a random projection, the same at all clients, also of what is sent (0: none)",
    )
    memory: float = option(1.0, above=0, about="GiB that gradients may take (twice that where there are draws)")
    draws: int = option(
        0,
        at_least=0,
        about="mean over so many drawn augmentations of each sample, such as masks of a language model (0: as stored)",
    )

    @property
    def limit(self) -> int:
        """Bytes that gradients may take."""
        return int(self.memory * 2**30)

    @staticmethod
    def of(value: Mapping[str, Any] | GradientOptions) -> GradientOptions:
        """From a table of options. Raises ValueError, which names the key."""
        return value if isinstance(value, GradientOptions) else with_options(GradientOptions, value, "gradients")


def gradients_at(context: Context, model: Model, x: Tensor, y: Tensor, options: GradientOptions) -> Tensor:
    """(n, d) gradients of the n single-sample task losses at `model`, in eval mode; samples in storage form."""
    context.train.replica.load(model)
    samples = _drawn(context, x, y, options.draws)
    total = gradients_here(context, *next(samples), options)
    for more in samples:
        total += gradients_here(context, *more, options)
    return total.div_(options.draws) if options.draws > 1 else total


def _drawn(context: Context, x: Tensor, y: Tensor, draws: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples under `draws` augmentations; as they are where there are none."""
    stream = context.train.stream
    # not by phase or repeat: a client solves for the same gradients in every exchange
    rng = random.generator(context.seed, "gradient draws", context.round, context.client)
    for _ in range(max(1, draws)):
        drawn = stream.draw_augmentation(rng, len(x)) if draws else None
        yield (x, y) if drawn is None else stream.augment_samples(x, y, torch.from_numpy(drawn).to(x.device))


def gradients_here(context: Context, x: Tensor, y: Tensor, options: GradientOptions) -> Tensor:
    """The same at the parameters that the replica holds now, such as those of the current training step."""
    trainer, network = context.train, _network(context)
    # one projection for all clients of a run, in all rounds: their sums are added up
    seed = random.key(context.seed, "gradient projection")
    return sample_gradients(
        network,
        trainer.stream.inputs(x.to(trainer.device)),
        y.to(trainer.device),
        only=_sendable(context, network.params, options.layers),
        projection=RandomProjection(options.projection, seed) if options.projection else None,
        memory=options.limit,
    )


def norms_at(context: Context, model: Model, x: Tensor, y: Tensor, memory: int) -> Tensor:
    """(n,) lengths of the full gradients of the single-sample task losses at `model`, in eval mode."""
    trainer = context.train
    trainer.replica.load(model)
    inputs = trainer.stream.inputs(x.to(trainer.device))
    return sample_gradient_norms(_network(context), inputs, y.to(trainer.device), memory=memory)


def _network(context: Context) -> Network:
    """The replica's module with its parameters as they are now, and the task loss."""
    trainer, replica = context.train, context.train.replica
    params = replica.layout.named(replica.params)  # float32, whatever the module computes in
    return Network(replica.module, params, constants(replica.module), trainer.task_loss(context))


def _sendable(context: Context, params: Mapping[str, Tensor], layers: str) -> Sequence[str] | None:
    """The parameters to differentiate; personal ones never, since what comes of it may be sent."""
    layout = context.facts.layout
    shared = [entry.name for entry in layout.params if entry.start < layout.shared]
    if layers == "last":
        return last_layer({name: params[name] for name in shared})
    return None if len(shared) == len(params) else shared


# of any network -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bytes:
    """result: of the returned matrix. per_sample: of one sample in flight, its gradient and activations, estimated."""

    result: int
    per_sample: int


def sample_gradients(
    network: Network,
    x: Tensor,
    y: Tensor,
    *,
    only: Sequence[str] | None = None,
    projection: RandomProjection | None = None,
    memory: int = DEFAULT_MEMORY,
) -> Tensor:
    """(n, d) gradients of the n single-sample losses of a network, flattened in the order of its `params`.

    x: (n, ...) network inputs. y: (n, ...) targets. Evaluated in eval mode (no dropout, running statistics); the
    module, its weights and its mode are left as they were.
    only: names of the parameters to differentiate (see `last_layer`); all by default. projection: applied to every
    gradient, d = projection.size. memory: bytes that the result and the samples in flight may take, by the estimate of
    `bytes_needed`; a budget that cannot hold the result and one sample is refused.
    """
    params = network.params
    names, activations = _names(params, only), activation_bytes(network, x, y)
    needed = bytes_needed(params, len(x), only=only, projection=projection, activations=activations)
    width = projection.size if projection else count(params, names)
    rows = next(iter(params.values())).new_empty(len(x), width)
    for part, gradients in _chunks(network, x, y, names, _chunk(needed, memory)):
        if projection:
            rows[part] = projection.project(_flatten(gradients, rows.new_empty(len(rows[part]), count(params, names))))
        else:
            _flatten(gradients, rows[part])
    return rows


def sample_gradient_norms(network: Network, x: Tensor, y: Tensor, *, memory: int = DEFAULT_MEMORY) -> Tensor:
    """(n,) lengths of the gradients that `sample_gradients` would return, without keeping them."""
    params = network.params
    in_flight = bytes_needed(params, 0, activations=activation_bytes(network, x, y))
    norms = next(iter(params.values())).new_empty(len(x))
    for part, gradients in _chunks(network, x, y, tuple(params), _chunk(in_flight, memory)):
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


def activation_bytes(network: Network, x: Tensor, y: Tensor) -> int:
    """The bytes one sample keeps alive for its backward pass, measured on the first; 0 without samples."""
    held: dict[int, int] = {}
    weights = {name: value.detach().requires_grad_() for name, value in network.params.items()}
    fixed = {value.untyped_storage().data_ptr() for value in [*weights.values(), *network.constants.values()]}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would hold its graph, and the graph it: memory that is never freed

    watched = torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept)
    with _eval_mode(network.module), torch.enable_grad(), watched:
        if len(x):
            network.loss(network.outputs(weights, x[:1].clone()), y[:1].clone())
    return sum(held.values())


def _chunks(
    network: Network, x: Tensor, y: Tensor, names: Sequence[str], chunk: int
) -> Iterator[tuple[slice, list[Tensor]]]:
    """(rows, their gradients by the parameters of these names), `chunk` samples at a time."""
    trained = {name: network.params[name].detach() for name in names}
    fixed = {name: value.detach() for name, value in network.params.items() if name not in trained}
    network = replace(network, params=trained, constants={**fixed, **network.constants})
    with _eval_mode(network.module):
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


# a random projection --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RandomProjection:
    """From any d to `size` dimensions. Equal (size, seed) project equally, on every machine and device."""

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def project(self, rows: Tensor) -> Tensor:
        """(n, d) -> (n, size). Up to d = size nothing is lost: coordinates are only shuffled and signed."""
        full, rest = divmod(rows.shape[1], self.size)
        projected = rows.new_zeros(len(rows), self.size)
        sources, signs = _full_runs(self, full, rows.device)
        for piece, places, sign in zip(rows.split(self.size, dim=1), sources, signs, strict=False):
            projected += piece.index_select(1, places) * sign.to(rows.dtype)
        if rest:
            slots, last_signs = map(torch.from_numpy, self.run(full, rest))
            projected[:, slots.to(rows.device)] += rows[:, -rest:] * last_signs.to(rows)
        return projected

    def run(self, number: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Distinct output slots and signs of the `length` coordinates of one run."""
        # raw words, because numpy promises that their stream never changes
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, number])).random_raw(self.size)
        return np.argsort(raw, kind="stable")[:length], (raw[:length] & np.uint64(1)).astype(np.int8) * 2 - 1


@lru_cache(maxsize=4)  # drawing them takes longer than the projection of a minibatch; 9 bytes a coordinate
def _full_runs(projection: RandomProjection, runs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sources, signs), (runs, size) each: output k of a run is its coordinate sources[k], times signs[k]."""
    sources = np.empty((runs, projection.size), dtype=np.int64)
    signs = np.empty(sources.shape, dtype=np.int8)
    for number in range(runs):
        slots, own = projection.run(number, projection.size)
        sources[number, slots] = np.arange(projection.size)
        signs[number, slots] = own
    return torch.from_numpy(sources).to(device), torch.from_numpy(signs).to(device)
