"""The layers of a network: the head and its inputs, the features; the hidden ones; and the precision they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from everfed.core.layout import EXTRAS, head_name
from everfed.core.trainer import Trainer
from everfed.method import CompositionError, Entry, Layout, Model, Step

CHUNK = 1000  # samples at once in a pass over a client's data


def network(layout: Layout) -> list[Entry]:
    """The network's own parameters, in order, without those that parts add."""
    return [entry for entry in layout.params if not entry.name.startswith(EXTRAS)]


def head_weight(layout: Layout) -> Entry:
    """The weight (classes, features) of the head, the last linear layer."""
    matrices = [entry for entry in network(layout) if len(entry.shape) == 2]
    if not matrices:
        raise ValueError("the model has no linear layer, so no head that features could be given to")
    return matrices[-1]


def head_entries(layout: Layout) -> list[Entry]:
    """The head's weight (classes, features), and its bias (classes,) where it has one."""
    weight = head_weight(layout)
    owner = weight.name.rpartition(".")[0]
    return [weight, *(entry for entry in network(layout) if entry.name == f"{owner}.bias")]


def head(module: nn.Module) -> nn.Module:
    """The head itself."""
    return module.get_submodule(head_name(module).rpartition(".")[0])


def through_head(
    module: nn.Module, x: Tensor, change: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(outputs, features (n, F)) of network inputs x; the head gets change(features)."""
    with head_inputs(module, change) as seen:
        outputs: Tensor = module(x)
    return outputs, seen[0]


@contextmanager
def head_inputs(
    module: nn.Module, change: Callable[[Tensor], Tensor] | None = None, layer: nn.Module | None = None
) -> Iterator[list[Tensor]]:
    """Collects the head's input of every forward pass inside the context; the head gets change(features) instead.
    layer: what counts as the head; by default the last linear layer."""
    seen: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        seen.append(args[0])
        return None if change is None else (change(args[0]),)

    handle = (layer or head(module)).register_forward_pre_hook(before)
    try:
        yield seen
    finally:
        handle.remove()


def keep_features(step: Step) -> None:
    """Keep the head's inputs in the step's next forward pass with gradients; call it in `batches`."""
    if step.trainer.network is not step.module:
        raise CompositionError(f"part {step.name!r} reads the features of every step; leave engine.compile out")

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # not in a teacher's pass through the same module
            handle.remove()
            step.handed["features"] = args[0]

    handle = head(step.module).register_forward_pre_hook(keep)


def kept_features(step: Step) -> Tensor:
    """(n, F) of the real minibatch, which comes first in a forward pass."""
    return step.handed["features"][: len(step.x)].float()


def features(trainer: Trainer, model: Model, x: Tensor) -> Tensor:
    """(n, F) features of samples in storage form under `model`: eval mode, no gradients."""
    return outputs_and_features(trainer, model, x)[1]


def outputs_and_features(trainer: Trainer, model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs (n, classes), features (n, F)) of samples in storage form under `model`, in the same way."""
    trainer.replica.load(model)
    module = trainer.replica.module.eval()
    with torch.no_grad(), in_precision(trainer):
        chunks = [through_head(module, trainer.stream.inputs(part.to(trainer.device))) for part in x.split(CHUNK)]
    outputs, found = zip(*chunks, strict=True)
    return torch.cat(outputs).float(), torch.cat(found).float()


def class_means(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    """(classes, F) mean of the rows (n, F) of every class; zeros for a class without samples."""
    sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)
    return sums / torch.bincount(y, minlength=classes).clamp(min=1).unsqueeze(1)


def span(entries: Iterable[Entry]) -> slice:
    """The slice of a parameter vector that consecutive entries take."""
    listed = list(entries)
    return slice(listed[0].start, listed[-1].start + listed[-1].size)


# hidden layers, and the precision -------------------------------------------------------------------------------------
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
